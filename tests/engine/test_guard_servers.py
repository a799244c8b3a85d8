"""The drift guard of real servers: its comparisons, its alarms, and the consequences."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_parts import CPU, SHORT_HOURS, Answer, Watcher, eventually
from forked import ServerSpec
from safetensors.torch import load_file, save_file
from stranger import in_other_coordinates
from torch import Tensor
from transformers import LlamaConfig

from cachetree.checkpoint import read_model_identity
from cachetree.planning import BlockQuality, read_profile
from cachetree.planning.profile import write_profile
from profiles.compute.models import ModelSource, load_tokenizer
from sglang_droidspeak.cli import main
from sglang_droidspeak.cli.ask import guard_lines
from sglang_droidspeak.fleet.servers import Server, free_port, running
from sglang_droidspeak.guard.plans import GuardState
from tools.pairs.questions import QUESTIONS_PER_DOCUMENT, make_records

pytestmark = pytest.mark.server

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"
PROFILE = PAIRS / "sender_to_receiver.json"
OFF = {"mode": "off"}
IDLE_S = 0.2


def prompts(task: str = "biographies", num: int = 24) -> list[list[int]]:
    """Return one prompt about each document."""
    tokenizer = load_tokenizer(ModelSource(path=RECEIVER))
    records = make_records("fresh", seed=77, num_wanted=num, task=task)[::QUESTIONS_PER_DOCUMENT]
    texts = [f"<bos> {it.context} {it.input}" for it in records]
    return [tokenizer.encode(it, add_special_tokens=False) for it in texts]


Change = Callable[[dict[str, Tensor], LlamaConfig], dict[str, Tensor]]


class Pair:
    def __init__(self, sender: Server, receiver: Server, address: str) -> None:
        self.sender, self.receiver, self.address = sender, receiver, address

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Have the sender read these prompts, and wait until the receiver knows its pages."""
        watcher = Watcher(RECEIVER, [self.address])
        for tokens in prompts:
            self.sender.generate(tokens, max_new_tokens=1)
        for tokens in prompts:
            watcher.wait_for(tokens, SENDER)
        watcher.close()

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        return Answer(self.receiver.generate(tokens, max_new_tokens=8, **options))

    def guard(self, **question: Any) -> dict[str, Any]:
        return self.receiver.post("/droidspeak/guard", **question)

    def num_shadows(self) -> int:
        (pair,) = self.guard()["pairs"]
        return sum(it["num_shadows"] for it in pair["plans"])

    @property
    def is_off(self) -> bool:
        """Whether the guard has taken all plans out of service."""
        (pair,) = self.guard()["pairs"]
        return bool(pair["plans"]) and not pair["num_left"]

    def requests_until_off(self, asked: list[list[int]], **options: Any) -> int:
        """Count reused requests until all plans are out of service. Prompts that were asked are
        removed from the list. Between two requests the server is idle for a moment, because a
        comparison makes way for requests."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda it: self.sender.generate(it, max_new_tokens=1), asked))
        eventually(lambda: self.ask(asked.pop(), **options).provenance["outcome"] == "reused")
        num_reused = 0
        while not self.is_off:
            reply = self.ask(asked.pop(), rid=f"request {num_reused}", **options)
            num_reused += reply.provenance["outcome"] == "reused"
            time.sleep(IDLE_S)
        print(
            num_reused,
            "requests:",
            *guard_lines(msgspec.convert(self.guard(), GuardState)),
            sep="\n",
        )
        return num_reused


@contextmanager
def served(folder, profile, model=SENDER, num_ranks=1, **settings):
    address = f"tcp://127.0.0.1:{free_port(num_ranks)}"
    layers = {"listen": address, "capture_layers": [2, 3, 4], "host_gb": 0.5}
    reads = {"peers": [address], "profiles": [str(profile)], "host_gb": 0, **settings}
    reads["guard_path"] = str(folder / "guard.json")
    options = {**CPU, "tp-size": num_ranks}
    specs = [
        ServerSpec(model=model, name="sender", options=options, droidspeak=layers),
        ServerSpec(model=RECEIVER, name="receiver", options=options, droidspeak=reads),
    ]
    env = {**SHORT_HOURS, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks > 1 else SHORT_HOURS
    with running(*specs, folder=folder, env=env) as (sender, receiver):
        yield Pair(sender, receiver, address)


def let_through(folder: Path, *bad: tuple[int, int]) -> Path:
    """Write a profile of the pair that calls these blocks good, against all evidence.

    It also states their known distances.
    """
    good = read_profile(PROFILE)
    (everything,) = [it for it in good.blocks if len(it.block) == good.receiver.num_layers]
    known = {(it.start, it.stop): it for it in good.blocks}
    plans = [known.get(it, BlockQuality(start=it[0], stop=it[1], quality=0.98)) for it in bad]
    wrong = msgspec.structs.replace(
        good, blocks=(everything, *plans), recommended=plans[0] if plans else None
    )
    write_profile(wrong, folder / "profile.json")
    return folder / "profile.json"


def test_a_plan_that_loses_more_than_allowed_is_taken_out_of_service(tmp_path, capsys):
    with served(tmp_path, let_through(tmp_path, (4, 5)), shadow_rate=1.0) as pair:
        asked = prompts(num=21)
        pair.read(asked)
        for i, tokens in enumerate(asked, 1):
            reply = pair.ask(tokens)
            assert (reply.provenance["outcome"], reply.provenance["block"]) == ("reused", [4, 5])
            assert not any("logprobs" in name for name in reply.meta)
            eventually(lambda num=i: pair.num_shadows() == num)
            if pair.is_off:
                break
        assert i <= 20
        assert main(["guard", pair.receiver.url]) == 1
        assert "OUT OF SERVICE  layers [4, 5) anew" in capsys.readouterr().out
        for known in (tokens, asked[i]):  # The first of which left approximate KV on the device.
            reply, alone = pair.ask(known), pair.ask(known, droidspeak=OFF)
            assert reply.provenance["exact"] and reply.ids == alone.ids
            assert reply.provenance["outcome"] in ("gate_failed", "too_short", "on_device")
        assert "plans in service: recomputing layers [4, 5) was" in pair.receiver.log.read_text()
        assert main(["guard", pair.receiver.url, "--reset", "all"]) == 0
        pair.receiver.flush()
        assert pair.ask(tokens).provenance["outcome"] == "reused"


def of_another_sender(folder: Path, change: Change, sender: Path = SENDER) -> Path:
    """Write the same profile for a sender with other weights."""
    shutil.copytree(sender, folder / "changed")
    weights = load_file(sender / "model.safetensors")
    config = LlamaConfig.from_pretrained(sender)
    save_file(change(weights, config), folder / "changed" / "model.safetensors", {"format": "pt"})
    return folder / "changed"


def a_quarter_away(weights, _config, share=0.25):
    """Move each matrix by a share of the way towards a random matrix of the same size."""
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.lerp(it, (torch.randn(it.shape, generator=random) * it.std()).to(it), share)
        if it.dim() > 1
        else it
        for name, it in weights.items()
    }


def in_coordinates_of_its_own(weights: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Change the sender's coordinates. It answers as well as the sender that the profile is of."""
    return in_other_coordinates(weights, config, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "task"),
    [
        pytest.param(a_quarter_away, "biographies", id="weights"),
        pytest.param(None, "code", id="documents"),
        pytest.param(in_coordinates_of_its_own, "biographies", id="checkpoint"),
    ],
)
def test_drift_is_found_within_200_reused_requests(change, task, tmp_path):
    """The shipped profile states the allowed distance. At first one request in twenty is compared.
    After the alarm, answers are full prefill's.

    The int4 codec does not count as drift for this pair: its mean distance of .021 is allowed.
    """
    sender = SENDER if change is None else of_another_sender(tmp_path, change)
    profile = let_through(tmp_path, (2, 5))
    renamed = msgspec.structs.replace(read_profile(profile), sender=read_model_identity(sender))
    write_profile(renamed, profile)
    with served(tmp_path, profile, sender) as pair:
        last, *asked = prompts(task, num=211)
        pair.sender.generate(last, max_new_tokens=1)
        assert pair.requests_until_off(asked) <= 200
        after, alone = pair.ask(last), pair.ask(last, droidspeak=OFF)
        assert (after.provenance["outcome"], after.ids) == ("gate_failed", alone.ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plans", "controls", "num_ranks"),
    [
        pytest.param([(0, 0), (3, 5)], {}, 1, id="plans"),
        pytest.param([], {"block": "none"}, 1, id="full reuse by name"),
        pytest.param([], {"block": "3:5"}, 1, id="block by name"),
        pytest.param([(0, 0), (3, 5)], {}, 2, id="of two ranks"),
    ],
)
def test_a_bad_pair_that_was_let_through_is_taken_out_of_service_within_200_requests(
    plans, controls, num_ranks, tmp_path
):
    """The pair did not pass its gate, and the server has `gate: none`. One request in twenty is
    compared."""
    profile = let_through(tmp_path, *plans)
    failed = msgspec.structs.replace(read_profile(profile), passed=False, reason="it is bad")
    write_profile(failed, profile)
    with served(tmp_path, profile, num_ranks=num_ranks, gate="none") as pair:
        last, *asked = prompts(num=211)
        pair.sender.generate(last, max_new_tokens=1)
        assert pair.requests_until_off(asked, droidspeak=controls) <= 200
        after, alone = pair.ask(last, droidspeak=controls), pair.ask(last, droidspeak=OFF)
        assert after.provenance["exact"] and after.ids == alone.ids
        assert (after.provenance["outcome"] == "gate_failed") == bool(controls)
