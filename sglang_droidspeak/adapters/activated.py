"""Activated LoRA: an adapter that acts only from a known run of tokens on, its *invocation*.

SGLang would apply such an adapter to the whole prompt. Here the base computes the tokens before the
last invocation. So these tokens have the base's KV, which may be in the cache already.

    prompt   document … question …   <invocation> … answer …
             base                   │ adapter
    KV       the base's, shared     │ this request's, with its own `extra_key`
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
    """Hooks that let activated LoRAs act only from their invocation on. Scheduler thread only."""

    def __init__(self, models: Models) -> None:
        self._models: Final = models
        self._reqs: WeakValueDictionary[tuple[str, str | None], Req] = WeakValueDictionary()
        """Requests with an invocation. Keys are id and adapter. The id is not unique: a new request
        may get the id of an answered request that is still in a batch."""

    def require_room(self, manager: Any, *loading: LoRARef) -> None:
        """Raise ConfigError if SGLang's LoRAManager cannot serve its present adapters together with
        the adapters `loading`."""
        refuse.check_activated(
            (*manager.lora_refs.values(), *loading),
            lambda it: self._models.invocation(it.lora_id),
            manager.max_loras_per_batch,
            manager.target_modules,
        )

    def meet(self, req: Req) -> None:
        """Find the token from which the request's adapter acts, before SGLang looks for the
        request's prefix. If the prompt has no invocation, the base answers."""
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
        """Prepare the adapters of a batch after `_split` has cut its rows at invocations."""
        split = self._split(batch)
        if split is not batch:
            manager.fetch_new_loras({*split.lora_ids, None})
            if batch.forward_mode.is_extend():
                lengths, lens = split.extend_seq_lens_cpu, batch.extend_seq_lens
                split.extend_seq_lens = async_h2d(lengths, dtype=lens.dtype, device=lens.device)
        original(manager, split)

    def fits_graph(self, original: Any, manager: Any, batch: ForwardBatch) -> bool:
        """Whether a CUDA graph has room for the batch once its rows are split. SGLang asks before
        it prepares a batch, and again before it runs the batch."""
        return original(manager, self._split(batch))

    def can_schedule(
        self, original: Any, scheduler: Scheduler, req: Req, running_loras: set[str | None]
    ) -> bool:
        """Whether the request's adapter fits into the batch. If any adapter in it is activated, the
        base also needs one of the batch's adapter slots."""
        together = (req.lora_id, *running_loras)
        if req.lora_id is None or not any(map(self._models.invocation, together)):
            return original(scheduler, req, running_loras)
        # SGLang's overlap loader does not count adapters that are in a slot already.
        has_base = (
            not scheduler.enable_lora_overlap_loading
            or scheduler.lora_overlap_loader.try_overlap_load_lora(None, running_loras)
        )
        return has_base and original(scheduler, req, {*running_loras, None})

    def _split(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a copy of the batch in which each row (request) with an invocation becomes two
        rows: first the base's tokens, then the adapter's. Without an invocation, return the same
        batch. Runs on the host."""
        if not self._reqs:
            return batch
        keys = zip(batch.rids or (), batch.lora_ids or (), strict=False)
        reqs = [self._reqs.get(key) for key in keys]
        starts = [None if req is None else prefixes.invoked_at(req) for req in reqs]
        if not any(starts):
            return batch
        lora_ids, lengths = _segments(batch, starts)
        split = copy(batch)
        split.rids, split.lora_ids, split.batch_size = None, lora_ids, len(lora_ids)
        if batch.forward_mode.is_extend():
            # Starts of log-probabilities are per original row. Only adapters of lm_head need them.
            split.extend_seq_lens_cpu, split.return_logprob = lengths, False
        return split


def _segments(
    batch: ForwardBatch, starts: Sequence[int | None]
) -> tuple[list[str | None], list[int]]:
    """Split each request of the batch at its index in `starts`, if that is not None. Return the
    adapter and the number of tokens of each row that is not empty."""
    parts: list[tuple[str | None, int]] = []
    is_extend = batch.forward_mode.is_extend()
    for row, (lora_id, start) in enumerate(zip(batch.lora_ids, starts, strict=True)):
        length = batch.extend_seq_lens_cpu[row] if is_extend else 1
        stop = int(batch.seq_lens_cpu[row])
        num_before = 0 if start is None else min(length, max(0, start - (stop - length)))
        parts += [(None, num_before), (lora_id, length - num_before)]
    non_empty = [part for part in parts if part[1]]
    return [lora_id for lora_id, _ in non_empty], [length for _, length in non_empty]


def last_of(wanted: Sequence[int], tokens: array[int]) -> int | None:
    """Return the last index at which `wanted` begins in `tokens`. None if `tokens` does not contain
    it. The scheduler waits for this function, so it has to be fast."""
    ids = np.asarray(tokens)
    most = max(0, len(ids) - len(wanted) + 1)
    places = np.flatnonzero(ids[:most] == wanted[0])
    for place, token in enumerate(wanted):
        places = places[ids[places + place] == token]
    return int(places[-1]) if len(places) else None
