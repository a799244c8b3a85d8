"""What SGLang inserts into its tree: noted for the models beside, and copied out for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import PoolTransfer, Req
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.store.offloader import Offload, Offloader, Told
from sglang_droidspeak.store.pool import PoolIndex

Ready = Callable[[], Sequence[torch.cuda.Event]]
"""Records what writes the slots that are inserted now; nothing off CUDA."""


@dataclass(eq=False)
class Insertions:
    """Scheduler thread only. `checkpoint` hooks UnifiedRadixCache.checkpoint, inside of which
    SGLang calls `offload`.
    """

    _models: Models
    _pool: PoolIndex
    _offloader: Offloader
    _ranks: Ranks
    _page_size: int
    _inserting: tuple[Req, int] | None = field(default=None, init=False)
    about: Callable[[Req, int, int], Told | None] = field(
        default_factory=lambda: _untold, init=False
    )
    """What events say of some of a request's tokens."""

    def checkpoint(self, original: Any, tree: Any, req: Req, *, up_to: int, **rest: Any) -> None:
        """Tell `offload`, which SGLang calls from inside, whose tokens are being inserted."""
        self._inserting = (req, up_to)
        try:
            original(tree, req, up_to=up_to, **rest)
        finally:
            self._inserting = None
        is_wanted = self._pool.is_told or len(self._models) > 1
        if self._ranks.is_first and is_wanted and not req.skip_radix_cache_insert:
            self._note(req, up_to)

    def _note(self, req: Req, up_to: int) -> None:
        """What SGLang's tree now has of this request is there for the other models, too."""
        owner = self._models.owner_of(req)
        if owner is None or prefixes.refusal(req) or prefixes.is_approximate(req):
            return
        pages = owner.pages_of(prefixes.pages_of(req, up_to, self._page_size), self._page_size)
        self._pool.note(prefixes.namespace_of(req), owner.model, pages)

    def offload(self, transfers: Sequence[PoolTransfer], ready: Ready) -> bool:
        """Have new exact KV copied out, after what `ready` records; False where it is not, yet."""
        if self._inserting is None or self._offloader.is_stopped:
            return False
        req, up_to = self._inserting
        owner = self._models.owner_of(req)
        if prefixes.refusal(req) or owner is None:
            return False
        if prefixes.is_approximate(req):
            return self._offloader.put(None)  # It never becomes exact.
        (transfer,), page_size = transfers, self._page_size
        first = prefixes.page_hash(transfer.keys[0])
        own_path = prefixes.own_pages_of(req, up_to, page_size)
        if first not in own_path:
            return False
        index = own_path.index(first)
        path = prefixes.pages_of(req, up_to, page_size) if prefixes.place_of(req) else own_path
        pages = owner.pages_of(path, page_size)[index : index + len(transfer.keys)]
        if not pages:
            return False
        num_tokens, start = len(pages) * page_size, index * page_size
        slots = transfer.device_indices[:num_tokens]
        return self._offloader.put(
            Offload(
                model=owner.model,
                parent=path[index - 1] if index else None,
                pages=pages,
                slots=slots,
                ready=ready(),
                told=self.about(req, start, start + num_tokens),
            )
        )


def _untold(_req: Req, _start: int, _stop: int) -> None:
    """Nobody follows events."""
