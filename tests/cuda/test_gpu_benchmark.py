"""A rehearsal of `make gpu`. On a virtual device its parts run; without a device they say that they
cannot."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import flashinfer
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
from test_flashinfer import NAMES
from transformers import AutoModelForCausalLM
from virtual_cuda import VirtualCuda

from benchmarks import lora
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    adapters,
    attention,
    copies,
    overlap,
    parts,
    random_weights,
    servers,
    throughput,
)
from benchmarks.gpu.parts import Found, NotHere, Part, attempt, within
from benchmarks.serving_study.client import Answer, Ask
from cachetree.checkpoint import first_difference
from cachetree.checkpoint.safetensors_files import layer_of
from profiles.environment import read_environment
from profiles.random_models import shape
from sglang_droidspeak.fleet.servers import ServerSpec
from sglang_droidspeak.request.load import Copies, Loader
from sglang_droidspeak.start.config import parse_settings
from sglang_droidspeak.store.rows import KernelRows

ROOT = Path(__file__).parents[2]
SERVED = ("overlap", "oracle", "quantised", "ttft", "throughput", "lora")
"""Parts that run SGLang."""
WITHOUT_SGLANG = """
import json, sys, types
names = ("sglang", "sglang.srt", "sglang.srt.platforms")
for name in names:  # For the virtual device alone, which tells SGLang that memory can be pinned.
    sys.modules[name] = types.ModuleType(name)
sys.modules[names[-1]].current_platform = types.SimpleNamespace(is_pin_memory_available=None)
sys.path.insert(0, "tests/cuda")
from virtual_cuda import VirtualCuda
for name in names:
    del sys.modules[name]
sys.modules["sglang"] = None
from benchmarks.gpu import __main__ as gpu, copies, parts
from benchmarks.gpu.parts import attempt
copies.HEADS, copies.HIDDEN, copies.LAYERS, copies.REPEATS, copies.PAGE = 1, 128, 2, 1, 4
parts.torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
found = {}
with VirtualCuda():
    for name in ("captured", "pinned", *sys.argv[1:]):
        attempt(gpu.PARTS[name], 16, lambda it: found.update({name: it}))
print(json.dumps(found))
"""
FIXTURES = Path(__file__).parent / "flashinfer"
BFLOAT16 = 0.02


SMALL = {"HEADS": 1, "HIDDEN": 128, "LAYERS": 2, "REPEATS": 1, "PAGE": 4}


def test_copies_run_and_nothing_races(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(copies, name, value)
    with VirtualCuda() as cuda:
        assert list(copies.captured(16)) == [{"wrong_rows": 0}]
        *_, speeds = copies.pinned(16)
        assert speeds.keys() == {"pinned_gb_per_s", "pageable_gb_per_s"}
    assert not cuda.races, cuda.races[0]


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy page by page, as the engine does; its own kernel needs a device."""
    pages = [it[::page_size].tolist() for it in (src_indices, dst_indices)]
    for source, into in zip(src_layers, dst_layers, strict=True):
        for of, to in zip(*pages, strict=True):
            into[to : to + page_size].copy_(source[of : of + page_size], non_blocking=True)


def test_stand_in_for_copies_of_pages_has_the_parameters_of_sglangs():
    """The package cannot be imported without CUDA's driver."""
    (folder,) = importlib.util.find_spec("sgl_kernel").submodule_search_locations  # type: ignore[union-attr]
    tree = ast.parse((Path(folder) / "kvcacheio.py").read_text())
    (theirs,) = (it for it in tree.body if getattr(it, "name", "") == transfer_kv_direct.__name__)
    assert [it.arg for it in theirs.args.args] == [*signature(transfer_kv_direct).parameters]  # type: ignore[attr-defined]


@pytest.fixture
def device(monkeypatch) -> Iterator[VirtualCuda]:
    """A virtual device with small layers, and with all ways to copy."""
    for name, value in SMALL.items():
        monkeypatch.setattr(copies, name, value)
    monkeypatch.setattr(overlap, "WIDE", 128)
    monkeypatch.setattr(overlap, "CHUNK", 8)
    monkeypatch.setattr(KernelRows, "most_tokens", 16)
    module = SimpleNamespace(transfer_kv_direct=transfer_kv_direct)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(kvcacheio=module))
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", module)
    with VirtualCuda() as cuda:
        yield cuda


