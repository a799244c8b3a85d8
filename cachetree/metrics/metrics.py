"""Prometheus metrics of a cache, read from its status at each scrape.

The number of time series is bounded. Labels name tiers, outcomes, and the present peers. A peer
that has left is no longer shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachetree.status import CacheStatus, FetchCounts


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, kind, help text and labels."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    paths: Mapping[str, str]
    """Dotted path of attributes of CacheStatus, such as `disk.num_pages`, by the value of the last
    label. The key "" adds no label value: `_values` finds all of them along the path."""
    labels: tuple[str, ...]

    @property
    def sample_name(self) -> str:
        """Name of the metric's values in a scrape. Counters end in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def samples(self, status: CacheStatus) -> dict[tuple[str, ...], float]:
        """Return the metric's numbers by their label values. Empty if the metric is about a disk,
        worker or peer that the cache does not have."""
        return {
            (*found, label) if label else found: value
            for label, path in self.paths.items()
            for found, value in _values(status, path)
        }


class StatusCollector(Collector):
    """Collector of one cache's metrics, for a Prometheus registry."""

    def __init__(self, status: Callable[[], CacheStatus]) -> None:
        self._status = status

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        return map(_family, METRICS)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        status = self._status()
        for metric in METRICS:
            family = _family(metric)
            for labels, value in metric.samples(status).items():
                family.add_metric(labels, value)
            yield family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.text, labels=metric.labels)


def _metric(
    kind: Literal["counter", "gauge"],
    name: str,
    text: str,
    paths: str | Mapping[str, str],
    *labels: str,
) -> Metric:
    by_label = {"": paths} if isinstance(paths, str) else paths
    return Metric(f"cachetree:{name}", kind, text, by_label, labels)


_counter = partial(_metric, "counter")
_gauge = partial(_metric, "gauge")


def _values(part: Any, path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (label values, number) for each number at `path`, starting at the struct `part`. For a
    tuple on the path, the label value is each item's location or address; for a dict, each key.
    Yields nothing if an attribute on the path is None."""
    name, _, rest = path.partition(".")
    match getattr(part, name):
        case None:
            return
        case tuple() as each:
            for one in each:
                where = one.location if isinstance(one, FetchCounts) else one.address
                yield from (((where, *labels), it) for labels, it in _values(one, rest))
        case dict() as by_label:
            yield from (((label,), float(it)) for label, it in by_label.items())
        case found if rest:
            yield from _values(found, rest)
        case number:
            yield (), float(number)


_IN_USE: Final = {
    "memory": "num_bytes",
    "staging": "staging_bytes_in_use",
    "disk": "disk.num_bytes",
}
_BUDGETS: Final = {"memory": "host_bytes", "staging": "staging_bytes", "disk": "disk.budget_bytes"}
_EVICTIONS: Final = {"memory": "num_evictions", "disk": "disk.counts.num_evicted_entries"}
_PULLS: Final = {it: f"peers.pulls.num_{it}" for it in ("fetched", "gone", "failed")}

METRICS: Final = (
    _gauge("bytes", "Bytes in use", _IN_USE, "tier"),
    _gauge("budget_bytes", "Bytes allowed", _BUDGETS, "tier"),
    _gauge(
        "held_bytes",
        "Bytes of memory that cannot be evicted now: leased, pinned, or being written",
        "held_bytes",
    ),
    _gauge(
        "pages",
        "Pages, counted once per model",
        {"memory": "num_pages", "disk": "disk.num_pages"},
        "tier",
    ),
    _counter("evictions", "Entries evicted", _EVICTIONS, "tier"),
    _counter("hits", "Fetches of peers whose pages were all there", "worker.hits", "tier"),
    _counter("misses", "Fetches of peers whose pages were not", "worker.misses", "tier"),
    _counter(
        "served_fetches",
        "Fetches of peers that ended, by how",
        "worker.fetches_by_outcome",
        "outcome",
    ),
    _counter("sent_bytes", "Payload sent to peers", "worker.num_sent_bytes"),
    _gauge("streams", "Fetches being served", "worker.num_streams"),
    _gauge("sessions", "Peers connected", "worker.num_peers"),
    _counter("protocol_errors", "Messages that broke the protocol", "worker.num_protocol_errors"),
    _counter(
        "refused_peers", "Hellos of peers of another family or release", "worker.num_refused_peers"
    ),
    _counter(
        "failed_handshakes",
        "Connections that did not prove themselves",
        "worker.num_failed_handshakes",
    ),
    _counter(
        "fetches",
        "Fetches of this cache that ended, by location and by how",
        "fetches.outcomes",
        "location",
        "outcome",
    ),
    _counter("fetched_bytes", "Payload that landed here", "fetches.num_bytes", "location"),
    _counter(
        "retries",
        "Requests for the rest of a fetch that was interrupted",
        "peers.num_retries",
        "location",
    ),
    _gauge(
        "noted_pages",
        "Pages that a peer is known to have, counted once per model",
        "peers.num_pages",
        "location",
    ),
    _counter(
        "dropped_adverts",
        "Pages of a peer that were given up because it has more than may be noted",
        "peers.num_dropped_pages",
        "location",
    ),
    _gauge("peer_ready", "1 where a peer can be read", "peers.is_ready", "location"),
    _gauge(
        "breaker_open",
        "1 where a peer failed too often and is left alone for a while",
        "peers.is_resting",
        "location",
    ),
    _counter(
        "pulls", "Copies of what a peer has, by what became of them", _PULLS, "location", "outcome"
    ),
    _counter("pulled_bytes", "Payload copied from a peer", "peers.pulls.num_bytes", "location"),
    _gauge(
        "waiting_pulls",
        "Entries of a peer that wait to be copied",
        "peers.pulls.num_waiting",
        "location",
    ),
    _gauge(
        "tier_paused",
        "1 where a disk or storage fails or hangs, and is not read for now",
        "paused_tiers",
        "location",
    ),
    _counter("disk_written_bytes", "Bytes written to disk", "disk.counts.num_written_bytes"),
    _counter("disk_read_bytes", "Bytes read from disk", "disk.counts.num_read_bytes"),
    _counter(
        "disk_failed_writes", "Entries that could not be written", "disk.counts.num_failed_writes"
    ),
    _counter(
        "disk_damaged_entries",
        "Entries found damaged on disk, and what stood on them",
        "disk.counts.num_damaged_entries",
    ),
    _counter(
        "disk_late_entries",
        "Entries that left memory before they were written",
        "disk.num_late_entries",
    ),
)
