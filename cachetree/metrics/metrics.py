"""Prometheus metrics of a cache, read off its status when they are asked for.

Nothing is counted twice and nothing costs anything between two scrapes. Labels are bounded: tiers,
outcomes that are named here, and the peers of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cachetree.status import CacheStatus
from cachetree.transport import PeerState

Sample = tuple[tuple[str, ...], float]
"""The labels' values, and the metric's."""

_OTHER: Final = "other"
"""In place of a location that no peer or tier has."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. `read` gives the samples that a cache has of it, none where it lacks the part."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...]
    read: Callable[[CacheStatus], Iterable[Sample]]

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


def _of_worker(field: str) -> Callable[[CacheStatus], Iterator[Sample]]:
    def read(status: CacheStatus) -> Iterator[Sample]:
        if status.worker:
            yield (), getattr(status.worker, field)

    return read


def _of_worker_by(field: str) -> Callable[[CacheStatus], Iterator[Sample]]:
    def read(status: CacheStatus) -> Iterator[Sample]:
        if status.worker:
            for label, num in getattr(status.worker, field).items():
                yield (label,), num

    return read


def _of_disk(field: str) -> Callable[[CacheStatus], Iterator[Sample]]:
    def read(status: CacheStatus) -> Iterator[Sample]:
        if status.disk:
            yield (), getattr(status.disk.counts, field)

    return read


def _late(status: CacheStatus) -> Iterator[Sample]:
    if status.disk:
        yield (), status.disk.num_late_entries


def _peer_ready(status: CacheStatus) -> Iterator[Sample]:
    return (((peer.address,), float(peer.state == PeerState.READY.value)) for peer in status.peers)


def _breaker_open(status: CacheStatus) -> Iterator[Sample]:
    resting = PeerState.RESTING.value
    return (((peer.address,), float(peer.state == resting)) for peer in status.peers)


def _pushes(status: CacheStatus) -> Iterator[Sample]:
    for link in status.stores:
        for outcome in ("stored", "known", "gone", "refused"):
            yield (link.address, outcome), getattr(link, f"num_{outcome}")


METRICS: Final = (
    Metric("cachetree:bytes", "gauge", "Bytes in use", ("tier",), _bytes),
    Metric("cachetree:budget_bytes", "gauge", "Bytes allowed", ("tier",), _budget_bytes),
    Metric(
        "cachetree:held_bytes",
        "gauge",
        "Bytes of memory that cannot be evicted now: leased, pinned, or being written",
        (),
        lambda status: [((), status.held_bytes)],
    ),
    Metric("cachetree:pages", "gauge", "Pages, counted once per model", ("tier",), _pages),
    Metric("cachetree:evictions", "counter", "Entries evicted", ("tier",), _evictions),
    Metric(
        "cachetree:hits",
        "counter",
        "Fetches of peers whose pages were all there",
        ("tier",),
        _of_worker_by("hits"),
    ),
    Metric(
        "cachetree:misses",
        "counter",
        "Fetches of peers whose pages were not",
        ("tier",),
        _of_worker_by("misses"),
    ),
    Metric(
        "cachetree:served_fetches",
        "counter",
        "Fetches of peers that ended, by how",
        ("outcome",),
        _of_worker_by("fetches_by_outcome"),
    ),
    Metric(
        "cachetree:sent_bytes", "counter", "Payload sent to peers", (), _of_worker("num_sent_bytes")
    ),
    Metric(
        "cachetree:received_bytes",
        "counter",
        "Payload that peers stored here",
        (),
        _of_worker("num_received_bytes"),
    ),
    Metric("cachetree:streams", "gauge", "Fetches being served", (), _of_worker("num_streams")),
    Metric("cachetree:sessions", "gauge", "Peers connected", (), _of_worker("num_peers")),
    Metric(
        "cachetree:open_stores", "gauge", "Stores being received", (), _of_worker("num_open_stores")
    ),
    Metric(
        "cachetree:stores",
        "counter",
        "Stores of peers, by what became of them",
        ("outcome",),
        _of_worker_by("stores_by_outcome"),
    ),
    Metric(
        "cachetree:protocol_errors",
        "counter",
        "Messages that broke the protocol",
        (),
        _of_worker("num_protocol_errors"),
    ),
    Metric(
        "cachetree:refused_peers",
        "counter",
        "Peers of another family or release",
        (),
        _of_worker("num_refused_peers"),
    ),
    Metric(
        "cachetree:failed_handshakes",
        "counter",
        "Connections that did not prove themselves",
        (),
        _of_worker("num_failed_handshakes"),
    ),
    Metric(
        "cachetree:fetches",
        "counter",
        "Fetches of this cache that ended, by location and by how",
        ("location", "outcome"),
        _fetches,
    ),
    Metric(
        "cachetree:fetched_bytes",
        "counter",
        "Payload that landed here",
        ("location",),
        _fetched_bytes,
    ),
    Metric(
        "cachetree:retries",
        "counter",
        "Requests for the rest of a fetch that was interrupted",
        ("location",),
        lambda status: [((peer.address,), peer.num_retries) for peer in status.peers],
    ),
    Metric(
        "cachetree:noted_pages",
        "gauge",
        "Pages that a peer is known to have, counted once per model",
        ("location",),
        lambda status: [((peer.address,), peer.num_pages) for peer in status.peers],
    ),
    Metric(
        "cachetree:dropped_adverts",
        "counter",
        "Pages of a peer that were given up because it has more than may be noted",
        ("location",),
        lambda status: [((peer.address,), peer.num_dropped_pages) for peer in status.peers],
    ),
    Metric(
        "cachetree:peer_ready", "gauge", "1 where a peer can be read", ("location",), _peer_ready
    ),
    Metric(
        "cachetree:breaker_open",
        "gauge",
        "1 where a peer failed too often and is left alone for a while",
        ("location",),
        _breaker_open,
    ),
    Metric(
        "cachetree:pushes",
        "counter",
        "Stores offered to a worker, by what became of them",
        ("location", "outcome"),
        _pushes,
    ),
    Metric(
        "cachetree:pushed_bytes",
        "counter",
        "Payload stored at a worker",
        ("location",),
        lambda status: [((link.address,), link.num_pushed_bytes) for link in status.stores],
    ),
    Metric(
        "cachetree:waiting_pushes",
        "gauge",
        "Entries that wait to be offered",
        ("location",),
        lambda status: [((link.address,), link.num_waiting) for link in status.stores],
    ),
    Metric(
        "cachetree:disk_written_bytes",
        "counter",
        "Bytes written to disk",
        (),
        _of_disk("num_written_bytes"),
    ),
    Metric(
        "cachetree:disk_read_bytes",
        "counter",
        "Bytes read from disk",
        (),
        _of_disk("num_read_bytes"),
    ),
    Metric(
        "cachetree:disk_failed_writes",
        "counter",
        "Entries that could not be written",
        (),
        _of_disk("num_failed_writes"),
    ),
    Metric(
        "cachetree:disk_damaged_entries",
        "counter",
        "Entries found damaged on disk, and what stood on them",
        (),
        _of_disk("num_damaged_entries"),
    ),
    Metric(
        "cachetree:disk_late_entries",
        "counter",
        "Entries that left memory before they were written",
        (),
        _late,
    ),
)