def test_all_ways_to_copy_run_beside_a_layer_and_nothing_races(device):
    *_, results = overlap.overlap(4)
    assert not device.races, device.races[0]
    for length in (1, 4, 16):
        assert results[f"{length}_compute_ms"] == 1
        for way in overlap.WAYS:
            assert results[f"{length}_{way}_exposed_ms_per_layer"] == 0
            assert f"{length}_{way}_gb_per_s" in results


@pytest.mark.parametrize(
    ("compute_ms", "copies_ms", "both_ms", "goal"),
    [
        (10.0, 6.0, 10.4, "met"),
        (10.0, 6.0, 11.0, "missed"),
        (10.0, 12.0, 13.0, "copies take longer than the compute"),
    ],
)
def test_goal_is_met_if_copies_add_at_most_a_twentieth(
    monkeypatch, compute_ms, copies_ms, both_ms, goal
):
    """Each turn's time of both is compared with the same turn's compute: a device's clock
    drifts."""
    times = [[it, 2 * it, it] for it in (compute_ms, copies_ms, both_ms)]
    monkeypatch.setattr(copies, "turns_ms", lambda *_: times)
    loads: Any = SimpleNamespace(num_bytes=6e6)
    results = overlap._measured(None, loads, SimpleNamespace(run=None), {"dma": print})  # type: ignore[arg-type]
    assert results["dma_goal"] == goal
    added_ms = both_ms - compute_ms
    assert results["dma_exposed_ms_per_layer"] == pytest.approx(added_ms / copies.LAYERS, abs=1e-4)
    assert results["dma_gb_per_s"] == round(6 / copies_ms, 2)


@pytest.mark.parametrize("way", ["nothing", "error"])
def test_copies_that_fill_no_slots_are_not_timed(device, way):
    loads = copies.Loads(8, pin=True)
    loader = Loader(copies.LAYERS, Copies(None, "cuda"))
    broken = {"nothing": lambda _layer: None, "error": lambda _layer: 1 / 0}[way]
    with pytest.raises(RuntimeError, match=r"do not hold|was not copied"):
        loads.check(overlap.loaded(loader, loads, broken, lambda: None))
    loader.close()


def test_all_parts_take_fifteen_minutes_and_the_first_takes_five():
    """The fifteen minutes have one minute more for start and stop. The first part leaves a margin,
    too."""
    assert sum(it.most_s for it in gpu.PARTS.values()) <= 840
    assert [*gpu.PARTS][:5] == ["ttft", "overlap", "throughput", "lora", "oracle"]
    assert gpu.PARTS["ttft"].most_s <= 285


def test_what_a_part_found_is_told_when_it_ends(monkeypatch, capsys):
    """The device may be taken away before the part's last line."""
    reported = []
    monkeypatch.setattr(gpu, "within", lambda _command, most_s, _report: {"had_s": most_s})
    assert gpu.alone(16, lambda *it: reported.append(it), "pinned", 20) == {"had_s": 20}
    assert reported == [("pinned", {"had_s": 20})]
    assert capsys.readouterr().err == 'pinned: {"had_s": 20}\n'
    monkeypatch.setenv(parts.REHEARSAL, "1")
    assert gpu.alone(16, lambda *_: None, "ttft", 20) == {"had_s": 100}


@pytest.mark.parametrize("name", gpu.PARTS)
def test_a_part_says_what_this_machine_lacks(name, monkeypatch):
    reports: list[Found] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attempt(gpu.PARTS[name], 16, reports.append)
    assert reports == [{"not_run": "there is no CUDA device"}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda _name: None)
    package = {"flashinfer": "flashinfer", **dict.fromkeys(SERVED, "sglang")}.get(name)
    if package is not None:
        attempt(gpu.PARTS[name], 16, reports.append)
        assert reports[1:] == [{"not_run": f"{package} is not installed"}]


def test_what_needs_no_sglang_runs_without_it():
    script = [sys.executable, "-c", WITHOUT_SGLANG, *SERVED]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert results["captured"] == {"wrong_rows": 0}
    assert "pinned_gb_per_s" in results["pinned"]
    for name in SERVED:
        assert results[name] == {"not_run": "sglang is not installed"}


def test_the_line_at_the_end_names_what_is_installed():
    versions = read_environment(["torch", "no-such-package"]).versions
    assert versions.keys() == {"torch", "python"}


