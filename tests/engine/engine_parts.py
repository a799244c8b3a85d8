"""Real servers over small random models, and the transformers oracle to compare them with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import documented_outcomes
import pytest
import torch
from sglang.srt.mem_cache.utils import storage_namespace_seed
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import random_servers
from benchmarks.oracle import Generated, decode, partial_prefill
from cachetree.cache import Cache
from cachetree.checkpoint.family import Family
from cachetree.checkpoint.identity import read_model_identity
from cachetree.config import CacheConfig
from cachetree.ids import ModelId
from cachetree.planning.profile import BlockQuality
from cachetree.tree import hashing
from profiles.random_models import random_prompt
from sglang_droidspeak.fleet.servers import Server, free_port

PAGE = 16
CPU = {
    "device": "cpu",
    "dtype": "float32",
    "page-size": PAGE,
    "max-total-tokens": 16384,
    "max-running-requests": 16,
    "chunked-prefill-size": 96,
    "sleep-on-idle": True,
}
"""Options of servers on a CPU. Chunks are shorter than every prompt, so both sides prefill in
chunks."""
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SLOW_DEVICE = ENV | {"FORKED_BEFORE": str(Path(__file__).with_name("slow_device.py"))}
"""Environment of forked servers in tests that do not ask if reuse is worth its time."""
SHORT_HOURS = ENV | {"FORKED_BEFORE": str(Path(__file__).with_name("short_hours.py"))}
"""Environment of forked servers in which the hours of the drift guard are short."""


@functools.cache
def _load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def oracle(receiver, sender, prompt, *, block, num_reused, max_new, own=0, correct=lambda e: e):
    """Answer that the receiver must give if tokens [own, num_reused) come from the sender."""
    ids = torch.tensor([list(prompt)])
    reused = ids[:, :num_reused]
    prefix = partial_prefill(_load(receiver), _load(sender), reused, block, own, correct)
    return decode(_load(receiver), prefix, ids[:, num_reused:], max_new)


def answer(server: Server, prompt: Sequence[int], **options: Any) -> Answer:
    options = {"max_new_tokens": 12, "return_logprob": True, **options}
    return Answer(server.generate(prompt, sampling_params={"ignore_eos": True}, **options))


def load_adapter(server: Server, name: str, folder: Path) -> None:
    """Load an adapter. Returns once the server also knows the adapter's content."""
    server.post("/load_lora_adapter", lora_name=name, lora_path=str(folder))

    def outcome() -> str:
        reply = answer(server, prompt(8, seed=99), lora_path=name, max_new_tokens=1)
        return reply.provenance["outcome"]

    eventually(lambda: outcome() != "reading_adapter")


class Answer:
    """A `/generate` reply, unpacked."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self.ids: list[int] = reply["output_ids"]
        self.text: str = reply["text"]
        self.meta: dict[str, Any] = reply["meta_info"]
        self.logprobs = [entry[0] for entry in self.meta.get("output_token_logprobs", ())]

    @property
    def provenance(self) -> dict[str, Any]:
        (entry,) = self.meta["droidspeak"]
        known = documented_outcomes.outcomes()
        assert entry["outcome"] in known, "no page says what this means"
        return entry

    def assert_equals(self, expected: Generated, tolerance: float = 2e-4) -> None:
        assert self.ids == expected.ids, self.meta.get("droidspeak")
        assert self.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


def whole_pages(num_tokens: int) -> int:
    """Tokens of a prompt that a cache may give: whole pages, never the last token."""
    return (num_tokens - 1) // PAGE * PAGE


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait until `condition` is true, and return its value. Publication and advertisement are
    asynchronous."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "condition did not become true in time"
        time.sleep(0.05)
    return value


def prompt(num_tokens: int, seed: int) -> list[int]:
    return random_prompt(num_tokens, seed)


def page_hashes(tokens, salt=None, extra_key=None):
    """Return SGLang's page keys of a prompt, as any peer computes them."""
    seed = storage_namespace_seed(extra_key, salt)
    return hashing.page_hashes(tokens, PAGE, bytes.fromhex(seed) if seed else b"")


def family_of(model: Path, tp_size: int = 1, tp_rank: int = 0) -> Family:
    """Return the family of a model as these servers run it."""
    return Family(
        **read_model_identity(model).shape,
        model_dtype="float32",
        kv_dtype="float32",
        page_size=PAGE,
        tp_size=tp_size,
        tp_rank=tp_rank,
    )


class Watcher:
    """A peer of some servers. It only reads their adverts."""

    def __init__(self, model: Path, addresses: Sequence[str]) -> None:
        self._model, self._addresses = model, tuple(addresses)

    @functools.cached_property
    def _cache(self) -> Cache:
        config = CacheConfig(peers=self._addresses, serves=False)
        cache = Cache(family_of(self._model), config)
        assert cache.wait_ready(20)
        return cache

    def num_pages(self, tokens: Sequence[int], model: Path, salt: str | None = None) -> int:
        """Return how many leading pages of `tokens` the server of `model` advertises, with E at
        each layer at which it has any."""
        return self._num_pages(tokens, read_model_identity(model).model_id, salt)

    def _num_pages(self, tokens: Sequence[int], model: ModelId, salt: str | None = None) -> int:
        matches = self._cache.match(page_hashes(tokens, salt))
        return max(
            (min([it.num_pages, *it.e_pages.values()]) for it in matches if it.model == model),
            default=0,
        )

    def wait_for(self, tokens: Sequence[int], model: Path, salt: str | None = None) -> None:
        """Wait until all whole pages of `tokens` are advertised, and peers have had time to learn
        it."""
        self.wait_for_model(tokens, read_model_identity(model).model_id, salt)

    def wait_for_model(self, tokens, model, salt=None):
        eventually(lambda: self._num_pages(tokens, model, salt) == len(tokens) // PAGE)
        time.sleep(0.1)

    def close(self) -> None:
        if "_cache" in vars(self):
            self._cache.close()


def free_address(num_ranks: int = 1) -> str:
    """Return an address on which a cache may listen; with several ranks it is the first rank's."""
    return f"tcp://127.0.0.1:{free_port(num_ranks)}"


def profile_of(sender, receiver, *, passed=True):
    """Make up a profile. Only layer 2 has to be the receiver's own."""
    best = BlockQuality(start=2, stop=3, quality=0.9)
    return random_servers.profile_of(sender, receiver, best, passed=passed)
