"""Prometheus metrics of a cache, read off its status when they are asked for.

Nothing is counted twice and nothing costs anything between two scrapes. Labels are bounded: tiers,
outcomes that are named here, and the peers of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachetree.disk import DiskStatus
from cachetree.status import CacheStatus
from cachetree.transport import PeerState, Status

Sample = tuple[tuple[str, ...], float]
"""The labels' values, and the metric's."""

Read = Callable[[CacheStatus], Iterable[Sample]]

_OTHER: Final = "other"
"""In place of a location that no peer or tier has."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. `read` gives the samples that a cache has of it, none where it lacks the part."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...]
    read: Read

    @property
    def sample_name(self) -> str:
        """As it is scraped."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def samples(self, status: CacheStatus) -> dict[tuple[str, ...], float]:
        """The labels' values to the metric's."""
        sums: dict[tuple[str, ...], float] = {}
        for labels, value in self.read(status):
            sums[labels] = sums.get(labels, 0.0) + value
        return sums


class StatusCollector(Collector):
    """Gives a registry the metrics of one cache."""

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


def _counter(name: str, text: str, read: Read, *labels: str) -> Metric:
    return Metric(f"cachetree:{name}", "counter", text, labels, read)


def _gauge(name: str, text: str, read: Read, *labels: str) -> Metric:
    return Metric(f"cachetree:{name}", "gauge", text, labels, read)


def _bytes(status: CacheStatus) -> Iterator[Sample]:
    yield ("memory",), status.num_bytes
    yield ("staging",), status.staging_bytes_in_use
    if status.disk:
        yield ("disk",), status.disk.num_bytes


def _budget_bytes(status: CacheStatus) -> Iterator[Sample]:
    yield ("memory",), status.host_bytes
    yield ("staging",), status.staging_bytes
    if status.disk:
        yield ("disk",), status.disk.budget_bytes


def _pages(status: CacheStatus) -> Iterator[Sample]:
    yield ("memory",), status.num_pages
    if status.disk:
        yield ("disk",), status.disk.num_pages


def _evictions(status: CacheStatus) -> Iterator[Sample]:
    yield ("memory",), status.num_evictions
    if status.disk:
        yield ("disk",), status.disk.counts.num_evicted_entries


def _fetches(status: CacheStatus) -> Iterator[Sample]:
    for counts in status.fetches:
        for outcome, num in counts.outcomes.items():
            yield (_known(counts.location, status), outcome), num


def _fetched_bytes(status: CacheStatus) -> Iterator[Sample]:
    for counts in status.fetches:
        yield (_known(counts.location, status),), counts.num_bytes


def _known(location: str, status: CacheStatus) -> str:
    known = {"local", *status.tiers, *(peer.address for peer in status.peers)}
    return location if location in known else _OTHER


def _worker(read: Callable[[Status], float]) -> Read:
    return lambda status: [((), read(status.worker))] if status.worker else []


def _workers(read: Callable[[Status], Mapping[str, int]]) -> Read:
    return lambda status: (
        [((label,), num) for label, num in read(status.worker).items()] if status.worker else []
    )


def _disk(read: Callable[[DiskStatus], float]) -> Read:
    return lambda status: [((), read(status.disk))] if status.disk else []


def _peer_ready(status: CacheStatus) -> Iterator[Sample]:
    return (((peer.address,), float(peer.state is PeerState.READY)) for peer in status.peers)


def _breaker_open(status: CacheStatus) -> Iterator[Sample]:
    return (((peer.address,), float(peer.state is PeerState.RESTING)) for peer in status.peers)


def _pushes(status: CacheStatus) -> Iterator[Sample]:
    for link in status.stores:
        yield (link.address, "stored"), link.num_stored
        yield (link.address, "known"), link.num_known
        yield (link.address, "gone"), link.num_gone
        yield (link.address, "refused"), link.num_refused


METRICS: Final = (
    _gauge("bytes", "Bytes in use", _bytes, "tier"),
    _gauge("budget_bytes", "Bytes allowed", _budget_bytes, "tier"),
    _gauge(
        "held_bytes",
        "Bytes of memory that cannot be evicted now: leased, pinned, or being written",
        lambda status: [((), status.held_bytes)],
    ),
    _gauge("pages", "Pages, counted once per model", _pages, "tier"),
    _counter("evictions", "Entries evicted", _evictions, "tier"),
    _counter(
        "hits", "Fetches of peers whose pages were all there", _workers(lambda it: it.hits), "tier"
    ),
    _counter(
        "misses", "Fetches of peers whose pages were not", _workers(lambda it: it.misses), "tier"
    ),
    _counter(
        "served_fetches",
        "Fetches of peers that ended, by how",
        _workers(lambda it: it.fetches_by_outcome),
        "outcome",
    ),
    _counter("sent_bytes", "Payload sent to peers", _worker(lambda it: it.num_sent_bytes)),
    _counter(
        "received_bytes",
        "Payload that peers stored here",
        _worker(lambda it: it.num_received_bytes),
    ),
    _gauge("streams", "Fetches being served", _worker(lambda it: it.num_streams)),
    _gauge("sessions", "Peers connected", _worker(lambda it: it.num_peers)),
    _gauge("open_stores", "Stores being received", _worker(lambda it: it.num_open_stores)),
    _counter(
        "stores",
        "Stores of peers, by what became of them",
        _workers(lambda it: it.stores_by_outcome),
        "outcome",
    ),
    _counter(
        "protocol_errors",
        "Messages that broke the protocol",
        _worker(lambda it: it.num_protocol_errors),
    ),
    _counter(
        "refused_peers",
        "Peers of another family or release",
        _worker(lambda it: it.num_refused_peers),
    ),
    _counter(
        "failed_handshakes",
        "Connections that did not prove themselves",
        _worker(lambda it: it.num_failed_handshakes),
    ),
    _counter(
        "fetches",
        "Fetches of this cache that ended, by location and by how",
        _fetches,
        "location",
        "outcome",
    ),
    _counter("fetched_bytes", "Payload that landed here", _fetched_bytes, "location"),
    _counter(
        "retries",
        "Requests for the rest of a fetch that was interrupted",
        lambda status: [((peer.address,), peer.num_retries) for peer in status.peers],
        "location",
    ),
    _gauge(
        "noted_pages",
        "Pages that a peer is known to have, counted once per model",
        lambda status: [((peer.address,), peer.num_pages) for peer in status.peers],
        "location",
    ),
    _counter(
        "dropped_adverts",
        "Pages of a peer that were given up because it has more than may be noted",
        lambda status: [((peer.address,), peer.num_dropped_pages) for peer in status.peers],
        "location",
    ),
    _gauge("peer_ready", "1 where a peer can be read", _peer_ready, "location"),
    _gauge(
        "breaker_open",
        "1 where a peer failed too often and is left alone for a while",
        _breaker_open,
        "location",
    ),
    _counter(
        "pushes",
        "Stores offered to a worker, by what became of them",
        _pushes,
        "location",
        "outcome",
    ),
    _counter(
        "pushed_bytes",
        "Payload stored at a worker",
        lambda status: [((link.address,), link.num_pushed_bytes) for link in status.stores],
        "location",
    ),
    _gauge(
        "waiting_pushes",
        "Entries that wait to be offered",
        lambda status: [((link.address,), link.num_waiting) for link in status.stores],
        "location",
    ),
    _counter(
        "disk_written_bytes", "Bytes written to disk", _disk(lambda it: it.counts.num_written_bytes)
    ),
    _counter("disk_read_bytes", "Bytes read from disk", _disk(lambda it: it.counts.num_read_bytes)),
    _counter(
        "disk_failed_writes",
        "Entries that could not be written",
        _disk(lambda it: it.counts.num_failed_writes),
    ),
    _counter(
        "disk_damaged_entries",
        "Entries found damaged on disk, and what stood on them",
        _disk(lambda it: it.counts.num_damaged_entries),
    ),
    _counter(
        "disk_late_entries",
        "Entries that left memory before they were written",
        _disk(lambda it: it.num_late_entries),
    ),
)
