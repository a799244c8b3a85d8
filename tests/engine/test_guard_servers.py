"""The drift guard of real servers: what it sees, when it raises an alarm, and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_parts import CPU, PAGE, SLOW_DEVICE, Answer, Watcher, eventually
from forked import ServerSpec

from cachetree.planning import BlockQuality, read_profile
from cachetree.planning.profile import write_profile
from profiles.compute import ModelSource, load_tokenizer
from profiles.data import Metric, TaskOptions, load_sources, make_documents
from sglang_droidspeak.cli import main
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = pytest.mark.server

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"
SENDER, RECEIVER = PAIRS / "weights" / "sender", PAIRS / "weights" / "receiver"
PROFILE = PAIRS / "sender_to_receiver.json"


def prompts(file: str = "held_out") -> list[list[int]]:
    """One of each document."""
    options = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
    sources = load_sources([str(PAIRS / "data" / f"{file}.jsonl")], options)
    tokenizer = load_tokenizer(ModelSource(path=RECEIVER))
    made = make_documents(sources, tokenizer, page_size=PAGE, max_prompt_tokens=None)
    return [[*it.prefix, *question.suffix] for it in made for question in it.questions[:1]]


class Pair:
    def __init__(self, sender: Server, receiver: Server, watcher: Watcher) -> None:
        self.sender, self.receiver, self.watcher = sender, receiver, watcher

    def read(self, tokens: Sequence[int]) -> None:
        """Have the sender read it, and the receiver forget what it has."""
        self.sender.generate(tokens, max_new_tokens=1)
        self.watcher.wait_for(tokens, SENDER)

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        return Answer(self.receiver.generate(tokens, max_new_tokens=8, **options))

    def guard(self, **question: Any) -> dict[str, Any]:
        return self.receiver.post("/droidspeak/guard", **question)

    def num_shadows(self) -> int:
        (pair,) = self.guard()["pairs"]
        return sum(it["num_shadows"] for it in pair["plans"])

    @property
    def num_left(self) -> int:
        (pair,) = self.guard()["pairs"]
        return pair["num_left"]


@contextmanager
def served(folder: Path, profile: Path, **settings: Any) -> Iterator[Pair]:
    address = f"tcp://127.0.0.1:{free_port()}"
    layers = {"listen": address, "capture_layers": list(range(1, 12)), "host_gb": 0.25}
    reads = {"peers": [address], "profiles": [str(profile)], "host_gb": 0, **settings}
    reads["guard_path"] = str(folder / "guard.json")
    specs = [
        ServerSpec(model=SENDER, name="sender", options=CPU, droidspeak=layers),
        ServerSpec(model=RECEIVER, name="receiver", options=CPU, droidspeak=reads),
    ]
    with running(*specs, folder=folder, env=SLOW_DEVICE) as (sender, receiver):
        watcher = Watcher(RECEIVER, [address])
        try:
            yield Pair(sender, receiver, watcher)
        finally:
            watcher.close()


def let_through(folder: Path, *bad: tuple[int, int]) -> Path:
    """A profile of the pair that says of these blocks, against all evidence, that they are good."""
    good = read_profile(PROFILE)
    (everything,) = [it for it in good.blocks if len(it.block) == good.receiver.num_layers]
    plans = [BlockQuality(start=it[0], stop=it[1], quality=0.98) for it in bad]
    wrong = msgspec.structs.replace(good, blocks=(everything, *plans), recommended=plans[0])
    write_profile(wrong, folder / "profile.json")
    return folder / "profile.json"


def test_a_plan_that_loses_more_than_allowed_is_taken_out_of_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, let_through(tmp_path, (4, 5)), shadow_rate=1.0) as pair:
        asked = prompts()
        pair.read(asked[0])
        for i, tokens in enumerate(asked, 1):
            pair.read(asked[i])
            reply = pair.ask(tokens)
            assert (reply.provenance["outcome"], reply.provenance["block"]) == ("reused", [4, 5])
            assert not any("logprobs" in name for name in reply.meta)
            eventually(lambda num=i: pair.num_shadows() == num)
            if pair.num_left == 0:
                break
        assert i < 20
        assert main(["guard", pair.receiver.url]) == 1
        assert "OUT OF SERVICE  layers [4, 5) anew" in capsys.readouterr().out
        for known in (tokens, asked[i]):  # The first of which left approximate KV on the device.
            reply, alone = pair.ask(known), pair.ask(known, droidspeak={"mode": "off"})
            assert reply.provenance["exact"] and reply.ids == alone.ids
            assert reply.provenance["outcome"] in ("gate_failed", "too_short")
        assert "plans in service: recomputing layers [4, 5) was" in pair.receiver.log.read_text()
        assert main(["guard", pair.receiver.url, "--reset", "all"]) == 0
        pair.receiver.flush()
        assert pair.ask(tokens).provenance["outcome"] == "reused"
