"""Activated LoRA: an adapter that acts from its invocation tokens on; the rest stays the base's.

SGLang would apply it to the whole prompt. Here the tokens before the last invocation run without
it, so that their KV is the base's, which others may have computed already: nothing is recomputed.

    prompt   document … question …   <invocation> … answer …
             base                   │ adapter
    KV       the base's, shared     │ this request's, in a namespace of its own
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.asking import num_answered
from sglang_droidspeak.engine.names import ForwardBatch, LoRARef, Req, Scheduler, async_h2d
from sglang_droidspeak.start import refuse


class ActivatedAdapters:
    """Hooks of a server with adapters, of which any may be such a one. Scheduler thread only."""

    def __init__(self, models: Models) -> None:
        self._models: Final = models
        self._reqs: WeakValueDictionary[tuple[str, str | None], Req] = WeakValueDictionary()
        """Requests whose adapter acts from somewhere on, by rid and adapter: what has answered may
        be in a batch under way yet when its rid is another's."""

    def require_room(self, manager: Any, *loading: LoRARef) -> None:
        """Of SGLang's LoRAManager, beside what it has loaded; raises ConfigError."""
        refuse.check_activated(
            (*manager.lora_refs.values(), *loading),
            lambda it: self._models.invocation(it.lora_id),
            manager.max_loras_per_batch,
            manager.target_modules,
        )

    def meet(self, req: Req) -> None:
        """Find where the adapter acts, before SGLang first looks for the request's prefix. Never
        invoked, it acts on nothing, nor on what is generated: the base answers."""
        invocation = self._models.invocation(req.lora_id)
        if not invocation or prefixes.invoked_at(req) is not None:
            return
        prompt = req.origin_input_ids
        prompt = prompt[: len(prompt) - num_answered(req)]
        at = last_of(invocation, prompt)
        if at is None:
            prefixes.ask_base(req)
        else:
            prefixes.invoke(req, at)
            self._reqs[req.rid, req.lora_id] = req

    def prepare(self, original: Any, manager: Any, batch: ForwardBatch) -> None:
        told = self._told(batch)
        if told is not batch:
            manager.fetch_new_loras({*told.lora_ids, None})
            if batch.forward_mode.is_extend():
                lengths, lens = told.extend_seq_lens_cpu, batch.extend_seq_lens
                told.extend_seq_lens = async_h2d(lengths, dtype=lens.dtype, device=lens.device)
        original(manager, told)

    def fits_graph(self, original: Any, manager: Any, batch: ForwardBatch) -> bool:
        """Asked by what prepares a batch and by what runs it: graphs have room for so many."""
        return original(manager, self._told(batch))

    def can_schedule(
        self, original: Any, scheduler: Scheduler, req: Req, running_loras: set[str | None]
    ) -> bool:
        """A batch with such an adapter needs the base as one of the adapters that it can hold."""
        together = (req.lora_id, *running_loras)
        if req.lora_id is None or not any(map(self._models.invocation, together)):
            return original(scheduler, req, running_loras)
        # SGLang's loader beside does not count what lies in a slot already.
        has_base = (
            not scheduler.enable_lora_overlap_loading
            or scheduler.lora_overlap_loader.try_overlap_load_lora(None, running_loras)
        )
        return has_base and original(scheduler, req, {*running_loras, None})

    def _told(self, batch: ForwardBatch) -> ForwardBatch:
        """On the host: with two requests where one is before its invocation first, then after."""
        if not self._reqs:
            return batch
        keys = zip(batch.rids or (), batch.lora_ids or (), strict=False)
        reqs = [self._reqs.get(key) for key in keys]
        starts = [None if req is None else prefixes.invoked_at(req) for req in reqs]
        if not any(starts):
            return batch
        lora_ids, lengths = _segments(batch, starts)
        told = copy(batch)
        told.rids, told.lora_ids, told.batch_size = None, lora_ids, len(lora_ids)
        if batch.forward_mode.is_extend():
            # Where log-probabilities begin is told of rows, and read for adapters of lm_head alone.
            told.extend_seq_lens_cpu, told.return_logprob = lengths, False
        return told


def _segments(
    batch: ForwardBatch, starts: Sequence[int | None]
) -> tuple[list[str | None], list[int]]:
    """Adapter and number of tokens of each part of the batch's rows that has tokens."""
    parts: list[tuple[str | None, int]] = []
    is_extend = batch.forward_mode.is_extend()
    for row, (lora_id, start) in enumerate(zip(batch.lora_ids, starts, strict=True)):
        length = batch.extend_seq_lens_cpu[row] if is_extend else 1
        stop = int(batch.seq_lens_cpu[row])
        num_before = 0 if start is None else min(length, max(0, start - (stop - length)))
        parts += [(None, num_before), (lora_id, length - num_before)]
    kept = [part for part in parts if part[1]]
    return [lora_id for lora_id, _ in kept], [length for _, length in kept]


def last_of(wanted: Sequence[int], tokens: array[int]) -> int | None:
    """Where these begin for the last time; the scheduler waits for it."""
    ids = np.asarray(tokens)
    most = max(0, len(ids) - len(wanted) + 1)
    found = np.flatnonzero(ids[:most] == wanted[0])
    for place, token in enumerate(wanted):
        found = found[ids[found + place] == token]
    return int(found[-1]) if len(found) else None
