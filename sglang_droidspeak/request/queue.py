"""SGLang's waiting queue: who is hidden in it for a while, and what one step may take of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine.names import PrefillAdder, Req, ScheduleBatch, Scheduler
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.replies import Replies
from sglang_droidspeak.request.waiting import WaitingRequests

IDLE_WAIT_S: Final = 0.001


@dataclass(eq=False)
class Queue:
    """Order is SGLang's: whoever is held back keeps its place. Scheduler thread only."""

    _waiting: WaitingRequests
    _replies: Replies
    _models: Models
    _ranks: Ranks
    _least_chunk: int = field(default=1, init=False)
    """Tokens: of what is cut for a step SGLang takes no fewer."""

    def new_prefill(
        self, original: Any, scheduler: Scheduler, *, running_batch: ScheduleBatch, **rest: Any
    ) -> Any:
        """Hide held requests from SGLang while it builds a batch, and those whose grammar is being
        compiled: it would admit them at sight. Outside it the queues are whole."""
        self._replies.release()
        self._models.settle(self._ranks)
        grammars = scheduler.grammar_manager
        if grammars.has_waiting_grammars():
            for req in grammars.get_ready_grammar_requests():
                scheduler._add_request_to_queue(req)
        queue, compiling = scheduler.waiting_queue, grammars.grammar_queue
        if scheduler.enable_priority_scheduling:
            # SGLang would sort who is not held alone; planning and waiting go by the same order.
            scheduler.policy.calc_priority(queue, running_batch)
        is_decoding = not running_batch.is_empty()
        held = self._waiting.look(queue, scheduler.tree_cache, is_decoding=is_decoding)
        scheduler.waiting_queue = [req for req in queue if req.rid not in held] if held else queue
        grammars.grammar_queue = []
        is_in_chunks = scheduler.chunked_req is not None
        self._least_chunk = scheduler.truncation_align_size or scheduler.page_size
        try:
            batch, running = original(scheduler, running_batch=running_batch, **rest)
        finally:
            grammars.grammar_queue = compiling
            left = {id(req) for req in scheduler.waiting_queue}
            if held:
                scheduler.waiting_queue = _rejoined(queue, held, scheduler.waiting_queue)
        if held:
            ahead = [*takewhile(lambda req: req.rid in held or id(req) in left, queue)]
            # SGLang notes that all is full only where it had another request to look at.
            room = scheduler.get_num_allocatable_reqs(len(running.reqs), running_batch=running)
            could_run: Iterable[Req] = (req for req in ahead if req.rid in held)
            if len(ahead) == len(queue):
                # None that came after these was taken: they could run where nothing was in the way.
                if is_in_chunks or running.batch_is_full:
                    could_run = ()
                elif room <= 0:
                    could_run = (it for it in could_run if _displaces(it, running, scheduler))
            self._waiting.pass_over(req.rid for req in could_run)
        if batch is not None:
            self._waiting.admitted(batch.reqs)
        elif held and running.is_empty():
            # Nothing can run until a fetch gets on: leave the processor to the thread that fetches.
            time.sleep(IDLE_WAIT_S)
        return batch, running

    def charge(self, replayed: int, adder: PrefillAdder, req: Req, prefix_len: int) -> int:
        """Take recomputed layers and copies off the tokens of a step, as SGLang does what it
        replays itself.

        The first of a step is never refused: what remains is a chunk for it to go on with, or where
        nobody decodes all of its new tokens.
        """
        charge = self._waiting.step_tokens(req.rid, prefix_len - req.prefix_len)
        if adder.rem_chunk_tokens is not None and not adder.can_run_list:
            num_new = len(req.full_untruncated_fill_ids) - prefix_len
            is_decoding = not adder.running_batch.is_empty()
            kept = adder.ceil_paged_tokens(num_new)
            kept = min(kept, self._least_chunk) if is_decoding else kept
            charge = min(charge, max(0, adder.rem_chunk_tokens - kept))
        return replayed + charge

    def match(self, original: Any, wrapper: Any, key: Any, req: Req, result: Any) -> Any:
        """Spare SGLang the hashing of a prompt for which there is no source, and have it forget the
        source that there was."""
        wrapper.hit_markers.pop(req.rid, None)
        if not self._waiting.has_source(req.rid):
            return result
        return original(wrapper, key, req, result)


def _displaces(req: Req, running: ScheduleBatch, scheduler: Scheduler) -> bool:
    """Whether one that runs would give its slot to this one."""
    if not scheduler.enable_priority_preemption:
        return False
    sign = 1 if scheduler.schedule_low_priority_values_first else -1
    ahead = max(((it.priority - req.priority) * sign for it in running.reqs), default=0)
    return ahead > scheduler.priority_scheduling_preemption_threshold


def _rejoined(queue: Sequence[Req], held: set[str], left: Sequence[Req]) -> list[Req]:
    """The queue in its order without what was admitted, and then what SGLang has put back."""
    still, known = {id(req) for req in left}, {id(req) for req in queue}
    return [
        *(req for req in queue if req.rid in held or id(req) in still),
        *(req for req in left if id(req) not in known),
    ]
