"""Around each forward of the model worker: the partial prefill, the marks, the way back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cachetree import Deadline, FetchError, Span
from sglang_droidspeak import engine
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import ForwardMode
from sglang_droidspeak.ranks import RanksApart
from sglang_droidspeak.request.meta_info import provenance_of
from sglang_droidspeak.request.partial_prefill import PartialPrefill, Prefix
from sglang_droidspeak.request.source import Loaded

if TYPE_CHECKING:
    import torch

    from sglang_droidspeak.cost import Meter
    from sglang_droidspeak.engine.names import ModelRunner, Req, ScheduleBatch
    from sglang_droidspeak.ranks import Ranks
    from sglang_droidspeak.request.job import Job
    from sglang_droidspeak.request.labels import Labels
    from sglang_droidspeak.request.loader import Loader
    from sglang_droidspeak.request.low_rank import LowRank
    from sglang_droidspeak.store.capture import Attachment

log = logging.getLogger(__name__)

NO_CONSUMER = -1
"""Index at which the KV pool waits for no load: a partial prefill reads what it wrote itself."""


class ForwardPass:
    """Scheduler thread only. `run_batch` hooks TpModelWorker.forward_batch_generation."""

    def __init__(
        self,
        attachment: Attachment,
        loader: Loader,
        low_rank: LowRank,
        meter: Meter,
        labels: Labels,
        ranks: Ranks,
    ) -> None:
        site = attachment.site
        self._runner = attachment.runner
        self._e_pool = attachment.e_pool
        self._forward_wait_s = site.settings.forward_wait_s
        self._loader = loader
        self._low_rank = low_rank
        self._provenance = attachment.provenance
        self._meter = meter
        self._labels = labels
        self._ranks = ranks
        self._prefill = PartialPrefill(
            attachment.runner, attachment.stack, largest_forward(attachment.runner), ranks
        )
        self._jobs: dict[int, Sequence[Job]] = {}

    def expect(self, index: int, jobs: Sequence[Job]) -> None:
        """The batch that waits on `index` is about to run with these loads."""
        self._jobs[index] = jobs

    def done(self, index: int) -> bool:
        """The batch has run; whether what it read was what it should have read."""
        jobs = self._jobs.pop(index, ())
        for job in jobs:
            job.source.release()
        return not any(job.is_lost or (job.is_broken and not job.abandoned) for job in jobs)

    def run_batch(
        self, original: Any, worker: Any, batch: ScheduleBatch | None, *args: Any, **kw: Any
    ) -> Any:
        """Bring the batch's loaded prefixes into place, then run SGLang's own forward."""
        if batch is None or batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kw)
        jobs = self._jobs.get(batch.hicache_consumer_index, ())
        settled = self._before(batch, jobs) if jobs else None
        if batch.forward_mode.is_extend():
            for req, num_read in zip(batch.reqs, batch.prefix_lens, strict=True):
                if not num_read:
                    prefixes.move(req, approximate=False)
        marks = self._provenance.inherit(batch, self._runner.req_to_token_pool.req_to_token)
        if marks is not None:
            self._labels.read(batch.reqs, marks)
        is_plain_prefill = not jobs and batch.forward_mode == ForwardMode.EXTEND
        started_s = time.monotonic()
        with self._meter.forward(_tokens_of(batch) if is_plain_prefill else ()):
            result = original(worker, batch, *args, **kw)
        if settled is not None:
            self._report(settled, time.monotonic() - started_s)
        return result

    def _before(self, batch: ScheduleBatch, jobs: Sequence[Job]) -> _Settled:
        """Recompute every block, then have every loaded layer on its way into its slots."""
        row_of = {req.rid: row for row, req in enumerate(batch.reqs)}
        places = [self._place(batch, row_of[job.rid], job) for job in jobs]
        for job in jobs:
            self._e_pool.invalidate(job.slots)
        # The pool must not wait for loads of computed layers: there are none.
        self._loader.counter.set_consumer(NO_CONSUMER)
        started_s = time.monotonic()
        try:
            with self._ranks.together():
                for it in places:
                    self._refresh(it)
                self._run(batch, [prefix for it in places for prefix in self._prefixes(it)])
        except RanksApart:
            raise
        except Exception as exc:
            log.exception("a partial prefill failed")
            for job in jobs:
                self._loader.abandon(job, FetchError(f"the partial prefill failed: {exc}"))
        recompute = (started_s, time.monotonic())
        self._loader.read_by_current_stream(batch.hicache_consumer_index)
        errors = self._wait_staged(jobs)
        causes = [self._settle(batch, *it) for it in zip(places, errors, strict=True)]
        return _Settled(recompute, list(zip(places, causes, strict=True)))

    def _wait_staged(self, jobs: Sequence[Job]) -> list[FetchError | None]:
        """Why each job has to be prefilled in full, if it has to: on all ranks or on none."""
        now_s = time.monotonic()
        waits_s = [min(self._forward_wait_s, job.patience_s) for job in jobs]
        errors = [
            _staging_error(job, Deadline(now_s + wait_s))
            for job, wait_s in zip(jobs, waits_s, strict=True)
        ]
        have_landed = self._ranks.least([error is None for error in errors])
        return [
            error if landed or error is not None else FetchError("another rank lacks a part of it")
            for error, landed in zip(errors, have_landed, strict=True)
        ]

    def _place(self, batch: ScheduleBatch, row: int, job: Job) -> _Place:
        stop = batch.prefix_lens[row]
        start = stop - job.num_tokens
        table = self._runner.req_to_token_pool.req_to_token[int(batch.req_pool_indices_cpu[row])]
        return _Place(
            job=job,
            req=batch.reqs[row],
            row=row,
            tokens=Span(start, stop),
            slot_before=table[max(0, start - 1) : start].long(),
        )

    def _refresh(self, it: _Place) -> None:
        """Refresh in low rank what can be; the rest is projected anew."""
        job, loaded = it.job, Loaded(it.job.tokens, it.job.slots, it.tokens)
        job.low_rank += [
            layer
            for layer in job.plan.refreshed
            if job.source.refresh(self._low_rank, layer, loaded)
        ]

    def _prefixes(self, it: _Place) -> Iterator[Prefix]:
        for span in it.job.plan.computed_spans:
            if span.start in it.job.low_rank:
                continue
            e = partial(it.job.e, span.start) if span.start else None
            exact = it.job.plan.is_exact
            yield Prefix(row=it.row, tokens=it.tokens, block=span, e=e, is_exact=exact)

    def _run(self, batch: ScheduleBatch, prefixes: Sequence[Prefix]) -> None:
        if not prefixes:
            return
        lengths = {len(it.block) for it in prefixes}
        tokens = [it.tokens for it in prefixes] if len(lengths) == 1 else []
        started_s = time.monotonic()
        # The block's last layer costs only its K and V projections.
        with self._meter.block(tokens, max(lengths) - 1):
            self._prefill.run(batch, prefixes)
        self._labels.metrics.recompute_s.observe(time.monotonic() - started_s)

    def _settle(self, batch: ScheduleBatch, it: _Place, error: FetchError | None) -> str:
        """Have every layer of the job in place; returns why it took a full prefill, if it did."""
        job, cause = it.job, ""
        if error is not None:
            cause = type(error).__name__
            log.warning("request %s: %s; it does a full prefill", job.rid, error)
            self._loader.abandon(job, error)
            self._prefill_in_full(batch, it)
            if not it.tokens.start:
                prefixes.move(it.req, approximate=False)
        elif job.plan.is_exact:
            job.source.adopt_e(job.tokens, job.slots)
        is_exact = bool(cause) or job.plan.is_exact
        self._provenance.loaded(job.slots, it.slot_before, exact=is_exact)
        return cause

    def _prefill_in_full(self, batch: ScheduleBatch, it: _Place) -> None:
        """The last resort; where it fails too, SGLang aborts the batch's loading requests."""
        try:
            with self._ranks.together():
                self._prefill.run_in_full(batch, it.row, it.tokens)
        except RanksApart:
            raise
        except Exception:
            log.exception("request %s: the full prefill of its prefix failed", it.job.rid)
            it.job.is_lost = True

    def _report(self, settled: _Settled, forward_s: float) -> None:
        for it, cause in settled.causes:
            self._labels.metrics.count_load(it.job, cause)
            self._meter.loaded(it.job.copied_bytes, it.job.copied_s)
            told = provenance_of(it.job, settled.recompute, forward_s, cause)
            self._labels.note(it.req, told)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a job's tokens stand in the batch that loads them."""

    job: Job
    req: Req
    row: int
    tokens: Span
    slot_before: torch.Tensor
    """Slot of the token before them, `[1]`, or `[0]` elements at the start; int64."""


@dataclass(frozen=True, slots=True)
class _Settled:
    recompute: tuple[float, float]
    """Start and stop, on monotonic time."""
    causes: list[tuple[_Place, str]]
    """Why each took a full prefill, or empty."""


def _tokens_of(batch: ScheduleBatch) -> list[Span]:
    """That the batch extends its prompts by."""
    lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return [Span(start, start + length) for start, length in lengths]


def _staging_error(job: Job, deadline: Deadline) -> FetchError | None:
    try:
        job.wait_staged(deadline)
    except FetchError as exc:
        return exc
    return None


def largest_forward(runner: ModelRunner) -> int:
    """Tokens of one prefill; SGLang says -1 where it does not cut prefills into chunks."""
    args = engine.resolved(runner.server_args)
    chunk = args.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens
