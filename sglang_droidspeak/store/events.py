"""Publish the content of this server's host memory in SGLang's KV events, as one more tier.

With `--kv-events-config` SGLang publishes which pages its tree has on the device. This module adds
events about host memory. SGLang's publisher numbers, sends and repeats both kinds.

    offloader's thread   commits pages ─► BlockStored ──┐  under the cache's lock
    any thread           evicts pages  ─► BlockRemoved ─┴► waiting
    scheduler            take_events: SGLang's own events, then the waiting ones

Events name tokens, and a cache knows only hashes. So events tell only of pages that this server has
computed. They omit pages that other servers stored here, and pages that an earlier process left on
disk. Pages with a tenant's salt or key are never published.
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
"""Largest number of events that may wait. Beyond it, events about stored pages are dropped."""
_HASH_BYTES: Final = 8


class HostStored(BlockStored, tag="BlockStored"):  # type: ignore[call-arg]
    """SGLang's event about stored pages, with two more fields that other subscribers skip."""

    model: str = ""
    """Model id by content, as `droidspeak identity` prints it."""
    family: str = ""
    """Digest of what models must share to exchange caches."""


class HostEvents:
    """Turn changes of the cache's host memory into KV events, until `close`."""

    def __init__(
        self, cache: Cache, offloader: Offloader, adapters: Mapping[str, LoRARef], metrics: Metrics
    ) -> None:
        self._family: Final = cache.family
        self._offloader: Final = offloader
        self._adapters: Final = adapters
        self._metrics: Final = metrics
        self._waiting: Final[deque[BlockStored | BlockRemoved]] = deque()
        self._hashes: Final[dict[tuple[ModelId, PageHash], int]] = {}
        """Published hash of each stored page. The cache's lock guards this dict."""
        _, self._unsubscribe = cache.tree.subscribe(self._note)

    def about(self, req: Req, start: int, stop: int) -> EventTokens | None:
        """Return the content of an event about a request's tokens [start, stop). None if they must
        not be published. Call it on the scheduler thread."""
        adapter = self._adapters.get(req.lora_id) if req.lora_id else None
        is_unknown = req.lora_id and adapter is None
        is_secret = req.cache_salt or prefixes.tenant_of(req) is not None
        if is_unknown or is_secret or prefixes.invoked_at(req) is not None:
            return None
        return EventTokens(req.full_untruncated_fill_ids[start:stop], adapter)

    def take(self, events: list[Any], _tree: object) -> list[Any]:
        """Hooks UnifiedRadixCache.take_events: add the events about host memory. Scheduler
        thread."""
        while self._waiting:
            event = self._waiting.popleft()
            kind = "stored" if isinstance(event, BlockStored) else "removed"
            self._metrics.kv_event_pages.labels(kind).inc(len(event.block_hashes))
            events.append(event)
        return events

    def close(self) -> None:
        """Stop listening to the cache, and publish that all pages are removed."""
        self._unsubscribe()
        self._remove([*self._hashes.values()])
        self._hashes.clear()

    def _note(self, change: Change) -> None:
        """Queue the event of one change. Any thread, with the cache's lock held."""
        if change.part != KV:
            return  # Events tell of KV only.
        if change.added:
            self._note_stored(change)
        else:
            keys = ((change.model, page) for page in change.pages)
            self._remove([self._hashes.pop(key) for key in keys if key in self._hashes])

    def _note_stored(self, change: Change) -> None:
        offload, pages = self._offloader.storing, change.pages
        content = (
            offload.event_tokens if offload is not None and offload.model == change.model else None
        )
        if offload is None or content is None or pages[0] not in offload.pages:
            return  # A writer other than the offloader added it.
        if len(self._waiting) >= MAX_WAITING:
            self._metrics.kv_event_pages.labels("dropped").inc(len(pages))
            return
        size, parent = self._family.page_size, change.parent
        start = size * offload.pages.index(pages[0])
        tokens = list(content.tokens[start : start + size * len(pages)])
        if len(tokens) < size * len(pages):
            return  # Another writer's pages, which continue the offload's.
        hashes = [_block_hash(content, it) for it in pages]
        self._hashes.update(zip(((change.model, it) for it in pages), hashes, strict=True))
        self._waiting.append(
            HostStored(
                block_hashes=hashes,
                parent_block_hash=None if parent is None else _block_hash(content, parent),
                token_ids=tokens,
                block_size=size,
                lora_id=None,
                medium=StorageMedium.CPU,
                lora_name=content.adapter.lora_name if content.adapter else None,
                model=change.model,
                family=self._family.digest,
            )
        )

    def _remove(self, hashes: list[int]) -> None:
        if hashes:
            self._waiting.append(BlockRemoved(block_hashes=hashes, medium=StorageMedium.CPU))


def _block_hash(content: EventTokens, page: PageHash) -> int:
    """Return a page's hash as SGLang's own events have it. In these events, an adapter's hash of a
    page differs from the base's."""
    seed = None
    if content.adapter is not None:
        seed = kv_event_namespace_seed(extra_key=content.adapter.lora_id, cache_salt=None)
    number = int.from_bytes(page[:_HASH_BYTES], "big", signed=True)
    return namespaced_block_hash(number, namespace_seed=seed)
