"""Predict the seconds of forwards, recomputes and copies from earlier ones on this server.

A pass is a forward of all layers or a recompute of a block. It has n tokens, and on average c
earlier tokens precede each of them. It takes `a + b n + c' n c` seconds per layer, or the time of
the kernel launches if that is longer.

`Meter` keeps the latest passes of every length, so many short prompts do not displace few long
ones. `Fit` finds a, b and c' by least squares of relative errors. The fit leaves out lengths that
take no longer than the launches. Outliers count little. Last, the passes of each length correct the
fit at that length.

The seconds of a fetch are the sum of three: the transfer (`cachetree.transport.pace`), its copies
into KV slots, and the delay until the scheduler notices its end.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from scipy.optimize import nnls

from cachetree import Span
from cachetree.planning import Margin, PrefillCost, full_prefill_s, most_of, weighted_median

_PER_LENGTH: Final = 8
"""Largest number of passes that are kept for each length. All lengths between two powers of two
count as one length."""
_LEAST_PER_LENGTH: Final = 3
"""Fewest passes of one length that correct the fit there. With fewer, one outlier could decide."""
_PRIOR_LENGTHS: Final = (64, 512, 4096, 32768)
_PRIOR_WEIGHT: Final = 0.25
"""Weight of each length of the prior (assumed cost) in the fit. A measured pass has weight 1."""
_ABOVE_LEAST: Final = 1.25
"""Lengths with a usual time above this multiple of the fastest length's time are fitted. The time
of all other lengths counts as kernel launches."""
_ROUNDS: Final = 4
_LEAST_SPREAD: Final = 0.05
_KNOWN_BEYOND: Final = 4
"""Largest length that is predicted, as a multiple of the longest measured pass."""
_MIN_LOAD_BYTES: Final = 256 << 10
_NUM_LOADS: Final = 16
_PCIE_BYTE_S: Final = 1 / 12e9
"""Seconds per byte of page-locked copies over PCIe 3.0 x16, the slowest usual bus. Used until
copies are measured."""
_NOTICE_S: Final = 0.001
"""Seconds of one turn of the scheduler: the least delay until it notices the end of a fetch."""
_NUM_NOTICES: Final = 32
_NOTICES_AGE_S: Final = 60.0
_MAX_MODELS: Final = 256
"""Largest number of models for which passes are kept apart. The oldest is dropped first."""
_MAX_OPEN: Final = 64
"""Largest number of passes that wait until their time is read. The oldest is dropped first."""
_Open = tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]
"""First and last CUDA event of a pass, and the function that records the pass's seconds."""


@dataclass(frozen=True, slots=True)
class _Pass:
    num_tokens: int
    context: float
    """Number of tokens before each token, summed over all tokens of the pass."""
    seconds: float

    @classmethod
    def over(cls, tokens: Iterable[Span], seconds: float) -> _Pass:
        lengths = [(len(it), (it.start + it.stop) / 2) for it in tokens]
        num_tokens = sum(length for length, _ in lengths)
        context = sum(length * before for length, before in lengths)
        return cls(num_tokens, context, max(seconds, 1e-9))

    def of(self, cost: PrefillCost) -> float:
        """Return the measured seconds divided by the seconds that `cost` predicts."""
        return self.seconds / max(1e-12, cost.pass_s(self.num_tokens, self.context))


