"""Compute how long requests wait for their first token, with three strategies of loading.

One link loads layers and one device computes; each does one thing at a time. Requests are served in
the order of their arrival. Three strategies (DroidSpeak, NSDI '26, section 4.3 and its figure on
pipelined loading):

    EVERYTHING_FIRST  a request loads E and the KV of all layers, then recomputes its block;
                      nothing else runs until it is done
    REUSED_FIRST      the same, without the KV of the layers that it recomputes anyway
    PIPELINED         the link loads E, then the reused KV in layer order, for one request after
                      the other; a block starts as soon as its E is loaded and the device is free

The paper's example: 10 layers; each load, each recompute and each load of E takes 1 unit. A arrives
at 0, recomputes layers 4 to 10 and loads 1 to 3. B arrives at 2, recomputes 1 to 3 and loads 4 to
10. B's block begins at the first layer, so it starts from embeddings and needs no E.

    EVERYTHING_FIRST  A: 1 E + 10 KV + 7 recomputed = 18. B: waits until 18, 10 KV + 3 = done at
                      31, TTFT 29. Total 47.
    REUSED_FIRST      A: 1 E + 3 KV + 7 recomputed = 11. B: waits until 11, 7 KV + 3 = done at
                      21, TTFT 19. Total 30.
    PIPELINED         A: E until 1, recompute 1 to 8 (KV arrives meanwhile, 1 to 4): 8. B: KV 4 to
                      11, recompute 8 to 11 once A has left the device: done at 11, TTFT 9.
                      Total 17.

All three totals equal the paper's, so this reading of it is right. E costs as much as one layer's
KV. Only requests with a transition layer load E. The first two strategies never overlap anything.
The model leaves out the work for a request's own new tokens. A running block is not interrupted for
an earlier request's block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachetree import Span
from cachetree.planning import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The work of one request. The caller chooses the unit of all times.

    layers [0, block.start)           loaded
    layers [block.start, block.stop)  recomputed, from E at block.start (from embeddings at 0)
    layers [block.stop, num_layers)   loaded
    """

    block: Span
    num_layers: int
    load: float
    """Time to load the KV of one layer."""
    recompute: float
    """Time to recompute the whole block."""
    e_load: float
    """Time to load E at one layer. It counts only if the block needs E."""
    arrival: float = 0.0

    @property
    def e_time(self) -> float:
        return self.e_load if len(self.block) and self.block.start else 0.0

    def kv_time(self, strategy: Strategy) -> float:
        is_everything = strategy is Strategy.EVERYTHING_FIRST
        return self.load * (self.num_layers - (0 if is_everything else len(self.block)))


PAPER: Final = (
    Request(block=Span(3, 10), num_layers=10, load=1.0, recompute=7.0, e_load=1.0),
    Request(block=Span(0, 3), num_layers=10, load=1.0, recompute=3.0, e_load=1.0, arrival=2.0),
)
"""The paper's example; its layers 4 to 10 are our [3, 10)."""


def ttfts(requests: Sequence[Request], strategy: Strategy) -> list[float]:
    """TTFT of each request, from its arrival. Requests that arrive together are served in their
    order."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
    serve = _pipelined if strategy is Strategy.PIPELINED else partial(_alone, strategy=strategy)
    ends = dict(zip(order, serve([requests[index] for index in order]), strict=True))
    return [ends[index] - it.arrival for index, it in enumerate(requests)]


def _alone(requests: Sequence[Request], strategy: Strategy) -> Iterator[float]:
    """Yield the time at which each request ends, if nothing overlaps."""
    free_at = 0.0
    for request in requests:
        spent = request.e_time + request.kv_time(strategy) + request.recompute
        free_at = max(free_at, request.arrival) + spent
        yield free_at


def _pipelined(requests: Sequence[Request]) -> list[float]:
    """Return the times at which the requests end. The link serves requests in order. The device
    takes the block that can start first; if several can, the block of the earlier request."""
    link_at = device_at = 0.0
    ready_at, ends = [], []
    for request in requests:
        begin_at, spent = (
            max(link_at, request.arrival),
            request.e_time + request.kv_time(Strategy.PIPELINED),
        )
        ready_at.append(begin_at + request.e_time if request.e_time else request.arrival)
        ends.append(begin_at + spent if spent else request.arrival)
        link_at = begin_at + spent
    waiting = [index for index, it in enumerate(requests) if len(it.block)]
    while waiting:
        index = min(waiting, key=lambda index: max(device_at, ready_at[index]))
        device_at = max(device_at, ready_at[index]) + requests[index].recompute
        ends[index] = max(ends[index], device_at)
        waiting.remove(index)
    return ends
