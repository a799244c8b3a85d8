"""Batches are as large as the stated memory allows, and their memory stays within it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random

import msgspec
import psutil
import pytest
import torch
from measuring_parts import bench_of, sweep

from cachetree.errors import ConfigError
from profiles.compute.models import ModelSource, Pair, load_pair
from profiles.compute.room import (
    GIB,
    MOST_POSITIONS,
    MOST_ROWS,
    Bounds,
    Room,
    Sizes,
    bounds_of,
    make_room,
    require_fitting,
)
from profiles.data.documents import Document, Question
from profiles.data.metrics import Metric
from profiles.data.tasks import Task
from profiles.environment import free_memory_bytes, memory_bytes, slow_dtype
from profiles.random_models import VOCAB_SIZE, shape, write_models
from profiles.stats.choice import grid

STATUS = Path("/proc/self/status")
NUM_LAYERS, MAX_NEW = 4, 3
SMALL_GB, LARGE_GB = 0.17, 1.2
# Of Llama 3 8B in bf16.
SIZES = Sizes(
    num_layers=32,
    kv=4096,
    e=8192,
    attended=20480,
    inner=151552,
    seen=6,
    distribution=3078144,
    choice=769536,
    sums=268533768,
)


def make_document(num_prefix: int, num_questions: int) -> Document:
    random = Random(num_prefix)

    def tokens(num_tokens: int) -> tuple[int, ...]:
        return tuple(random.choices(range(4, VOCAB_SIZE), k=num_tokens))

    return Document(
        context="00",
        prefix=tokens(num_prefix),
        questions=tuple(
            Question(suffix=tokens(9), draft=tokens(MAX_NEW), answers=("w5",), name=f"q{i}")
            for i in range(num_questions)
        ),
        task=Task(name="random", template="{context} {input}", metric=Metric.F1, max_new=MAX_NEW),
    )


LONG, SHORT = make_document(4000, 6), make_document(100, 1)


def room(max_memory_gb: float, documents: Iterable[Document] = (LONG,)) -> Room:
    return make_room(SIZES, documents, 65, Bounds(host=int(max_memory_gb * GIB)))


def test_batches_shrink_with_the_bound():
    rooms = [room(gb) for gb in (1000, 64, 32, 16, 8, 6)]
    assert rooms[0] == Room(rows=MOST_ROWS, positions=MOST_POSITIONS)
    rows, positions = [it.rows for it in rooms], [it.positions for it in rooms]
    assert rows == sorted(rows, reverse=True)
    assert positions == sorted(positions, reverse=True)
    assert rows[0] > rows[3] > rows[4] > rows[5] >= 1
    assert positions[0] > positions[4] > positions[5] >= 1


def test_the_largest_document_decides():
    assert room(8, [SHORT, LONG]) == room(8, [LONG, SHORT]) == room(8)
    assert room(8, [SHORT]).rows > room(8).rows


def test_run_that_does_not_fit_is_refused_with_one_that_would():
    with pytest.raises(ConfigError) as caught:
        room(1.5, [SHORT, LONG])
    message = str(caught.value)
    pattern = (
        r"--max-memory-gb is 1\.5, and a context of 4000 tokens \(question q0\) needs (\d\.\d\d); "
        r"raise it, or cut contexts with --max-prompt-tokens"
    )
    matched = re.fullmatch(pattern, message)
    assert matched, message
    need = float(matched[1])
    assert room(need).rows >= 1
    with pytest.raises(ConfigError, match=f"needs {need}"):
        room(need - 0.01)


def test_a_pair_of_32_layers_at_10_000_tokens_fits_a_host_of_8_gib_and_a_card_beside_its_weights():
    """The models are two of Llama 3 8B in bf16, with 30 GiB of weights together. With 80 GiB they
    share a card. A card with a single model also has room for the other's share of the work."""
    document = make_document(10_000, 3)
    host, weights = int(7.5 * GIB), 15 * GIB
    of_both, of_one = (
        make_room(SIZES, [document], 65, Bounds(host=host, device=device))
        for device in (80 * GIB - 2 * weights, 24 * GIB - weights)
    )
    assert of_both.rows >= 24 and of_both.positions == MOST_POSITIONS
    assert of_one.rows >= 3
    with pytest.raises(ConfigError, match=r"--max-memory-gb is 7, .*needs 7\.33"):
        make_room(SIZES, [document], 65, Bounds(host=7 * GIB, device=50 * GIB))
    with pytest.raises(ConfigError, match=r"--max-device-memory-gb is 3, .*needs \d"):
        make_room(SIZES, [document], 65, Bounds(host=host, device=3 * GIB))


def test_unstated_memory_limit_is_most_of_the_free_memory():
    free = psutil.virtual_memory().total
    bounds = bounds_of(None, None, torch.device("cpu"))
    assert bounds.device is None and 0 < bounds.host < free
    assert bounds_of(2.0, None, torch.device("cpu")) == Bounds(host=2 * GIB)


def test_slow_dtype_is_named(monkeypatch):
    times = {torch.bfloat16: 2.1, torch.float16: 1.9, torch.float32: 1.0}
    monkeypatch.setattr("profiles.environment._product_s", times.__getitem__)
    host = torch.device("cpu")
    (line,) = slow_dtype(torch.bfloat16, host)
    assert line.startswith("bfloat16 takes more than twice the time of float32")
    assert "--dtype float32" in line
    assert not [*slow_dtype(torch.float16, host), *slow_dtype(torch.float32, host)]
    assert not [*slow_dtype(torch.bfloat16, torch.device("cuda"))]