def test_what_fails_keeps_what_was_found_before_and_says_why(capsys):
    def run(num_tokens: int) -> Any:
        yield {"tokens": num_tokens}
        raise RuntimeError("no kernel image\nand more")

    reports: list[Found] = []
    attempt(Part(run, 1), 16, reports.append)
    assert reports[-1] == {"tokens": 16, "failed": "RuntimeError: no kernel image"}
    assert "and more" in capsys.readouterr().err, "such as the end of a server's log"


LONG = "import time; print('{\"found\": 1}', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("script", "most_s", "expected"),
    [
        ("print('a warning'); print('{\"found\": 1}'); print('{\"found\": 2}')", 60, {"found": 2}),
        ("raise SystemExit(3)", 60, {"failed": "see its output above"}),
        (LONG, 2, {"found": 1, "cut": "it was given 2 s"}),
    ],
)
def test_a_part_that_takes_too_long_is_cut_and_says_so(script, most_s, expected):
    assert within([sys.executable, "-S", "-c", script], most_s) == expected


STUBBORN = """
import signal, subprocess, sys, time
def stopped(*_):
    time.sleep(1)
    open(sys.argv[1], "w").write("stopped")
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # As a shell has it for what it runs beside itself.
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, stopped)
else:
    subprocess.Popen([sys.executable, "-S", __file__, sys.argv[1] + ".child", "child"])
time.sleep(600)
"""


def test_what_a_part_has_started_is_stopped_with_it(tmp_path):
    """Tests, for example, have servers to stop. The end of the part's process does not stop
    them."""
    script, file = tmp_path / "part.py", tmp_path / "file"
    script.write_text(STUBBORN)
    result = within([sys.executable, "-S", str(script), str(file)], 2)
    assert result == {"cut": "it was given 2 s"}
    assert Path(f"{file}.child").read_text() == "stopped"


def test_a_part_has_what_those_before_it_left():
    limits_s = []

    def run(_name: str, most_s: float) -> Found:
        limits_s.append(most_s)
        return {}

    clock = iter((0.0, 2.0, 2.0, 30.0, 30.0, 31.0))
    some = {name: Part(lambda _: iter(()), most_s) for name, most_s in (("a", 20), ("b", 10))}
    parts.run_all({**some, "c": some["a"]}, run, clock=lambda: next(clock))
    assert limits_s == [20, 28, 20]


def test_what_a_sanitizer_saw_fail_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "needs", lambda *_: None)
    script = 'print(\'{"failed": "a race"}\'); print(\'{"found": 1}\'); raise SystemExit(1)'
    monkeypatch.setattr(gpu, "WATCHED", (sys.executable, "-S", "-c", script))
    assert list(gpu.sanitized(("env",), 16)) == [{"failed": "exit 1: a race"}]


def test_that_a_sanitizer_had_nothing_to_watch_is_said(monkeypatch):
    monkeypatch.setattr(gpu, "needs", lambda *_: None)
    script = 'print(\'{"found": 1}\'); print(\'{"not_run": "there is no CUDA device"}\')'
    monkeypatch.setattr(gpu, "WATCHED", (sys.executable, "-S", "-c", script))
    with pytest.raises(NotHere, match="there is no CUDA device"):
        list(gpu.sanitized(("env",), 16))


def test_a_missing_sanitizer_is_said(monkeypatch):
    monkeypatch.setattr(gpu, "needs", lambda *_: None)
    with pytest.raises(NotHere, match="no-such-sanitizer is not installed"):
        list(gpu.sanitized(("no-such-sanitizer",), 16))


def test_outcomes_of_tests_are_told_one_by_one():
    lines = [
        "[gw1] [ 50%] PASSED tests/gpu/test_cuda_servers.py::test_blocks[llama] \n",
        "a log line\n",
        "[gw0] [100%] SKIPPED tests/gpu/test_cuda_servers.py::test_blocks[tp] \n",
    ]
    first, second = (dict(it) for it in servers.outcomes(lines))
    assert second == {"test_blocks[llama]": "passed", "test_blocks[tp]": "skipped"}
    assert first


