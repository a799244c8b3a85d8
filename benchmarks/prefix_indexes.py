"""Prefix indexes that the benchmark `tree.py` compares, behind one interface. None stores KV."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmarks.unbacked import FAMILY, Unbacked
from cachetree import (
    PAGE_HASH_BYTES,
    CacheTree,
    ModelId,
    PageHash,
    Reservation,
)
from cachetree.tree import split_hashes

PAGE_BYTES = FAMILY.num_layers * FAMILY.kv_page_bytes


class Prompt:
    """One prompt, in the forms that the indexes read. They are made before the clock starts."""

    def __init__(self, tokens: array[int], pages: list[PageHash]) -> None:
        self.tokens = tokens
        self.pages = pages
        self.slots = torch.arange(len(tokens))


class PrefixIndex(Protocol):
    """An index that `tree.py` times. All lengths are in pages."""

    def match(self, prompt: Prompt) -> Any:
        """Look the prompt up for every model. `lengths` reads the result."""

    def lengths(self, answer: Any) -> list[int]:
        """Return the length of the longest prefix of each model, from the result of `match`."""

    def insert(self, model: int, prompt: Prompt) -> int:
        """Add the prompt for one model; return how many of its pages the index already had."""

    def evict(self, newcomer: list[PageHash]) -> int:
        """Make room for as many pages as `newcomer` has. Return how many pages were evicted."""

    def settle(self) -> None:
        """Finish the work that an eviction left. Not timed."""


class _NoPool:
    """A stand-in for SGLang's allocator of KV slots."""

    page_size = FAMILY.page_size
    device = "cpu"

    def free_segment(self, indices: torch.Tensor, *, start_pos: int) -> None:
        """Free nothing: no slot was allocated."""


class SGLangRadix:
    """A radix tree of SGLang over tokens. A lookup walks each model's namespace (`extra_key`)."""

    def __init__(self, tree: type, core: str | None, num_models: int) -> None:
        self.tree = tree(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=_NoPool(),
                page_size=FAMILY.page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self._names = [str(i) for i in range(num_models)]

    def match(self, prompt: Prompt) -> list[Any]:
        return [
            self.tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt.tokens, name)))
            for name in self._names
        ]

    def lengths(self, answer: list[Any]) -> list[int]:
        return [found.device_prefix_len // FAMILY.page_size for found in answer]

    def insert(self, model: int, prompt: Prompt) -> int:
        key = RadixKey(prompt.tokens, self._names[model])
        inserted = self.tree.insert(InsertParams(key=key, value=prompt.slots))
        return inserted.prefix_len // FAMILY.page_size

    def evict(self, newcomer: list[PageHash]) -> int:
        num_tokens = len(newcomer) * FAMILY.page_size
        evicted = self.tree.evict(EvictParams(num_tokens=num_tokens))
        return evicted.num_tokens_evicted // FAMILY.page_size

    def settle(self) -> None:
        """Do nothing: an eviction leaves no work."""


class FlatDict:
    """An ordered dict of page hashes for each model; the oldest pages are evicted first. A match
    does not mark pages as used, so its time is the least that a lookup per page can cost."""

    def __init__(self, num_models: int) -> None:
        self._pages: list[OrderedDict[PageHash, None]] = [OrderedDict() for _ in range(num_models)]

    def match(self, prompt: Prompt) -> list[int]:
        lengths = []
        for pages in self._pages:
            num = 0
            for page in prompt.pages:
                if page not in pages:
                    break
                num += 1
            lengths.append(num)
        return lengths

    def lengths(self, answer: list[int]) -> list[int]:
        return answer

    def insert(self, model: int, prompt: Prompt) -> int:
        pages = self._pages[model]
        num_before = len(pages)
        pages.update(dict.fromkeys(prompt.pages))
        return len(prompt.pages) - (len(pages) - num_before)

    def evict(self, newcomer: list[PageHash]) -> int:
        pages = self._pages[newcomer[0][0] % len(self._pages)]
        for _ in newcomer:
            pages.popitem(last=False)
        return len(newcomer)

    def settle(self) -> None:
        """Do nothing: an eviction leaves no work."""


class Ours:
    """Our CacheTree with a budget of `num_pages` per model and a pool that lends no memory."""

    def __init__(self, num_models: int, num_pages: int) -> None:
        self.models = [ModelId(f"{i:032x}") for i in range(num_models)]
        self.tree = CacheTree(
            FAMILY,
            host_bytes=num_models * num_pages * PAGE_BYTES,
            memory=Unbacked(),
        )
        self._newcomer: Reservation | None = None

    def match(self, prompt: Prompt) -> Any:
        return self.tree.match(prompt.pages)

    def lengths(self, answer: Any) -> list[int]:
        num_pages_of = {match.model: match.num_pages for match in answer}
        return [num_pages_of.get(model, 0) for model in self.models]

    def insert(self, model: int, prompt: Prompt) -> int:
        reservation = self.tree.reserve(self.models[model], None, prompt.pages)
        assert reservation is not None
        reservation.commit()
        return reservation.skipped

    def evict(self, newcomer: list[PageHash]) -> int:
        """Reserve room for the newcomer as a server does, so that the tree evicts for it."""
        num_before = self.tree.num_pages
        self._newcomer = self.tree.reserve(self.models[0], None, newcomer)
        return num_before - self.tree.num_pages

    def settle(self) -> None:
        assert self._newcomer is not None
        self._newcomer.commit()


def newcomer_of(num_pages: int, seed: int) -> list[PageHash]:
    """Make up pages that no index has."""
    hashes = random.Random(seed).randbytes(num_pages * PAGE_HASH_BYTES)
    return list(split_hashes(hashes))


def make(name: str, num_models: int, num_pages: int) -> PrefixIndex:
    """Make an empty index that can hold `num_pages` per model."""
    if name == "SGLang, Python":
        return SGLangRadix(RadixCache, None, num_models)
    if name == "SGLang, Rust":
        return SGLangRadix(UnifiedRadixCache, "rust", num_models)
    if name == "flat dict":
        return FlatDict(num_models)
    return Ours(num_models, num_pages)


NAMES = (
    "SGLang, Python",
    "SGLang, Rust",
    "flat dict",
    "cachetree",
)
ESTIMATED_BYTES_PER_PAGE = {"SGLang, Python": 1100, "SGLang, Rust": 1100}
"""Estimated bytes per page and model; 250 for all other contenders. `tree.py` leaves a contender
out if it would need too much memory."""
