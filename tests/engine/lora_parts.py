"""A small base with random adapters, and what the oracle says of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_parts import CPU, PAGE, Answer, answer, oracle, prompt, whole_pages

from benchmarks.oracle import Generated
from benchmarks.random_adapters import write_adapter
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.identity import read_model_identity
from cachetree.ids import EMPTY_SPAN, ModelId, Span
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server
from tools.merge import merge_folder

NUM_LAYERS = 6
BASE = "base"
WITH_LORA = CPU | {
    "lora-backend": "torch_native",
    "max-loras-per-batch": 5,
    "max-lora-rank": 8,
    "lora-target-modules": ["all"],
}
"""Options of a server with adapters."""
WITH_ACTIVATED = WITH_LORA | {"lora-target-modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
"""Options of a server with adapters of which some are activated ones."""
INVOCATION = [77, 78]
"""Tokens that no `plain_prompt` has."""


def plain_prompt(num_tokens: int, seed: int) -> list[int]:
    return [token if token not in INVOCATION else 5 for token in prompt(num_tokens, seed)]


@dataclass(frozen=True)
class Checkpoints:
    """Models by name."""

    adapters: Mapping[str, Path]
    whole: Mapping[str, Path]
    """Each as a checkpoint of its own; adapters merged into the base."""

    @classmethod
    def write(
        cls, folder: Path, adapters: Mapping[str, Mapping[str, Any]], *others: str
    ) -> Checkpoints:
        """A base, adapters as `write_adapter` makes them, and fine-tunes of other weights."""
        config = shape("llama", layers=NUM_LAYERS, hidden=256, heads=4, kv_heads=2)
        names = (BASE, *others)
        whole = dict(zip(names, write_models(folder, config, names), strict=True))
        base, paths = whole[BASE], {}
        for name, made in adapters.items():
            paths[name] = write_adapter(folder / name, base, **made)
            whole[name] = folder / f"{name}-merged"
            merge_folder(base, paths[name], whole[name])
        return cls(paths, whole)

    def identity(self, name: str) -> ModelIdentity:
        adapter = self.adapters.get(name)
        folder = self.whole[name if adapter is None else BASE]
        return read_model_identity(folder, None, adapter)

    def model_id(self, name: str) -> ModelId:
        return self.identity(name).model_id

    def controls(self, sender: str, block: Span) -> dict[str, str]:
        """What a request says that wants just this."""
        literal = f"{block.start}:{block.stop}" if len(block) else "none"
        return {"sender": self.model_id(sender), "block": literal}

    def expected(
        self,
        name: str,
        sender: str,
        tokens: Sequence[int],
        block: Span,
        *,
        num_reused: int | None = None,
    ) -> Generated:
        """The oracle's answer where so many tokens are the sender's; None: as many as can be."""
        return oracle(
            self.whole[name],
            self.whole[sender],
            tokens,
            block=block,
            num_reused=whole_pages(len(tokens)) if num_reused is None else num_reused,
            max_new=12,
        )


@dataclass(frozen=True)
class Team:
    """A base and its adapters in one server."""

    server: Server
    address: str
    """Where its first rank serves its cache."""
    models: Checkpoints

    def ask(self, name: str, tokens: list[int], **options: Any) -> Answer:
        lora = {} if name == BASE else {"lora_path": name}
        return answer(self.server, tokens, **lora, **options)

    def receive(self, name: str, sender: str, tokens: list[int], block: Span) -> Answer:
        controls = self.models.controls(sender, block)
        return self.ask(name, tokens, droidspeak=controls)

    def assert_block_equals_the_oracle(
        self, sender: str, receiver: str, tokens: list[int], block: Span
    ) -> None:
        self.ask(sender, tokens, max_new_tokens=1)
        reply = self.receive(receiver, sender, tokens, block)
        reply.assert_equals(self.models.expected(receiver, sender, tokens, block))
        told = reply.provenance
        assert (told["outcome"], told["location"], told["fetched_bytes"]) == ("reused", "pool", 0)
        assert told["reused_tokens"] == whole_pages(len(tokens))

    def assert_batch_equals_the_oracle(
        self, names: Sequence[str], blocks: Sequence[Span], num_reading: int, num_plain: int
    ) -> None:
        """Different adapters, senders and blocks at once, and some that reuse nothing."""
        most = len(names)
        cases = [
            (
                names[i % most],
                names[(i + 1 + i // most) % most],
                prompt(130 + 17 * i, 200 + i),
                blocks[i % len(blocks)],
            )
            for i in range(num_reading)
        ]
        for _name, sender, tokens, _block in cases:
            self.ask(sender, tokens, max_new_tokens=1)
        plain = [(names[i], prompt(90 + 31 * i, seed=300 + i)) for i in range(num_plain)]
        with ThreadPoolExecutor(len(cases) + len(plain)) as pool:
            replies = [pool.submit(self.receive, *case) for case in cases]
            others = [pool.submit(self.ask, *case) for case in plain]
            for (name, sender, tokens, block), reply in zip(cases, replies, strict=True):
                told = reply.result().provenance
                assert told["location"] == "pool"
                # Of the longer ones less, while others decode.
                num_reused = told["reused_tokens"]
                expected = self.models.expected(name, sender, tokens, block, num_reused=num_reused)
                reply.result().assert_equals(expected)
            for (name, tokens), other in zip(plain, others, strict=True):
                assert other.result().provenance["outcome"] != "reused"
                other.result().assert_equals(self.models.expected(name, name, tokens, EMPTY_SPAN))

    def assert_the_first_of_a_burst_leads(self) -> None:
        """Sent at once, one request computes the document and the other reads what it left."""
        tokens = prompt(300, seed=503)
        names = [BASE, "upper"]
        with ThreadPoolExecutor(2) as pool:
            replies = [pool.submit(self.ask, name, tokens) for name in names]
        outcomes = sorted(reply.result().provenance["outcome"] for reply in replies)
        assert outcomes == ["no_match", "reused"]
        for name, reply in zip(names, replies, strict=True):
            reply.result().assert_equals(self.models.expected(name, name, tokens, EMPTY_SPAN))


@dataclass(frozen=True)
class Question:
    """A prompt to an activated LoRA, and how much of it the base has read before."""

    tokens: list[int]
    num_read: int
    invoked_at: int | None

    @property
    def document(self) -> list[int]:
        return self.tokens[: self.num_read]


def questions(seed: int) -> dict[str, Question]:
    """Prompts of an own document each, by what is special about their invocation."""
    before = [plain_prompt(num, seed + place) for place, num in enumerate((150, 100, 191, 160))]
    after = plain_prompt(30, seed + 10)
    twice = [*before[1], *INVOCATION, *plain_prompt(40, seed + 11)]
    return {
        "once": Question([*before[0], *INVOCATION, *after], 150, 150),
        "twice": Question([*twice, *INVOCATION, *after], len(twice), len(twice)),
        # 96 tokens are read from the base, and the next chunk of 96 ends behind token 77.
        "cut": Question([*before[2], *INVOCATION, *after], 100, 191),
        "never": Question([*before[3], *after], 160, None),
    }


def assert_same_answers_without_reuse(
    server: Server,
    models: Checkpoints,
    name: str,
    asked: Mapping[str, Question],
    read: Callable[[list[int]], object],
) -> dict[str, Answer]:
    """Ask each question streamed and alone, all as one batch, and without any reuse, after `read`
    had the base read the documents, and compare with the oracle; returns the streamed answers."""

    def begin() -> None:
        server.flush()
        for it in asked.values():
            read(it.document)

    options: dict[str, Any] = {"lora_path": name, "return_logprob": True, "max_new_tokens": 12}
    params = {"ignore_eos": True}
    begin()
    streamed = {
        case: Answer(server.stream(it.tokens, sampling_params=params, **options)[1])
        for case, it in asked.items()
    }
    begin()
    tokens = [it.tokens for it in asked.values()]
    replies: Any = server.generate(tokens, sampling_params=params, **options)
    batched = dict(zip(asked, map(Answer, replies), strict=True))
    for case, it in asked.items():
        server.flush()
        alone = answer(server, it.tokens, lora_path=name, droidspeak={"mode": "off"})
        assert alone.meta["cached_tokens"] == 0
        for reply in (streamed[case], batched[case]):
            assert reply.ids == alone.ids, case
            assert reply.logprobs == pytest.approx(alone.logprobs, abs=2e-4), case
            assert reply.meta["cached_tokens"], case
        if it.invoked_at is None:
            alone.assert_equals(models.expected(BASE, BASE, it.tokens, EMPTY_SPAN))
        else:
            before = it.invoked_at
            expected = models.expected(name, BASE, it.tokens, EMPTY_SPAN, num_reused=before)
            alone.assert_equals(expected)
        num_cached = streamed[case].meta["cached_tokens"]
        assert num_cached == it.num_read // PAGE * PAGE, (case, num_cached)
    return streamed
