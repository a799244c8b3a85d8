"""Small random models in real servers that read each other's KV, and the oracle's answers for
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_parts import (
    CPU,
    PAGE,
    SLOW_DEVICE,
    Answer,
    Watcher,
    answer,
    oracle,
    profile_of,
    prompt,
    whole_pages,
)
from forked import ServerSpec

from benchmarks.random_adapters import write_adapter
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.identity import read_model_identity
from cachetree.corrections import Correction, write_corrections
from cachetree.ids import EMPTY_SPAN, ModelId, Span
from cachetree.planning.profile import BlockQuality, write_profile
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, running
from tools.merge import merge_folder

HIDDEN = 256
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


def random_correction(seed: int = 17) -> Correction:
    drawn = torch.Generator().manual_seed(seed)
    bias, matrix = (
        torch.randn(*it, generator=drawn) / HIDDEN**0.5 for it in ((HIDDEN,), (HIDDEN,) * 2)
    )
    return Correction(bias, matrix)


def literal(block: Span) -> str:
    """Return the block as a request names it."""
    return f"{block.start}:{block.stop}" if len(block) else "none"


def plain_prompt(num_tokens: int, seed: int) -> list[int]:
    return [token if token not in INVOCATION else 5 for token in prompt(num_tokens, seed)]


@dataclass(frozen=True)
class Checkpoints:
    """Models by name."""

    folder: Path
    adapters: Mapping[str, Path]
    whole: Mapping[str, Path]
    """Checkpoint of each model, with adapters merged into the base."""

    @classmethod
    def write(cls, folder, adapters, *others, kind="llama"):
        """Write a base, adapters as `write_adapter` makes them, and fine-tunes with other
        weights."""
        config = shape(kind, layers=NUM_LAYERS, hidden=HIDDEN, heads=4, kv_heads=2)
        names = (BASE, *others)
        whole = dict(zip(names, write_models(folder, config, names), strict=True))
        base, paths = whole[BASE], {}
        for name, made in adapters.items():
            paths[name] = write_adapter(folder / name, base, **made)
            whole[name] = folder / f"{name}-merged"
            merge_folder(base, paths[name], whole[name])
        return cls(folder, paths, whole)

    def server(
        self,
        model: str,
        *,
        name: str = "",
        options: Mapping[str, Any] = CPU,
        adapters: Mapping[str, Path] = {},
        **settings: Any,
    ) -> ServerSpec:
        """Specify a server of this model with these settings. Its name is the model's if no other
        is stated."""
        return ServerSpec(
            model=self.whole[model],
            name=name or model,
            options=options,
            adapters=adapters,
            droidspeak=settings,
        )

    def profile(
        self,
        sender: str,
        receiver: str,
        corrections: Mapping[Span, Correction] = {},
        recommended: Span | None = None,
    ) -> str:
        """Write a made-up profile, with blocks that begin with corrected E beside its own."""
        profile = profile_of(self.identity(sender), self.identity(receiver))
        blocks = [
            BlockQuality(start=it.start, stop=it.stop, quality=0.9, e_map=by.named(it.start))
            for it, by in corrections.items()
        ]
        blocks = (*profile.blocks, *blocks)
        best = next((it for it in blocks if it.block == recommended), profile.recommended)
        profile = msgspec.structs.replace(profile, blocks=blocks, recommended=best)
        path = self.folder / f"{sender}-{receiver}.json"
        write_profile(profile, path)
        if corrections:
            maps = {it.named(block.start).sha256: it for block, it in corrections.items()}
            write_corrections(profile, maps, path)
        return str(path)

    def identity(self, name: str) -> ModelIdentity:
        adapter = self.adapters.get(name)
        folder = self.whole[name if adapter is None else BASE]
        return read_model_identity(folder, None, adapter)

    def model_id(self, name: str) -> ModelId:
        return self.identity(name).model_id

    def controls(self, sender: str, block: Span) -> dict[str, str]:
        """Return the controls of a request that asks for exactly this."""
        return {"sender": self.model_id(sender), "block": literal(block)}

    def expected(self, name, sender, tokens, block, *, num_reused=None, own=0, correction=None):
        """Return the oracle's answer if tokens [own, num_reused) are the sender's. With None, as
        many tokens as possible are."""
        return oracle(
            self.whole[name],
            self.whole[sender],
            tokens,
            block=block,
            num_reused=whole_pages(len(tokens)) if num_reused is None else num_reused,
            max_new=12,
            own=own,
            correct=(
                (lambda e: e + e @ correction.matrix + correction.bias)
                if correction
                else lambda e: e
            ),
        )


@dataclass(frozen=True)
class Team:
    """Servers, by the models that they answer as."""

    servers: Mapping[str, Server]
    models: Checkpoints
    addresses: Sequence[str]
    """Addresses of the servers' caches. With several ranks, the first rank's."""
    watcher: Watcher

    def ask(self, name: str, tokens: list[int], **options: Any) -> Answer:
        lora = {"lora_path": name} if name in self.models.adapters else {}
        return answer(self.servers[name], tokens, **lora, **options)

    def send(self, name: str, tokens: list[int], max_new_tokens: int = 1) -> Answer:
        """Have a model read tokens. Returns once its server offers them."""
        reply = self.ask(name, tokens, max_new_tokens=max_new_tokens, droidspeak={"mode": "off"})
        self.watcher.wait_for_model([*tokens, *reply.ids[:-1]], self.models.model_id(name))
        return reply

    def receive(self, name, sender, tokens, block, **options):
        controls = self.models.controls(sender, block)
        return self.ask(name, tokens, droidspeak=controls, **options)

    def assert_block_equals_the_oracle(self, sender, receiver, tokens, block):
        self.ask(sender, tokens, max_new_tokens=1)
        reply = self.receive(receiver, sender, tokens, block)
        reply.assert_equals(self.models.expected(receiver, sender, tokens, block))
        provenance = reply.provenance
        assert (provenance["outcome"], provenance["location"], provenance["fetched_bytes"]) == (
            "reused",
            "pool",
            0,
        )
        assert provenance["reused_tokens"] == whole_pages(len(tokens))

    def assert_batch_equals_the_oracle(self, names, blocks, num_reading, num_plain):
        """Check a batch with different adapters, senders and blocks, and with requests that reuse
        nothing."""
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
                provenance = reply.result().provenance
                assert provenance["location"] == "pool"
                # Of the longer ones less, while others decode.
                num_reused = provenance["reused_tokens"]
                expected = self.models.expected(name, sender, tokens, block, num_reused=num_reused)
                reply.result().assert_equals(expected)
            for (name, tokens), other in zip(plain, others, strict=True):
                assert other.result().provenance["outcome"] != "reused"
                other.result().assert_equals(self.models.expected(name, name, tokens, EMPTY_SPAN))

    def assert_the_first_of_a_burst_leads(self) -> None:
        """Check two requests that are sent at once: one computes the document, and the other reads
        its KV."""
        tokens = prompt(300, seed=503)
        names = [BASE, "upper"]
        with ThreadPoolExecutor(2) as pool:
            replies = [pool.submit(self.ask, name, tokens) for name in names]
        outcomes = sorted(reply.result().provenance["outcome"] for reply in replies)
        assert outcomes == ["no_match", "reused"]
        for name, reply in zip(names, replies, strict=True):
            reply.result().assert_equals(self.models.expected(name, name, tokens, EMPTY_SPAN))


@contextmanager
def team_of(models, *specs, env=SLOW_DEVICE):
    settings = [it.droidspeak or {} for it in specs]
    addresses = [it["listen"] for it in settings if "listen" in it]
    with (
        running(*specs, folder=models.folder / "logs", env=env) as started,
        closing(Watcher(models.whole[BASE], addresses)) as watcher,
    ):
        servers = {
            name: server
            for spec, server in zip(specs, started, strict=True)
            for name in (spec.name, *spec.adapters)
        }
        yield Team(servers, models, addresses, watcher)


@dataclass(frozen=True)
class Question:
    """A prompt to an activated LoRA, with the number of its tokens that the base has read
    before."""

    tokens: list[int]
    num_read: int
    invoked_at: int | None

    @property
    def document(self) -> list[int]:
        return self.tokens[: self.num_read]


def questions(seed: int) -> dict[str, Question]:
    """Make prompts, each of a document of its own, by what is special about their invocation."""
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


def assert_same_answers_without_reuse(server, models, name, asked, read):
    """Compare the answers of an activated adapter with the oracle. Each question is asked streamed
    and alone, all are asked as one batch, and again without any reuse. `read` first has the base
    read the documents. Return the streamed answers."""

    def begin() -> None:
        server.flush()
        for reply in asked.values():
            read(reply.document)

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
    for case, asking in asked.items():
        server.flush()
        alone = answer(server, asking.tokens, lora_path=name, droidspeak={"mode": "off"})
        assert alone.meta["cached_tokens"] == 0
        for reply in (streamed[case], batched[case]):
            assert reply.ids == alone.ids, case
            assert reply.logprobs == pytest.approx(alone.logprobs, abs=2e-4), case
            assert reply.meta["cached_tokens"], case
        if asking.invoked_at is None:
            alone.assert_equals(models.expected(BASE, BASE, asking.tokens, EMPTY_SPAN))
        else:
            before = asking.invoked_at
            expected = models.expected(name, BASE, asking.tokens, EMPTY_SPAN, num_reused=before)
            alone.assert_equals(expected)
        num_cached = streamed[case].meta["cached_tokens"]
        assert num_cached == asking.num_read // PAGE * PAGE, (case, num_cached)
    return streamed