def test_a_container_has_what_is_left_of_its_limits(tmp_path, monkeypatch):
    """The free memory is the least in all control groups around the process. Cached files count as
    free."""

    def write(folder: Path, limit: str, used: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 7\ninactive_file 20\nactive_file 10\n")

    monkeypatch.setattr("profiles.environment._GROUPS", tmp_path)
    monkeypatch.setattr("profiles.environment._GROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/pod/own\n")
    without = free_memory_bytes()
    assert without > 1000
    write(tmp_path / "pod", "1000", 100)
    write(tmp_path / "pod" / "own", "max", 50)
    assert free_memory_bytes() == 1000 - 100 + 30
    assert bounds_of(None, None, torch.device("cpu")).host == int(0.8 * 930)
    write(tmp_path / "pod" / "own", "500", 50)
    assert free_memory_bytes() == 500 - 50 + 30
    assert memory_bytes() == 500
    (tmp_path / "cgroup").write_text("0::/\n")
    assert free_memory_bytes() > 1000
    assert memory_bytes() == psutil.virtual_memory().total


def test_a_container_of_the_first_control_groups_has_its_limit(tmp_path, monkeypatch):
    """Inside the container, its own group is mounted as the outermost."""
    monkeypatch.setattr("profiles.environment._GROUPS", tmp_path)
    monkeypatch.setattr("profiles.environment._GROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("5:cpu:/docker/a\n4:memory:/docker/a\n")
    (group := tmp_path / "memory").mkdir()
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("100\n")
    (group / "memory.stat").write_text("inactive_file 20\nactive_file 10\n")
    assert (memory_bytes(), free_memory_bytes()) == (1000, 1000 - 100 + 30)


def test_memory_of_the_fit_of_maps_is_counted():
    """Maps from 15 layers of Llama 3 8B need 4 GiB for sums, and memory to solve one map."""
    host, pattern = 8 * GIB, r", with maps of E from 15 layers, needs (\d\.\d\d); .* larger --group"
    messages = []
    for bounds in (Bounds(host=host, device=GIB), Bounds(host=GIB)):
        with pytest.raises(ConfigError, match=pattern) as caught:
            require_fitting(SIZES, [SHORT, LONG], 15, bounds)
        messages.append(str(caught.value))
    flags = [
        it.partition(" is 1, and a context of 4000 tokens (question q0), ")[0] for it in messages
    ]
    assert flags == ["--max-device-memory-gb", "--max-memory-gb"]
    need = float(re.search(pattern, messages[0])[1])
    assert 15 * SIZES.sums < need * GIB < 28 * SIZES.sums
    require_fitting(SIZES, [SHORT, LONG], 15, Bounds(host=host, device=int(need * GIB)))
    with pytest.raises(ConfigError, match=r"--max-memory-gb is 0\.5"):
        require_fitting(SIZES, [LONG], 15, Bounds(host=GIB // 2, device=host))


class Measured(msgspec.Struct, frozen=True):
    rows: int
    grown: int
    """Bytes by which the process's peak memory grew."""


@pytest.mark.skipif(
    not (STATUS.exists() and "VmHWM" in STATUS.read_text()), reason="needs Linux's /proc"
)
def test_a_sweep_stays_within_the_bound():
    """The sweep runs in a new process, so its memory is only its own."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    small, large = msgspec.json.decode(done.stdout.splitlines()[-1], type=tuple[Measured, Measured])
    assert small.grown <= SMALL_GB * GIB, small
    assert large.grown <= LARGE_GB * GIB, large
    assert large.rows >= 4 * small.rows
    assert large.grown > 1.5 * small.grown, "larger batches use no more memory: what is measured?"


def measure() -> tuple[Measured, Measured]:
    """Measure with the small bound first, because the peak memory of a process never falls."""
    torch.set_num_threads(1)
    config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
    with tempfile.TemporaryDirectory() as folder:
        sender, receiver = write_models(Path(folder), config, ["sender", "receiver"], std=0.3)
        pair = load_pair(ModelSource(path=sender), ModelSource(path=receiver))
    swept(pair, make_document(48, 2), 1.0)
    document = make_document(1600, 6)
    before = kib("VmRSS")
    return tuple(
        Measured(swept(pair, document, gb), 1024 * (kib("VmHWM") - before))
        for gb in (SMALL_GB, LARGE_GB)
    )


def swept(pair: Pair, document: Document, max_memory_gb: float) -> int:
    """Return the number of rows in each batch."""
    with bench_of(pair, [document], max_memory_gb) as bench:
        sweep(bench, [document], grid(NUM_LAYERS, 1), pruned=False)
    return bench.receiver.room.rows


def kib(field: str) -> int:
    """Return the peak memory in KiB. getrusage would return the parent's peak if that was larger at
    the fork."""
    (line,) = (it for it in STATUS.read_text().splitlines() if it.startswith(field))
    return int(line.split()[1])


if __name__ == "__main__":
    print(msgspec.json.encode(measure()).decode())
