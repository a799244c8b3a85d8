"""Time the parts of a receiver's work, fit a cost model, and compare it with times of whole plans.

Physics, with n prefix and m suffix tokens:

    full layer over the prefix    a call, matrix products (n), causal attention (n²)
    only K and V of a layer       a pass's rotation, then norm and projections (n)
    suffix, all layers and head   the weights read once, products (m), attention to the past (m n)
    load                          a copy's start, and bytes at the bandwidth of host to device

Other work on the device makes times longer, never shorter: in a parallel product, one thread that
waits for its core delays all others. So everything is timed in turns, forwards and backwards
through the list, until the budget is spent. The fastest turn counts. The first turn warms up and
counts like the others. Parts and whole plans take turns together, so a slow hour is slow for both.
No plan's time enters the fit.

Loads copy into buffers that exist already, page-locked on the host if there is a GPU, as in
servers. On a CPU nothing needs to be copied to a device; there a load is a copy within the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

import msgspec
import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from cachetree import EMPTY_SPAN, ConfigError, Span
from profiles.compute.layered import KV, LayeredModel
from profiles.compute.mixtures import Asked, decode
from profiles.evidence import CostModel, HeldOutTime

Timer = Callable[[], float]
"""Function that returns the seconds since a fixed moment."""

FITTED: Final = (4.0, 3.0, 2.0, 1.0, 0.0)
HELD_OUT: Final = (2.5, 1.5, 0.5)
"""Each length that checks the fit is the longest length, halved this many times. None is near the
shortest fitted length, which serves to fit the constant terms."""
LEAST_TOP: Final = 512
"""Least value of the longest length, in tokens. Shorter passes take mostly the time of calls."""
SAMPLED_LAYERS: Final = 4
RETIMED: Final = 0.15
REFUSED: Final = 0.25
MOST_FITS: Final = 3
"""Largest number of fits. If a fit's median relative error is above `RETIMED`, all work is timed
again. If the best fit's error is above `REFUSED`, the profiler makes no profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Limits on the turns of a measurement. Each turn times everything once."""

    least: int = 2
    most: int = 32
    budget_s: float = 60.0
    """Seconds after which no further turn starts, once there were `least` turns."""


@dataclass(frozen=True, slots=True)
class Part:
    """A computation to time. The fit models its seconds as a sum of `terms`, each times a
    coefficient."""

    terms: tuple[float, ...]
    run: Callable[[], object]