class _Latest:
    """The latest passes of each length."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[_Pass]] = {}
        self._first: _Pass | None = None

    def add(self, new: _Pass) -> None:
        if self._first is None:
            self._first = new
        length = new.num_tokens.bit_length()
        self._by_length.setdefault(length, deque(maxlen=_PER_LENGTH)).append(new)

    @property
    def by_length(self) -> Iterable[deque[_Pass]]:
        return self._by_length.values()

    def ratio(self, cost: PrefillCost) -> float:
        """Return the measured seconds of all passes, divided by the seconds that `cost` predicts.
        The first pass warms up, and counts only while there is no other."""
        every = [it for each in self.by_length for it in each]
        passes = [it for it in every if it is not self._first] or every
        predicted_s = sum(cost.pass_s(it.num_tokens, it.context) for it in passes)
        return sum(it.seconds for it in passes) / max(1e-12, predicted_s)


class Fit:
    """Fitted cost of one kind of pass (forward or recompute). Adding a pass takes microseconds."""

    def __init__(self, prior: Callable[[], PrefillCost | None]) -> None:
        """`prior` returns the cost to assume at lengths at which no pass was measured. Only the
        ratios between its lengths count; the measured passes set its scale."""
        self._prior: Final = prior
        self._margin: Final = Margin()
        self.latest: Final = _Latest()
        self._num = self._num_fitted = 0
        self._cost: PrefillCost | None = None

    def add(self, tokens: Iterable[Span], seconds: float) -> _Pass:
        """Record a measured pass over the `tokens` of one or more prompts. `seconds` is its time
        for each layer."""
        new = _Pass.over(tokens, seconds)
        if self._cost is not None:
            self._margin.add(new.of(self._cost), 1.0)
        self.latest.add(new)
        self._num += 1
        return new

    @property
    def cost(self) -> PrefillCost | None:
        """Return the cost in seconds per layer. None before the first pass. The fit is made again
        once an eighth of the passes is new."""
        if self._num and (self._num - self._num_fitted) * 8 >= min(self._num, 8 * _PER_LENGTH):
            self._cost, self._num_fitted = self._fit(), self._num
        return self._cost

    def _fit(self) -> PrefillCost:
        lengths = self.latest.by_length
        usual_s = [statistics.median(it.seconds for it in each) for each in lengths]
        least_s = min(usual_s)
        longer = [
            each for each, s in zip(lengths, usual_s, strict=True) if s > _ABOVE_LEAST * least_s
        ]
        passes = [it for each in longer or lengths for it in each]
        prior = self._prior_passes(passes)
        a, b, c = _solve((*passes, *prior), [1.0] * len(passes) + [_PRIOR_WEIGHT] * len(prior))
        cost = PrefillCost(
            least_s=least_s if longer else 0.0,
            fixed_s=a,
            token_s=b,
            context_s=c,
            margin=self._margin.factor,
        )
        longest = max(it.num_tokens for it in passes)
        return replace(cost, known_tokens=_KNOWN_BEYOND * longest, curve=self._curve(cost))

    def _prior_passes(self, passes: Sequence[_Pass]) -> list[_Pass]:
        prior = self._prior()
        if prior is None:
            return []
        scale = statistics.median(it.of(prior) for it in passes)
        return [
            _Pass(n, n * n / 2, scale * seconds)
            for n in _PRIOR_LENGTHS
            if (seconds := prior.seconds(0, n)) > 0
        ]

    def _curve(self, cost: PrefillCost) -> tuple[tuple[float, float], ...]:
        points = []
        for passes in self.latest.by_length:
            if len(passes) >= _LEAST_PER_LENGTH:
                at = statistics.median(math.log2(max(1, it.num_tokens)) for it in passes)
                points.append((at, statistics.median(it.of(cost) for it in passes)))
        return tuple(sorted(points))


def _solve(passes: Sequence[_Pass], weights: Sequence[float]) -> tuple[float, float, float]:
    """Find coefficients >= 0 with the least sum of squared relative errors. Each round gives less
    weight to passes that are far off."""
    relative = np.array([(1, it.num_tokens, it.context) for it in passes], dtype=float)
    relative /= np.array([it.seconds for it in passes])[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    relative, initial = relative / scale, np.array(weights)
    current = initial
    for _ in range(_ROUNDS):
        root = np.sqrt(current)
        scaled, _ = nnls(relative * root[:, None], root)
        errors = np.abs(np.log(np.maximum(relative @ scaled, 1e-9)))
        spread = max(_LEAST_SPREAD, 1.5 * float(np.median(errors)))
        current = initial / (1 + (errors / (2 * spread)) ** 2)
    a, b, c = (scaled / scale).tolist()
    return a, b, c


class Meter:
    """Measure forwards, recomputes and copies while the server serves, and predict their costs.

    On CUDA, events measure the times, so the host need not wait. The scheduler thread makes the
    meter and measures. Any thread may read costs.
    """

    def __init__(
        self,
        device: str,
        num_layers: int,
        step_tokens: int,
        prior: PrefillCost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`step_tokens`: most tokens that SGLang prefills in a scheduler step. `prior`: cost to
        assume before measurements, as in `Fit`."""
        self._clock: Final = clock
        self.step_tokens: Final = step_tokens
        self._num_layers: Final = num_layers
        self._on_cuda: Final = device == "cuda"
        self._thread: Final = threading.get_ident()
        self._forwards: Final = Fit(lambda: prior)
        self._blocks: Final = Fit(lambda: self._forwards.cost)
        self._by_model: Final[dict[object, _Latest]] = {}
        """Latest forwards of each model. A forward with requests of several models is left out."""
        self._lock: Final = threading.Lock()
        """Guards `_forwards`, `_blocks` and `_by_model`."""
        self._open: deque[_Open] = deque(maxlen=_MAX_OPEN)
        """Passes on the device with times that are not yet read, the oldest first."""
        self._copies: deque[tuple[int, float]] = deque(maxlen=_NUM_LOADS)
        self._notices: Final[deque[tuple[float, float]]] = deque(maxlen=_NUM_NOTICES)
        """Latest fetches: the time at which their end was noticed, and the delay in seconds."""

    @property
    def prefill(self) -> PrefillCost | None:
        """Cost of a full prefill: all layers. None until a forward was measured."""
        with self._lock:
            self._read()
            cost = self._forwards.cost
        if cost is None:
            return None
        of_layer = (cost.least_s, cost.fixed_s, cost.token_s, cost.context_s)
        least_s, a, b, c = (it * self._num_layers for it in of_layer)
        most = self.step_tokens
        return replace(cost, least_s=least_s, fixed_s=a, token_s=b, context_s=c, most_tokens=most)

    def mean_prefill_s(self, tokens: Span, model: object) -> float | None:
        """Predict the seconds of a full prefill from the mean of this model's latest forwards.

        A model without forwards gets the mean of all models. None if nothing was measured.
        `prefill` follows the median instead. Slow passes are rare and long, so clients wait longer
        in total than a sum of medians says. Adapters make a pass slower, so each model has its own
        mean.
        """
        full_s = full_prefill_s(tokens, self.prefill)
        with self._lock:
            cost, latest = self._forwards.cost, self._by_model.get(model, self._forwards.latest)
            return None if full_s is None or cost is None else full_s * latest.ratio(cost)

    @property
    def recompute(self) -> PrefillCost | None:
        """Cost of recomputing one layer of a block. Until a recompute was measured, the cost of a
        forward's layer. None if neither was measured."""
        with self._lock:
            self._read()
            cost = self._blocks.cost or self._forwards.cost
        if cost is None:
            return None
        return replace(cost, most_tokens=self.step_tokens, known_tokens=math.inf)

    @property
    def copy_byte_s(self) -> float:
        """Seconds that the loader takes to copy one byte into KV slots. This is the median over the
        latest bytes, so long loads count more. Before the first load it is a usual value. On a CPU
        it is 0."""
        if not self._copies:
            return _PCIE_BYTE_S if self._on_cuda else 0.0
        return weighted_median(
            (seconds / num_bytes, num_bytes) for num_bytes, seconds in tuple(self._copies)
        )

    @property
    def notice_s(self) -> float:
        """Seconds from the end of a fetch until the scheduler notices it. Two of three such delays
        of the last minute were at most this long. One delay of `_NOTICE_S` is added to them.

        Older delays do not count. Else long delays would make plans avoid fetches, and no fetch
        would show that delays are short again.
        """
        since_s = self._clock() - _NOTICES_AGE_S
        known = (late_s for at_s, late_s in tuple(self._notices) if at_s >= since_s)
        return most_of((_NOTICE_S, *known)) or _NOTICE_S

    def noticed(self, late_s: float) -> None:
        """Record that the scheduler noticed the end of a fetch `late_s` seconds after it."""
        self._notices.append((self._clock(), late_s))

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Record the seconds that the copies of one load took. On CUDA, the copy stream measures
        them. Small loads are ignored."""
        if num_bytes >= _MIN_LOAD_BYTES:
            self._copies.append((num_bytes, seconds))

    def forward(
        self, tokens: Sequence[Span], models: Iterable[object] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Measure the time of the `with` block as a forward of all layers over `tokens`, for
        requests of `models`. Does nothing without tokens."""
        if not tokens:
            return contextlib.nullcontext()
        alone = {*models}

        def add(tokens: Iterable[Span], seconds: float) -> None:
            new = self._forwards.add(tokens, seconds)
            for model in alone if len(alone) == 1 else ():
                self._by_model.setdefault(model, _Latest()).add(new)
                if len(self._by_model) > _MAX_MODELS:
                    del self._by_model[next(iter(self._by_model))]

        return self._measure(add, tokens, self._num_layers)

    def block(
        self, tokens: Sequence[Span], num_layers: float
    ) -> contextlib.AbstractContextManager[None]:
        """Measure the `with` block as a recompute of `num_layers` layers over `tokens`."""
        return self._measure(self._blocks.add, tokens, num_layers)

    @contextlib.contextmanager
    def _measure(
        self,
        add_pass: Callable[[Iterable[Span], float], object],
        tokens: Sequence[Span],
        num_layers: float,
    ) -> Iterator[None]:
        if not tokens or not num_layers:
            yield
            return

        def add(seconds: float) -> None:
            add_pass(tokens, seconds / num_layers)

        if self._on_cuda:
            with self._lock:
                self._read()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._open.append((start, stop, add))
        else:
            started_s = self._clock()
            yield
            with self._lock:
                add(self._clock() - started_s)

    def _read(self) -> None:
        """Add the times of passes that the device has finished. The caller holds the lock.

        Does nothing on other threads than the scheduler's: on these, a query for a CUDA event would
        create a context on the process's first device, which may belong to another server.
        """
        if threading.get_ident() != self._thread:
            return
        while self._open and self._open[0][1].query():
            start, stop, add = self._open.popleft()
            add(start.elapsed_time(stop) / 1000)
