"""Run the partial prefill before a batch's forward, or a full prefill if a load has failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cachetree import Deadline, FetchError, Span
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import ForwardMode, Req, ScheduleBatch
from sglang_droidspeak.ranks import Ranks, RanksApart
from sglang_droidspeak.request import report
from sglang_droidspeak.request.controls import name_of
from sglang_droidspeak.request.load import Load, Loader
from sglang_droidspeak.request.meta_info import RequestProvenance, provenance_of
from sglang_droidspeak.request.partial_prefill import BlockTokens, PartialPrefill
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.store.e_pool import Attachment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Tokens, times and share of the work of one loading request in a batch."""

    request: Request
    tokens: Span
    """Tokens of the prompt that this batch loads or computes."""
    share: float
    """Share of the batch's work, 0 to 1."""
    delay_s: float
    """Value of `Request.delay_s` when the batch began."""
    began_s: float
    """Monotonic time at which the batch began."""


NO_CONSUMER = -1
"""Batch index for which the KV pool waits for no load. Partial prefills use it: they read no KV
that is being loaded."""


class BatchForward:
    """Run a batch's partial prefills before its own forward. `run_batch` hooks
    TpModelWorker.forward_batch_generation. Scheduler thread only."""

    def __init__(
        self, attachment: Attachment, loader: Loader, meter: Meter, labels: Labels, ranks: Ranks
    ) -> None:
        server = attachment.server
        self._e_pool = attachment.e_pool
        self._forward_wait_s = server.settings.forward_wait_s
        self._loader = loader
        self._meter = meter
        self._labels = labels
        self._ranks = ranks
        self._prefill = PartialPrefill(attachment, meter.step_tokens, ranks)
        self._loading: dict[int, Sequence[Request]] = {}
        """Loading requests of each batch that has not ended. Keys are batch indices."""
        self._parts: dict[int, Sequence[_Part]] = {}
        """Parts of each running batch, one for each loading request. Keys are batch indices."""

    def warm(self, forward_stream: torch.cuda.Stream | None) -> None:
        """Compile and load all that a recompute needs, before the first request. SGLang runs
        forwards on `forward_stream`."""
        self._prefill.warm(forward_stream)

    def expect(self, index: int, requests: Sequence[Request]) -> None:
        """Note the loading requests of batch `index`, which will run next."""
        self._loading[index] = requests

    def done(self, index: int) -> bool:
        """Settle the loads of a batch that has run. Return False if slots had wrong KV on any rank:
        SGLang then aborts the batch's loading requests."""
        requests, parts = self._loading.pop(index, ()), self._parts.pop(index, ())
        is_good = all(self._ranks.least([it.load.is_good for it in requests]))
        for part in parts if is_good else ():
            self._count_saving(part)
        for request in requests:
            if request.load.copy_s is not None:
                self._meter.loaded(request.load.copied_bytes, request.load.copy_s)
            self._labels.metrics.count_load(request, is_good=is_good)
            if not is_good:
                self._labels.note(request.req, RequestProvenance(outcome="aborted"))
            request.settle()
        return is_good

    def run_batch(
        self, original: Any, worker: Any, batch: ScheduleBatch | None, *args: Any, **kw: Any
    ) -> Any:
        """Complete the prefixes of the batch's loading requests, then run SGLang's own forward."""
        if batch is None or batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kw)
        requests, recompute = self._loading.get(batch.hicache_consumer_index, ()), (0.0, 0.0)
        if requests:
            self._parts[batch.hicache_consumer_index] = _parts_of(batch, requests)
            recompute = self._before(batch, requests)
        if batch.forward_mode.is_extend():
            for req, num_read in zip(batch.reqs, batch.prefix_lens, strict=True):
                if not num_read:
                    prefixes.move(req, approximate=False)
        is_plain_prefill = not requests and batch.forward_mode == ForwardMode.EXTEND
        started_s = time.monotonic()
        tokens = _tokens_of(batch) if is_plain_prefill else ()
        with self._meter.forward(tokens, (it.lora_id for it in batch.reqs)):
            result = original(worker, batch, *args, **kw)
        forward_s = time.monotonic() - started_s
        for request in requests:
            self._labels.note(request.req, provenance_of(request, recompute, forward_s))
            report.loaded(request, recompute)
        return result

    def _count_saving(self, part: _Part) -> None:
        """Count the seconds that reuse saved one request. Called once the device has run the batch
        to its end."""
        request = part.request
        full_s = self._meter.mean_prefill_s(part.tokens, request.req.lora_id)
        if full_s is not None:
            took_s = part.delay_s + part.share * (time.monotonic() - part.began_s)
            self._labels.metrics.count_saving(request.plan, full_s - took_s)

    def _before(self, batch: ScheduleBatch, requests: Sequence[Request]) -> tuple[float, float]:
        """Complete the prefixes of a batch: recompute every block, wait for the loads, and prefill
        in full what did not arrive. Returns start and stop of the recompute, on monotonic time."""
        rows = {req.rid: row for row, req in enumerate(batch.reqs)}
        loads = {rows[it.req.rid]: it.load for it in requests}
        for load in loads.values():
            self._e_pool.invalidate(load.slots)
        # Computed layers have no loads that the pool could wait for.
        self._loader.counter.set_consumer(NO_CONSUMER)
        started_s = time.monotonic()
        try:
            with self._ranks.together():
                for row, load in loads.items():
                    self._prefill.run_in_full(batch, row, load.head)
                self._recompute(batch, loads)
        except RanksApart:
            raise
        except Exception as exc:
            log.exception("a partial prefill failed")
            for load in loads.values():
                self._loader.abandon(load, FetchError(f"the partial prefill failed: {exc}"))
        stopped_s = time.monotonic()
        lacking = self._wait_staged(loads)
        for row, load in loads.items():
            if row not in lacking and load.plan.is_exact:
                self._keep_e(batch.reqs[row], load)
            if row not in lacking:
                _uncount(batch.reqs[row], len(load.head))
        # Record this before any full prefill: the batch's end waits only for these reads.
        self._loader.read_by_current_stream(batch.hicache_consumer_index)
        for row, error in lacking.items():
            self._fall_back(batch, row, loads[row], error)
        return started_s, stopped_s

    def _recompute(self, batch: ScheduleBatch, loads: Mapping[int, Load]) -> None:
        blocks = [
            BlockTokens(
                row=row,
                tokens=load.at,
                block=block,
                read_e=partial(load.source.read_e, block.start) if block.start else None,
                e_map=load.plan.e_map,
                is_exact=load.plan.is_exact,
            )
            for row, load in loads.items()
            if len(block := load.plan.block)
        ]
        if not blocks:
            return
        lengths = {len(it.block) for it in blocks}
        tokens = [it.tokens for it in blocks] if len(lengths) == 1 else []
        started_s = time.monotonic()
        # The block's last layer costs only its K and V projections.
        with self._meter.block(tokens, max(lengths) - 1):
            self._prefill.run(batch, blocks)
        self._labels.metrics.recompute_s.observe(time.monotonic() - started_s)

    def _wait_staged(self, loads: Mapping[int, Load]) -> dict[int, FetchError]:
        """Wait for late layers. Return the rows that have to be prefilled in full, each with the
        cause. All ranks return the same rows.

        Layers are late if, for example, the recompute was faster than predicted. Over a steady link
        they then arrive in less time than a full prefill takes.
        """
        now_s = time.monotonic()
        errors = []
        for load in loads.values():
            # The rate so far predicts the rest. A stalled fetch gets no more time than it has run.
            rest_s = min(load.source.rest_s, load.source.elapsed_s)
            most_s = min(rest_s + self._forward_wait_s, load.patience_s)
            errors.append(load.wait_staged(Deadline(now_s + most_s)))
        have_landed = self._ranks.least([error is None for error in errors])
        return {
            row: error or FetchError("another rank lacks a part of it")
            for row, error, landed in zip(loads, errors, have_landed, strict=True)
            if not landed
        }

    def _keep_e(self, req: Req, load: Load) -> None:
        """Copy E into the slots of a prefix with exact KV, if the source is in the KV pool and has
        E. Otherwise note that the prefix has no E."""
        has_e = False
        try:
            has_e = load.source.adopt_e(load.at, load.slots)
        except Exception:
            log.exception("request %s: its prefix is kept without E", name_of(req.rid))
        if not has_e:
            prefixes.note_without_e(req, load.at.stop)

    def _fall_back(self, batch: ScheduleBatch, row: int, load: Load, error: FetchError) -> None:
        """Prefill a load's tokens in full. Count them as computed, because SGLang has counted them
        as read from a cache."""
        req, tokens = batch.reqs[row], load.whole
        log.warning("request %s: %s; it does a full prefill", name_of(req.rid), error)
        self._loader.abandon(load, error)
        begun_s = time.monotonic()
        load.is_good = False
        try:
            with self._ranks.together():
                self._prefill.run_in_full(batch, row, tokens)
            load.is_good = True
        except RanksApart:
            raise
        except Exception:  # SGLang aborts the batch's loading requests.
            log.exception("request %s: the full prefill of its prefix failed", name_of(req.rid))
        report.fell_back(req, load.cause, begun_s)
        _uncount(req, len(tokens))
        if not load.plan.is_exact:
            prefixes.note_approximate(req, prefixes.num_approximate(req) - len(load.at))
        if not tokens.start:
            prefixes.move(req, approximate=False)