def choose_lengths(
    max_prefix_tokens: int, max_positions: int, page_size: int, role: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return prefix lengths to fit on, and held-out lengths between them; both ascending.

    The lengths are the longest prefix of the data, halved again and again, in whole pages. If
    lengths would be equal or 0, they are in halves of a page, quarters, and so on. `max_positions`
    is the number of positions that questions leave for prefixes.
    Raises ConfigError naming the model's role if `max_positions` is too small.
    """
    top = max(0, min(max(max_prefix_tokens, LEAST_TOP), max_positions))
    unit = page_size
    while unit:
        fitted, held_out = (
            tuple(int(top / 2**halved / unit) * unit for halved in halvings)
            for halvings in (FITTED, HELD_OUT)
        )
        different = {*fitted, *held_out}
        if len(different) == len(FITTED) + len(HELD_OUT) and 0 not in different:
            return fitted, held_out
        unit //= 2
    raise ConfigError(
        f"questions leave {top} of the {role}'s positions for prefixes, too few to be timed; give "
        "shorter questions, or a model of more positions"
    )


def measure_costs(
    model: LayeredModel,
    *,
    lengths: Sequence[int],
    held_out_lengths: Sequence[int],
    num_suffix: int,
    progress: Callable[[float], None],
    repeats: Repeats,
    timer: Timer = time.perf_counter,
) -> CostModel:
    """Time the model's parts at `lengths`, fit them, and judge the fit on plans at other lengths.

    Token ids, KV and E are random. Threads and device are used as they are set. The work needs
    memory for twice the KV of the longest prefix. `progress` gets the finished share, up to 1.
    """
    receiver = TimedReceiver(model, max(*lengths, *held_out_lengths), num_suffix)
    groups = [
        [part for num_tokens in lengths for part in parts(num_tokens)]
        for parts in (receiver.layers, receiver.kv, receiver.suffix, receiver.load)
    ]
    plans = [(n, block) for n in held_out_lengths for block in _plans(model.num_layers)]
    works = [part.run for group in groups for part in group]
    works += [partial(receiver.first_token, *plan) for plan in plans]

    def now() -> float:
        receiver.synchronize()
        return timer()

    times = iter(time_in_turns(works, repeats, progress, now))
    fits = [fit([part.terms for part in group], [next(times) for _ in group]) for group in groups]
    # The fields of a cost model begin with these, in this order.
    coefficients = dict(zip(CostModel.__struct_fields__, chain.from_iterable(fits), strict=False))
    costs = CostModel(
        **coefficients,
        kv_bytes=model.kv_bytes,
        e_bytes=model.e_bytes,
        num_layers=model.num_layers,
        held_out=(),
    )
    held_out = tuple(
        HeldOutTime(
            num_tokens=num_tokens,
            num_suffix=num_suffix,
            start=block.start,
            stop=block.stop,
            predicted_s=costs.full_prefill_s(num_tokens, num_suffix)
            if len(block) == costs.num_layers
            else costs.ttft_s((block,), num_tokens, num_suffix),
            measured_s=measured_s,
        )
        for (num_tokens, block), measured_s in zip(plans, times, strict=True)
    )
    return msgspec.structs.replace(costs, held_out=held_out)


def trusted(measure: Callable[[], CostModel], role: str) -> CostModel:
    """Measure a cost model up to `MOST_FITS` times. Return the measured model with the least median
    error.

    The first model with an error of at most `RETIMED` ends the measurements. Raises ConfigError
    with the role if the least error is above `REFUSED`.
    """
    fits = [measure()]
    while fits[-1].error > RETIMED and len(fits) < MOST_FITS:
        fits.append(measure())
    best = min(fits, key=lambda it: it.error)
    if best.error > REFUSED:
        raise ConfigError(
            f"times of the {role} cannot be predicted: the best of {len(fits)} fits is wrong by "
            f"{best.error:.0%} (median), and {REFUSED:.0%} is accepted; run it where nothing else "
            "runs, or give more --timing-seconds"
        )
    return best


def fit(terms: Sequence[Sequence[float]], times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients >= 0 with the least sum of squared relative errors.

    The prediction is `terms @ coefficients`. Terms and times are positive.
    """
    relative = np.asarray(terms, dtype=np.float64) / np.asarray(times_s, dtype=np.float64)[:, None]
    scale = relative.max(axis=0)
    solved, _ = nnls(relative / scale, np.ones(len(relative)))
    return tuple((solved / scale).tolist())


def time_in_turns(
    works: Sequence[Callable[[], object]],
    repeats: Repeats,
    progress: Callable[[float], None],
    now: Timer,
) -> list[float]:
    """Return the seconds that each work took in its fastest turn."""
    fastest = [math.inf] * len(works)
    order = list(range(len(works)))
    began_s = now()
    for turn in range(repeats.most):
        if turn >= repeats.least and now() - began_s > repeats.budget_s:
            break
        for place, index in enumerate(order, start=1):
            start_s = now()
            works[index]()
            end_s = now()
            fastest[index] = min(fastest[index], end_s - start_s)
            spent = (end_s - began_s) / repeats.budget_s if repeats.budget_s else 1.0
            turns = turn + place / len(works)
            progress(max(turns / repeats.most, min(1.0, turns / repeats.least, spent)))
        order.reverse()
    progress(1.0)
    return fastest


def _plans(num_layers: int) -> list[Span]:
    """Return plans to time: full prefill, full reuse, and blocks with other starts and sizes."""
    half, third, quarter = num_layers // 2, num_layers // 3, num_layers // 4
    blocks = (
        Span(0, num_layers),
        EMPTY_SPAN,
        Span(0, half),
        Span(quarter, quarter + max(1, num_layers // 8)),
        Span(third, num_layers),
    )
    return list(dict.fromkeys(blocks))


class TimedReceiver:
    """Runs the receiver's work that `measure_costs` times.

    The work is layers, KV, suffix, loads and whole plans. Ids, KV and E are random. Loads read host
    memory.
    """

    def __init__(self, model: LayeredModel, max_tokens: int, num_suffix: int) -> None:
        self._model = model
        self._num_suffix = num_suffix
        seeded = torch.Generator().manual_seed(0)
        vocab_size = model.model.config.vocab_size
        num_ids = max_tokens + 2 * num_suffix
        self._ids = torch.randint(vocab_size, (num_ids,), generator=seeded)
        hidden_size = model.e_bytes // model.dtype.itemsize
        e = torch.randn(1, max_tokens, hidden_size, generator=seeded)
        kv_size = max_tokens * model.kv_bytes // model.dtype.itemsize
        kv = torch.randn(kv_size, generator=seeded).expand(model.num_layers, -1)
        self._host_e, self._host_kv = self._staged(e), self._staged(kv)
        # Values may decide which experts run, so E exists from the first turn on.
        self._device_e = torch.empty_like(self._host_e, device=model.device).copy_(self._host_e)
        self._device_kv = torch.zeros_like(self._host_kv, device=model.device)
        keys, _ = model.kv_alone(self._device_e[:, :1], 0)
        self._num_kv_heads = keys.shape[1]

    def synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def layers(self, num_tokens: int) -> list[Part]:
        """Return one part that runs a few full layers, one after the other. So the weights of each
        layer are new to the processor's caches."""
        num_layers = self._model.num_layers
        sample = min(SAMPLED_LAYERS, num_layers)
        chain = [i * num_layers // sample for i in range(sample)]
        entering = self._device_e[:, :num_tokens]
        run = partial(self._model.through, entering, chain)
        terms = (1.0, float(num_tokens), float(num_tokens**2))
        return [Part(tuple(sample * it for it in terms), run)]

    def kv(self, num_tokens: int) -> list[Part]:
        entering = self._device_e[:, :num_tokens]
        run = partial(self._model.kv_alone, entering, self._model.num_layers // 2)
        return [Part((1.0, float(num_tokens)), run)]

    def suffix(self, num_tokens: int) -> list[Part]:
        source = self._source(num_tokens)
        return [
            Part((1.0, float(m), float(m * num_tokens)), partial(self._answer, source, m))
            for m in (max(1, self._num_suffix // 2), self._num_suffix, 2 * self._num_suffix)
        ]

    def load(self, num_tokens: int) -> list[Part]:
        layer_bytes = num_tokens * self._model.kv_bytes
        return [
            Part((1.0, float(n * layer_bytes)), partial(self._load, num_tokens, Span(0, n)))
            for n in (1, self._model.num_layers)
        ]

    def first_token(self, num_tokens: int, block: Span) -> int:
        """Run a plan for `num_tokens` prefix tokens and the suffix. Return the first token of the
        answer.

        `block` has the layers to recompute. A block of all layers is a full prefill: prefix and
        suffix run in one pass.
        """
        if len(block) == self._model.num_layers:
            return self.full_prefill(num_tokens)
        return self.partial_prefill(num_tokens, block)

    @torch.inference_mode()
    def full_prefill(self, num_tokens: int) -> int:
        entering = self._model.embed(self._ids[None, : num_tokens + self._num_suffix])
        hidden, _ = self._model.through(entering, range(self._model.num_layers))
        return int(self._model.logits(hidden[:, -1]).argmax())

    @torch.inference_mode()
    def partial_prefill(self, num_tokens: int, block: Span) -> int:
        self._load(num_tokens, Span(0, block.start))
        self._load(num_tokens, Span(block.stop, self._model.num_layers))
        source = self._source(num_tokens)
        if len(block):
            entering = self._device_e[:, :num_tokens]
            if block.start:
                entering.copy_(self._host_e[:, :num_tokens], non_blocking=True)
            else:
                entering = self._model.embed(self._ids[None, :num_tokens])
            source[block.start : block.stop] = self.recompute(entering, block)
        return self._answer(source, self._num_suffix)

    def recompute(self, entering: Tensor, layers: Span) -> list[KV]:
        """Recompute like LayeredModel.recompute, but leave KV on the device, where the suffix reads
        it."""
        *full, last = layers
        hidden, made = self._model.through(entering, full)
        return [*made, self._model.kv_alone(hidden, last)]

    def _answer(self, source: list[KV], num_suffix: int) -> int:
        """Run a suffix over this KV, and return the first token of the answer."""
        num_tokens = source[0][0].shape[2]
        suffix = self._ids[num_tokens : num_tokens + num_suffix].tolist()
        asked = Asked((0,) * self._model.num_layers, tuple(suffix))
        return decode(self._model, [source], [asked], max_new=1, ends=frozenset(), max_rows=1)[0][0]

    def _load(self, num_tokens: int, layers: Span) -> Tensor:
        to, of = (
            self._kv_of(buffer, num_tokens)[layers.start : layers.stop]
            for buffer in (self._device_kv, self._host_kv)
        )
        return to.copy_(of, non_blocking=True)

    def _source(self, num_tokens: int) -> list[KV]:
        return [(it[0], it[1]) for it in self._kv_of(self._device_kv, num_tokens)]

    def _kv_of(self, buffer: Tensor, num_tokens: int) -> Tensor:
        """Return the beginning of a buffer as contiguous KV, `[layers, 2, 1, kv_heads, tokens,
        head_dim]`."""
        num_layers = self._model.num_layers
        size = num_layers * num_tokens * self._model.kv_bytes // self._model.dtype.itemsize
        flat = buffer.view(-1)[:size]
        return flat.view(num_layers, 2, 1, self._num_kv_heads, num_tokens, -1)

    def _staged(self, values: Tensor) -> Tensor:
        pinned = self._model.device.type == "cuda"
        return torch.empty(values.shape, dtype=self._model.dtype, pin_memory=pinned).copy_(values)
