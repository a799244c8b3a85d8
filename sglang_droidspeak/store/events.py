"""What this server keeps in host memory, told to who follows SGLang's KV events: one tier more.

SGLang publishes what its tree has on the device. Where it does (`--kv-events-config`), it is given
these events beside its own, and its publisher sends both, numbers and repeats them.

    offloader's thread   commits pages ─► BlockStored ──┐  under the cache's lock
    any thread           evicts pages  ─► BlockRemoved ─┴► waiting
    scheduler            take_events: SGLang's own, then what waits

Events name tokens, and a cache knows hashes alone. So pages are told of that this server has
computed, and no others: not what others have stored here, nor what an earlier run left on disk.
Nor is what lies under a tenant's salt or key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from cachetree import KV, Cache, ModelId, PageHash
from cachetree.tree import Change
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import (
    BlockRemoved,
    BlockStored,
    LoRARef,
    Req,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.store.insertions import EventTokens, Offloader

MAX_WAITING: Final = 10_000
"""Events; what is stored beyond that is not told of."""
_HASH_BYTES: Final = 8


class HostStored(BlockStored, tag="BlockStored"):  # type: ignore[call-arg]
    """Fields that are added are skipped by those who do not know them."""

    model: str = ""
    """By content, as `droidspeak identity` prints it."""
    family: str = ""
    """Digest of what models must share to exchange caches."""


class HostEvents:
    """A listener of the cache's memory, until it is closed."""

    def __init__(
        self, cache: Cache, offloader: Offloader, adapters: Mapping[str, LoRARef], metrics: Metrics
    ) -> None:
        self._family: Final = cache.family
        self._offloader: Final = offloader
        self._adapters: Final = adapters
        self._metrics: Final = metrics
        self._waiting: Final[deque[BlockStored | BlockRemoved]] = deque()
        self._told: Final[dict[tuple[ModelId, PageHash], int]] = {}
        """By what was told to be here, its hash in events; under the cache's lock."""
        _, self._unsubscribe = cache.tree.subscribe(self._note)

    def about(self, req: Req, start: int, stop: int) -> EventTokens | None:
        """Of some of a request's tokens; None where nobody is to hear of them. Scheduler thread."""
        adapter = self._adapters.get(req.lora_id) if req.lora_id else None
        is_unknown = req.lora_id and adapter is None
        is_secret = req.cache_salt or prefixes.tenant_of(req) is not None
        if is_unknown or is_secret or prefixes.invoked_at(req) is not None:
            return None
        return EventTokens(req.full_untruncated_fill_ids[start:stop], adapter)

    def take(self, events: list[Any], _tree: object) -> list[Any]:
        """Hooks UnifiedRadixCache.take_events. Scheduler thread."""
        while self._waiting:
            event = self._waiting.popleft()
            kind = "stored" if isinstance(event, BlockStored) else "removed"
            self._metrics.kv_event_pages.labels(kind).inc(len(event.block_hashes))
            events.append(event)
        return events

    def close(self) -> None:
        """Nothing here is read any more: tell that it is gone."""
        self._unsubscribe()
        self._remove([*self._told.values()])
        self._told.clear()

    def _note(self, change: Change) -> None:
        """Any thread, with the cache's lock held."""
        if change.part != KV:
            return  # Events are of KV.
        if change.added:
            self._note_stored(change)
        else:
            keys = ((change.model, page) for page in change.pages)
            self._remove([self._told.pop(key) for key in keys if key in self._told])

    def _note_stored(self, change: Change) -> None:
        offload, pages = self._offloader.storing, change.pages
        told = offload.told if offload is not None and offload.model == change.model else None
        if offload is None or told is None or pages[0] not in offload.pages:
            return  # It comes from somebody else.
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.kv_event_pages.labels("dropped").inc(len(pages))
            return
        size, parent = self._family.page_size, change.parent
        start = size * offload.pages.index(pages[0])
        tokens = list(told.tokens[start : start + size * len(pages)])
        if len(tokens) < size * len(pages):
            return  # Somebody else's that goes on from there.
        hashes = [_block_hash(told, it) for it in pages]
        self._told.update(zip(((change.model, it) for it in pages), hashes, strict=True))
        self._waiting.append(
            HostStored(
                block_hashes=hashes,
                parent_block_hash=None if parent is None else _block_hash(told, parent),
                token_ids=tokens,
                block_size=size,
                lora_id=None,
                medium=StorageMedium.CPU,
                lora_name=told.adapter.lora_name if told.adapter else None,
                model=change.model,
                family=self._family.digest,
            )
        )

    def _remove(self, hashes: list[int]) -> None:
        if hashes:
            self._waiting.append(BlockRemoved(block_hashes=hashes, medium=StorageMedium.CPU))


def _block_hash(told: EventTokens, page: PageHash) -> int:
    """As SGLang's own events name the page: an adapter's apart from the base model's."""
    seed = None
    if told.adapter is not None:
        seed = kv_event_namespace_seed(extra_key=told.adapter.lora_id, cache_salt=None)
    number = int.from_bytes(page[:_HASH_BYTES], "big", signed=True)
    return namespaced_block_hash(number, namespace_seed=seed)
