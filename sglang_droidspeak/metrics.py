"""Prometheus metrics of the scheduler process, in SGLang's multiprocess mode."""

from __future__ import annotations

import logging
import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from cachetree import ModelId
from cachetree.metrics import METRICS

if TYPE_CHECKING:
    from cachetree import CacheStatus
    from cachetree.planning import LineProfile, Plan, Profiles
    from sglang_droidspeak.guard.plans import WatchedPair
    from sglang_droidspeak.request.request import Request

log = logging.getLogger(__name__)

_PERIOD_S: Final = 2.0
"""Seconds between two copies of the cache's own metrics into SGLang's."""
HEIR_STATES: Final = ("probation", "in_service", "out_of_service", "too_far")
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Saving(msgspec.Struct, kw_only=True):
    """Seconds that reuse between a sender and a receiver has saved, and seconds that it has lost,
    since the start."""

    sender: ModelId
    receiver: ModelId
    saved_s: float = 0.0
    lost_s: float = 0.0


class Metrics:
    """Metrics of one scheduler process. Make it after SGLang has set PROMETHEUS_MULTIPROC_DIR.

    If not `enabled`, metrics count, but are not registered.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._are_off = False
        self._usable: set[tuple[ModelId, ModelId]] = set()
        """Pairs that were usable at some time since the start."""
        registry = REGISTRY if enabled else None
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests: Final[Counter] = counter(
            "droidspeak:requests",
            "Requests by outcome: reused, a reason for no reuse, or aborted",
            ["outcome"],
        )
        self.approximate: Final[Counter] = counter(
            "droidspeak:approximate_requests",
            "Requests with an answer that depends on another model's KV, or on encoded KV; without "
            "aborted requests",
        )
        self.not_invoked: Final[Counter] = counter(
            "droidspeak:not_invoked_requests",
            "Requests that the base answered because their prompt never invokes the activated LoRA "
            "that they name",
        )
        self.model_info: Final[Gauge] = Gauge(
            "droidspeak:model_info",
            "1 for the present name of a model of this server, its pairs or its peers, 0 for a "
            "former name. A model without a name has its id's first eight digits",
            ["model", "name"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._named: Mapping[str, str] = {}
        self._in_pairs: Mapping[str, str] = {}
        pair = ["sender", "receiver"]
        of_pair = partial(Gauge, labelnames=pair, registry=registry, multiprocess_mode="livemax")
        self.pair_usable: Final[Gauge] = of_pair(
            "droidspeak:pair_usable",
            "1 if the receiver may reuse the sender's KV; 0 if the drift guard stopped all plans, "
            "the weights after an update are unknown, or the loader failed. No sample if the "
            "pair's profile did not pass",
        )
        self.reused_tokens: Final[Counter] = counter(
            "droidspeak:reused_tokens",
            "Prompt tokens not prefilled in full, by whether their KV is exact or approximate",
            ["kind"],
        )
        self.approximate_tokens: Final[Counter] = counter(
            "droidspeak:approximate_tokens",
            "Prompt tokens with KV that was made from another model's or from encoded KV, for this "
            "request or for an earlier one",
        )
        self.saved_s: Final[Counter] = counter(
            "droidspeak:saved_seconds",
            "Seconds by which reuse was faster than the predicted full prefill of the same tokens",
            pair,
        )
        self.lost_s: Final[Counter] = counter(
            "droidspeak:lost_seconds",
            "Seconds by which reuse was slower than the predicted full prefill of the same tokens, "
            "with waits for fetches that failed",
            pair,
        )
        self.savings: Final[dict[tuple[ModelId, ModelId], Saving]] = {}
        """Seconds saved and lost since the start, by (sender, receiver)."""
        self.heirs: Final[Gauge] = Gauge(
            "droidspeak:heirs",
            "Pairs that may inherit a line's plan, by state: on probation, in service, out of "
            "service, or changed too much (too_far). Other metrics count these pairs as the last "
            "pair of their line",
            ["state"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._lines: Mapping[tuple[ModelId, ModelId], tuple[ModelId, ModelId]] = {}
        """Pairs that inherit a plan from a line, each with the last pair of the line."""
        self.fetched_bytes: Final[Counter] = counter(
            "droidspeak:fetched_bytes",
            "Bytes of E and KV staged for admitted requests; cachetree:fetched_bytes also has "
            "those of fetches that were given up earlier",
        )
        self.fallbacks: Final[Counter] = counter(
            "droidspeak:fallbacks",
            "Reuse that was begun and ended in a full prefill, by cause",
            ["cause"],
        )
        self.hicache_objects: Final[Counter] = counter(
            "droidspeak:hicache_objects",
            "Objects of the HiCache backend, by result of reading or writing them",
            ["result"],
        )
        self.kv_event_pages: Final[Counter] = counter(
            "droidspeak:kv_event_pages",
            "Pages of host memory in KV events: stored, removed, or dropped because too many "
            "events waited",
            ["kind"],
        )
        self.shadows: Final[Counter] = counter(
            "droidspeak:shadows",
            "Comparisons of reused requests with exact runs, by result: compared, dropped because "
            "the server was busy too long, or failed",
            ["result"],
        )
        self.shadow_tv: Final[Histogram] = histogram(
            "droidspeak:shadow_tv",
            "Total variation between the served answer and an exact run, one value per comparison",
            pair,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        )
        self.guard_evidence: Final[Gauge] = of_pair(
            "droidspeak:guard_evidence",
            "Most evidence against any of the pair's plans in service; at 100,000 the guard stops "
            "that plan",
        )
        self.guard_plans: Final[Gauge] = of_pair(
            "droidspeak:guard_plans",
            "Number of the pair's approximate plans that the drift guard leaves in service",
        )
        self.guard_changes: Final[Counter] = counter(
            "droidspeak:guard_changes",
            "Changes of the pair's plans in service: alarms, resets, and restarts after alarms",
            pair,
        )
        self.queued_s: Final[Histogram] = histogram(
            "droidspeak:queued_seconds",
            "From the first step that could take a request to its admission with staged layers",
            buckets=_SECONDS,
        )
        self.recompute_s: Final[Histogram] = histogram(
            "droidspeak:recompute_seconds", "Partial prefill of one batch", buckets=_SECONDS
        )

    def count_hicache_objects(self, result: str, num: int) -> None:
        """Count objects of the HiCache backend by result. Thread-safe."""
        self.hicache_objects.labels(result).inc(num)

    def count_outcome(self, outcome: str, *, exact: bool = True, num_approximate: int = 0) -> None:
        """Count one request, with the values of its meta_info. Call it once for each request."""
        kind, _, cause = outcome.partition(": ")
        self.requests.labels(kind).inc()
        self.approximate.inc(not exact)
        self.approximate_tokens.inc(num_approximate)
        if cause:
            self.fallbacks.labels(cause).inc()

    def tell_pairs(self, profiles: Profiles, *, are_off: bool | None = None) -> None:
        """Set the metric `pair_usable` of each pair: 0 if `are_off`. None: `are_off` as in the last
        call.

        A pair that was never usable has no sample, so that it raises no alert.
        """
        if are_off is not None:
            self._are_off = are_off
        profiles = {pair: it for pair, it in profiles.items() if pair not in self._lines}
        self._in_pairs = {**self._in_pairs, **{str(it): it[:8] for pair in profiles for it in pair}}
        self._usable |= {it for it, profile in profiles.items() if profile.is_usable}
        for pair in self._usable & profiles.keys():
            self.pair_usable.labels(*pair).set(profiles[pair].is_usable and not self._are_off)

    def tell_heirs(
        self, heirs: Mapping[tuple[ModelId, ModelId], LineProfile], states: Iterable[str]
    ) -> None:
        """Set the pairs that inherit a plan, and their states (`WatchedPair.state`).

        Counters count such a pair as the last pair of its line. Each update makes new pairs, and
        Prometheus never removes labels.
        """
        self._lines = {
            pair: (it.line.models[-2].model_id, it.line.models[-1].model_id)
            for pair, it in heirs.items()
        }
        counts = Counts(states)
        for state in HEIR_STATES:
            self.heirs.labels(state).set(counts[state])

    def counted_as(self, pair: tuple[ModelId, ModelId]) -> tuple[ModelId, ModelId]:
        """Return the pair for metric labels: `pair`, or its line's last pair if it inherits."""
        return self._lines.get(pair, pair)

    def tell_names(self, names: Mapping[str, str]) -> None:
        """Set the present name of each model id. Only one thread may call it."""
        now = {**self._in_pairs, **names}
        for model, name in self._named.items() - now.items():
            self.model_info.labels(model, name).set(0)
        for model, name in now.items() - self._named.items():
            self.model_info.labels(model, name).set(1)
        self._named = now

    def tell_guard(self, pair: WatchedPair) -> None:
        names = (pair.sender, pair.receiver)
        if names in self._lines:
            return
        self.guard_changes.labels(*names)  # This makes a sample of 0.
        self.guard_plans.labels(*names).set(pair.num_left)
        self.guard_evidence.labels(*names).set(pair.strength)

    def count_load(self, request: Request, *, is_good: bool) -> None:
        """Count a request that has loaded its pages, or that was prefilled in full instead. If
        `is_good` is False, SGLang aborts its batch, and no tokens count as reused."""
        self.fetched_bytes.inc(request.source.staging.num_landed_bytes)
        self.queued_s.observe(request.queued_s)
        if is_good and not request.load.cause:
            kind = "exact" if request.plan.is_exact else "approximate"
            self.reused_tokens.labels(kind).inc(len(request.load.at))

    def count_saving(self, plan: Plan, seconds: float) -> None:
        """Add the seconds that a plan has saved for one request. Negative: the request took longer
        than a full prefill."""
        models = self.counted_as((plan.sender, plan.receiver))
        saved, lost = self.saved_s.labels(*models), self.lost_s.labels(*models)
        total = self.savings.setdefault(models, Saving(sender=models[0], receiver=models[1]))
        if seconds > 0:
            saved.inc(seconds)
            total.saved_s += seconds
        else:
            lost.inc(-seconds)
            total.lost_s -= seconds