def _uncount(req: Req, num_tokens: int) -> None:
    """Correct SGLang's count of a request's cached tokens, because `num_tokens` of them were
    computed. Do nothing for a retracted request: SGLang has counted it before."""
    if not req.retracted_stain:
        req.cached_tokens -= num_tokens
        req.cached_tokens_host -= num_tokens


def _parts_of(batch: ScheduleBatch, requests: Sequence[Request]) -> list[_Part]:
    """Return the tokens and share of the work of each loading request. The unit of work is a new
    token; a loaded token counts as `Planned.step_share`."""
    began_s, rows = time.monotonic(), {req.rid: row for row, req in enumerate(batch.reqs)}
    work: list[float] = [*batch.extend_lens]
    for request in requests:
        load = request.load
        work[rows[request.req.rid]] += len(load.head) + request.planned.step_share * len(load.at)
    return [
        _Part(
            request=it,
            tokens=Span(it.load.whole.start, batch.prefix_lens[row] + batch.extend_lens[row]),
            share=work[row] / sum(work),
            delay_s=it.delay_s,
            began_s=began_s,
        )
        for it in requests
        for row in (rows[it.req.rid],)
    ]


def _tokens_of(batch: ScheduleBatch) -> list[Span]:
    lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return [Span(start, start + length) for start, length in lengths]