def test_sglang_takes_the_options_of_the_servers(tmp_path, monkeypatch):
    """The options come from files, in which SGLang refuses some of its own flags."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    from test_cuda_servers import CASES

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    models = lora.Models(tmp_path, [tmp_path / f"adapter-{it}" for it in range(2)], tmp_path)
    specs = [ServerSpec(model=tmp_path, options=case.options) for case in CASES.values()]
    for at in (servers.ON_DEVICE, servers.REHEARSED):
        specs += servers.pair([tmp_path, tmp_path], at)
    for spec in [*specs, *lora.specs(models, 2048, 2, **adapters.DEVICE)]:
        words = list(spec.words(tmp_path))
        option = words.index("--config")
        args = ConfigArgumentMerger(parser).merge_config_with_args(words[option : option + 2])
        assert parser.parse_args(args).page_size == spec.options["page-size"]


def test_the_pair_may_reuse_each_length_that_is_measured(tmp_path):
    for at in (servers.ON_DEVICE, servers.REHEARSED):
        _, reads = servers.pair([tmp_path, tmp_path], at)
        most = parse_settings(reads.droidspeak).max_recompute_tokens
        assert most >= max(*at.lengths, at.document_tokens)


def test_sender_keeps_all_documents_of_the_load(tmp_path):
    at = servers.ON_DEVICE
    sends, _ = servers.pair([tmp_path, tmp_path], at)
    row_bytes = 2 * (2 * at.layers * at.kv_heads * at.hidden // at.heads + at.hidden)
    num_bytes = at.num_documents * at.document_tokens * row_bytes
    assert parse_settings(sends.droidspeak).host_gb * 1e9 > num_bytes


class Offering:
    """A server with a peer that offers one page more at each request."""

    def __init__(self, logprob_of_reuse: float) -> None:
        self.asked: Counter[Any] = Counter()
        self._logprob = logprob_of_reuse

    def flush(self) -> None:
        """Do nothing: this server keeps no KV."""

    def generate(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        control, logprob = options.get("droidspeak", {}), -1.0
        label = {"outcome": "off" if "mode" in control else "no_match", "reused_tokens": 0}
        if control.get("block") == "24:32":
            num_pages = self.asked[tuple(tokens)]
            label["reused_tokens"] = min(64 * num_pages, (len(tokens) - 1) // 64 * 64)
            label["outcome"] = "reused" if num_pages else "no_match"
            self.asked[tuple(tokens)] += 1
            logprob = self._logprob
        return {"meta_info": {"droidspeak": [label], "output_token_logprobs": [[logprob, 5, None]]}}


def test_reuse_is_timed_when_the_whole_prefix_is_on_offer():
    server: Any = Offering(-1.0625)
    *_, results = servers.measured(server, server, replace(servers.ON_DEVICE, lengths=(70, 140)))
    timed = {"70_full_ms", "70_radix_ms", "140_reused_ms", "140_speedup", "recomputed"}
    assert timed <= results.keys()
    assert results["140_logprob_off"] == 0.0625
    assert sorted(server.asked.values()) == [2] * 4 + [3] * 4


def test_reuse_with_another_answer_than_full_prefill_fails():
    server: Any = Offering(-1.5)
    with pytest.raises(RuntimeError, match="log-probabilities differ"):
        list(servers.measured(server, server, replace(servers.ON_DEVICE, lengths=(70,))))


class Queue:
    """A server that answers one request after the other, by a clock of its own."""

    def __init__(self, service_s: dict[str, float]) -> None:
        self._service_s = service_s
        self.now_s, self.num_flushed = 0.0, 0

    def flush(self) -> None:
        self.num_flushed += 1

    def send(self, asks: Sequence[Ask]) -> list[Answer]:
        free_s, answers = 0.0, []
        for ask in asks:
            way = "off" if ask.controls == {"mode": "off"} else "reused"
            free_s = max(free_s, ask.at_s) + self._service_s[way]
            answers.append(
                Answer(
                    document=ask.document,
                    replica=ask.url,
                    due_s=ask.at_s,
                    sent_s=ask.at_s,
                    tokens_s=[free_s],
                    output_ids=[5],
                    prompt_tokens=len(ask.tokens),
                    cached_tokens=0,
                    outcome=way,
                )
            )
        self.now_s += free_s
        return answers


def requests_of(queue: Queue) -> throughput.Requests:
    at = servers.REHEARSED
    return throughput.Requests("http://peer", [[1], [2]], queue.flush, at, queue.send)


def test_rate_rises_until_a_tenth_of_the_first_tokens_come_late():
    queue = Queue({"off": 0.04, "reused": 0.01})
    runs = [dict(it) for it in throughput.measured(requests_of(queue), lambda: queue.now_s)]
    assert runs[0] == {"ttft_target_ms": 80}
    results = runs[-1]
    assert 0 < results["full_per_s"] < 25, "one request takes 40 ms"
    assert results["full_per_s"] < results["reused_per_s"] < 100
    assert results["gain"] == round(results["reused_per_s"] / results["full_per_s"], 3)
    rates = [name for name in results if "_at_" in name]
    assert len(rates) == len(runs) - 2, "each run is reported, then the gain"
    assert queue.num_flushed == len(rates) + 4


def test_way_that_is_late_at_every_rate_has_no_gain():
    queue = Queue({"off": 0.04, "reused": 0.09})
    *_, results = throughput.measured(requests_of(queue), lambda: queue.now_s)
    assert results["reused_per_s"] == 0 and results["gain"] == 0


def test_rate_stops_rising_after_a_minute():
    queue = Queue({"off": 0.04, "reused": 1e-9})
    *_, results = throughput.measured(requests_of(queue), lambda: queue.now_s)
    assert queue.now_s < 2 * (throughput.MOST_S + 5)
    assert results["gain"] > 2


def test_seeded_checkpoints_are_models_that_differ_from_the_shared_layers_on(tmp_path, monkeypatch):
    monkeypatch.setattr(random_weights, "user_cache", lambda: tmp_path / "digests")
    config = shape("llama", layers=4, hidden=256, heads=4, kv_heads=2)
    a, b = random_weights.write_seeded(tmp_path, config, ("a", "b"), 3)
    assert first_difference(a, b) == first_difference(a, b, cache_dir=tmp_path / "digests") == 3
    made = [dict(random_weights.random_weights(path, "cpu")) for path in (a, b)]
    assert {layer_of(it, 4) for it in made[0] if not made[0][it].equal(made[1][it])} == {3, 4}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(made[0])
    with torch.inference_mode():
        assert model(torch.tensor([[5, 6, 7]])).logits.std() > 0.01


def test_weights_of_an_adapter_are_read_from_its_file(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    weights = [("lora_A", torch.ones(1))]
    source = SimpleNamespace(model_or_path=str(tmp_path))
    assert [*random_weights._random_weights(lambda *_: weights, None, source)] == weights


def test_file_has_each_result_once_a_part_has_it(tmp_path):
    file, environment = tmp_path / "new" / "gpu.json", read_environment([])
    gpu.save([{"part": "ttft", "2000_full_ms": 9.0}], environment, file)
    gpu.save([{"part": "overlap", "added_ms": 1.0}], environment, file)
    assert [it["part"] for it in json.loads(file.read_text())["rows"]] == ["overlap", "ttft"]


# A dump of FlashInfer's answer, and what tests have in its place.


def replayed(path: Path) -> dict[str, float]:
    """Return how far the stand-in for FlashInfer's kernels is from the kernels' recorded
    results."""
    dump = load_file(path)
    paged: Any = NAMES["BatchPrefillWithPagedKVCacheWrapper"](torch.empty(0), "NHD")
    paged.plan = SimpleNamespace(
        page_size=1,
        qo_indptr=dump["new"],
        paged_kv_indptr=dump["before"],
        paged_kv_indices=dump["slots"],
        paged_kv_last_page_len=torch.ones(len(dump["new"]) - 1, dtype=torch.int32),
    )
    cache, scale = (dump["keys"], dump["values"]), dump["q"].shape[-1] ** -0.5
    asked = SimpleNamespace(q=dump["q"], paged_kv_cache=cache, causal=False, sm_scale=scale)
    out, lse = paged.compute(asked)
    pairs = {"out": out, "lse": lse}
    return {name: float((dump[name] - ours.float()).abs().max()) for name, ours in pairs.items()}


def test_flashinfer_on_devices_told_the_same():
    """Each device on which the kernels ran has one file."""
    for path in FIXTURES.glob("*.safetensors"):
        assert replayed(path) == pytest.approx({"out": 0.0, "lse": 0.0}, abs=BFLOAT16), path


def test_a_dump_is_replayed(tmp_path):
    path, name = tmp_path / "dump.safetensors", "BatchPrefillWithPagedKVCacheWrapper"
    with VirtualCuda(), patch.object(flashinfer, name, NAMES[name]):
        attention.dump(path, workspace_bytes=64)
    assert replayed(path) == {"out": 0.0, "lse": 0.0}
    dump = load_file(path)
    save_file({**dump, "slots": dump["slots"].flip(0)}, path)
    assert replayed(path)["out"] > BFLOAT16, "of other slots it would be another answer"