class CacheMetrics:
    """Copy the cache's own metrics into this process's registry every two seconds, in a thread.

    SGLang gathers the metrics of its processes from files, so values have to be written.
    """

    def __init__(
        self,
        status: Callable[[], CacheStatus],
        registry: CollectorRegistry = REGISTRY,
        *,
        beside: Callable[[], None],
    ) -> None:
        """Start the thread that copies the numbers of `status`. After each copy it calls `beside`,
        which writes other metrics."""
        self._status = status
        self._beside = beside
        gauge = partial(Gauge, multiprocess_mode="livesum")
        self._made = [
            (Counter if it.kind == "counter" else gauge)(
                it.name, it.text, it.labels, registry=registry
            )
            for it in METRICS
        ]
        self._told: dict[Counter | Gauge, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="droidspeak-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._copy()
                self._beside()
            except Exception:
                log.exception("the cache's metrics were not copied")
            if self._closing.wait(_PERIOD_S):
                return

    def _copy(self) -> None:
        status = self._status()
        before, self._told = self._told, {}
        for metric, made in zip(METRICS, self._made, strict=True):
            for labels, value in metric.samples(status).items():
                sample = made.labels(*labels) if labels else made
                self._told[sample] = value
                previous = before.pop(sample, 0.0)
                if isinstance(sample, Gauge):
                    sample.set(value)
                else:  # A peer that has restarted counts from 0.
                    sample.inc(value - previous if value >= previous else value)
        for gone in before:  # The files keep its labels. 0 would mean an unreadable peer.
            if isinstance(gone, Gauge):
                gone.set(nan)
