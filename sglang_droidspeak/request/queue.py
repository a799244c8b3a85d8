"""Hide requests that wait for a fetch while SGLang builds a batch, and deduct recompute and copies
from a scheduler step's budget of tokens."""

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
    """Hooks around SGLang's waiting queue. SGLang decides the order; a hidden request keeps its
    place. Scheduler thread only."""

    _waiting: WaitingRequests
    _replies: Replies
    _models: Models
    _ranks: Ranks
    _least_chunk: int = field(default=1, init=False)
    """Fewest tokens that SGLang prefills in one scheduler step of a request that it cuts."""

    def new_prefill(
        self, original: Any, scheduler: Scheduler, *, running_batch: ScheduleBatch, **rest: Any
    ) -> Any:
        """Let SGLang build a batch without hidden requests, and without requests with a grammar
        that is still being compiled. Afterwards SGLang's queues have these requests again."""
        self._replies.release()
        self._models.settle(self._ranks)
        grammars = scheduler.grammar_manager
        if grammars.has_waiting_grammars():
            for req in grammars.get_ready_grammar_requests():
                scheduler._add_request_to_queue(req)
        queue, compiling = scheduler.waiting_queue, grammars.grammar_queue
        if scheduler.enable_priority_scheduling:
            # SGLang will sort only requests that are not held. Planning needs all in this order.
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
            # SGLang sets batch_is_full only if it had another request to look at.
            room = scheduler.get_num_allocatable_reqs(len(running.reqs), running_batch=running)
            could_run: Iterable[Req] = (req for req in ahead if req.rid in held)
            if len(ahead) == len(queue):
                # SGLang took no request behind held ones. These could have run, if there was room.
                if is_in_chunks or running.batch_is_full:
                    could_run = ()
                elif room <= 0:
                    could_run = (it for it in could_run if _displaces(it, running, scheduler))
            self._waiting.pass_over(req.rid for req in could_run)
        if batch is not None:
            self._waiting.admitted(batch.reqs)
        elif held and running.is_empty():
            # Nothing can run until a fetch proceeds: leave the processor to the fetching thread.
            time.sleep(IDLE_WAIT_S)
        return batch, running

    def charge(self, replayed: int, adder: PrefillAdder, req: Req, prefix_len: int) -> int:
        """Hooks PrefillAdder._replay_len: add the cost of recompute and copies to the tokens that
        SGLang deducts from a scheduler step's budget.

        A step's first request is never refused. Budget remains for at least one chunk of its new
        tokens, or for all of them if no request decodes.
        """
        charge = self._waiting.step_tokens(req.rid, prefix_len - req.prefix_len)
        if adder.rem_chunk_tokens is not None and not adder.can_run_list:
            num_new = len(req.full_untruncated_fill_ids) - prefix_len
            is_decoding = not adder.running_batch.is_empty()
            num_kept = adder.ceil_paged_tokens(num_new)
            num_kept = min(num_kept, self._least_chunk) if is_decoding else num_kept
            charge = min(charge, max(0, adder.rem_chunk_tokens - num_kept))
        return replayed + charge

    def match(self, original: Any, wrapper: Any, key: Any, req: Req, result: Any) -> Any:
        """Ask `original` for loadable pages only if the request has a source. Without a source,
        SGLang need not hash the prompt. It forgets pages found in an earlier scheduler step."""
        wrapper.hit_markers.pop(req.rid, None)
        if not self._waiting.has_source(req.rid):
            return result
        return original(wrapper, key, req, result)


def _displaces(req: Req, running: ScheduleBatch, scheduler: Scheduler) -> bool:
    """Whether SGLang would preempt a running request in favour of `req`."""
    if not scheduler.enable_priority_preemption:
        return False
    sign = 1 if scheduler.schedule_low_priority_values_first else -1
    ahead = max(((it.priority - req.priority) * sign for it in running.reqs), default=0)
    return ahead > scheduler.priority_scheduling_preemption_threshold


def _rejoined(queue: Sequence[Req], held: set[str], left: Sequence[Req]) -> list[Req]:
    """Return the queue in its old order, without the admitted requests. Requests that SGLang has
    put back come last."""
    still, known = {id(req) for req in left}, {id(req) for req in queue}
    return [
        *(req for req in queue if req.rid in held or id(req) in still),
        *(req for req in left if id(req) not in known),
    ]
