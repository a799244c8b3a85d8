"""Sets of bytes as disjoint half-open spans in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from cachetree.ids import Span


class Ranges:
    """A set of numbers that come in long runs; neighbours are one span.

    >>> some = Ranges(Span(0, 9))
    >>> some.take_out(Span(3, 5)), list(some), len(some)
    ([Span(start=3, stop=5)], [Span(start=0, stop=3), Span(start=5, stop=9)], 2)
    """

    __slots__ = ("_starts", "_stops", "num_bytes")

    def __init__(self, *spans: Span) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.num_bytes = 0
        """How many numbers there are."""
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        """Put in a span of which nothing is here yet."""
        first = bisect_left(self._stops, span.start)
        last = bisect_right(self._starts, span.stop)
        start, stop = span.start, span.stop
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        if start < stop:
            self._starts[first:last], self._stops[first:last] = [start], [stop]
            self.num_bytes += len(span)

    def take_out(self, span: Span) -> list[Span]:
        """Those parts of `span` that were here, and are no longer."""
        first = bisect_right(self._stops, span.start)
        last = bisect_left(self._starts, span.stop)
        if first >= last or not len(span):
            return []
        out = [
            Span(max(span.start, start), min(span.stop, stop))
            for start, stop in zip(self._starts[first:last], self._stops[first:last], strict=True)
        ]
        head = [self._starts[first]] if self._starts[first] < span.start else []
        tail = [self._stops[last - 1]] if self._stops[last - 1] > span.stop else []
        self._starts[first:last] = head + [span.stop] * len(tail)
        self._stops[first:last] = [span.start] * len(head) + tail
        self.num_bytes -= sum(map(len, out))
        return out

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._starts, self._stops)

    def __len__(self) -> int:
        """How many spans there are."""
        return len(self._starts)
