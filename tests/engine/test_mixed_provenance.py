"""Marks of approximate KV, for batches of every kind, against a walk over each request's tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_droidspeak.engine.names import ForwardMode
from sglang_droidspeak.store.capture import Provenance

NUM_REQUESTS, NUM_SLOTS, LENGTH = 5, 400, 64
NOWHERE = torch.tensor([], dtype=torch.int64)


class Requests:
    """Rows of slots that grow by chunks and by tokens; some of them begin with another's KV."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table = torch.zeros(NUM_REQUESTS, LENGTH, dtype=torch.int64)
        self.lengths = [0] * NUM_REQUESTS
        self.approximate: set[int] = set()
        """What is expected: slots at or after a slot of another model's KV in a row."""
        self.marks = Provenance(NUM_SLOTS, "cpu")
        self._free = list(range(NUM_SLOTS))
        self.rng.shuffle(self._free)

    def grow(self, row: int, count: int) -> list[int]:
        slots = [self._free.pop() for _ in range(count)]
        start = self.lengths[row]
        self.table[row, start : start + count] = torch.tensor(slots)
        if start and int(self.table[row, start - 1]) in self.approximate:
            self.approximate |= set(slots)
        self.lengths[row] += count
        return slots

    def load(self, row: int, *, exact: bool) -> None:
        start = self.lengths[row]
        before = self.table[row, max(0, start - 1) : start]
        slots = self.grow(row, 4)
        if not exact:
            self.approximate |= set(slots)
        self.marks.loaded(torch.tensor(slots), before, exact=exact)

    def step(self, mode: ForwardMode) -> None:
        rows = self.rng.sample(range(NUM_REQUESTS), self.rng.randint(1, NUM_REQUESTS))
        if mode == ForwardMode.DECODE:
            rows = [row for row in rows if self.lengths[row]]
        if not rows:
            return
        prefix = [self.lengths[row] for row in rows]
        is_decode = [
            mode == ForwardMode.DECODE
            or (mode == ForwardMode.MIXED and length > 0 and self.rng.random() < 0.5)
            for length in prefix
        ]
        counts = [1 if decodes else self.rng.randint(1, 3) for decodes in is_decode]
        new = [self.grow(row, count) for row, count in zip(rows, counts, strict=True)]
        self.marks.inherit(
            SimpleNamespace(
                req_pool_indices=torch.tensor(rows),
                forward_mode=mode,
                prefix_lens=prefix,
                extend_lens=counts,
                seq_lens=torch.tensor([self.lengths[row] for row in rows]),
                out_cache_loc=torch.tensor([slot for slots in new for slot in slots]),
                reqs=[],
            ),
            self.table,
        )

    def check(self) -> None:
        for row, length in enumerate(self.lengths):
            for slot in self.table[row, :length].tolist():
                is_exact = self.marks.is_exact(torch.tensor([slot]))
                assert is_exact == (slot not in self.approximate)


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_approximate_kv_is_approximate_in_every_kind_of_batch(seed: int) -> None:
    requests = Requests(seed)
    requests.load(0, exact=False)
    for _ in range(8):
        row = requests.rng.randrange(NUM_REQUESTS)
        if requests.rng.random() < 0.4 and requests.lengths[row] < 40:
            requests.load(row, exact=requests.rng.random() < 0.5)
        mode = requests.rng.choice([ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE])
        requests.step(mode)
        requests.check()


def test_a_decoding_request_keeps_its_mark_in_a_batch_with_chunks_of_others() -> None:
    marks, table = Provenance(64, "cpu"), torch.zeros(2, 16, dtype=torch.int64)
    table[0, :4], table[1, :4] = torch.arange(10, 14), torch.arange(20, 24)
    marks.loaded(torch.tensor([10, 11, 12]), NOWHERE, exact=False)
    mixed = SimpleNamespace(
        req_pool_indices=torch.tensor([0, 1]),
        forward_mode=ForwardMode.MIXED,
        prefix_lens=[3, 0],
        extend_lens=[1, 4],
        seq_lens=torch.tensor([4, 4]),
        out_cache_loc=torch.tensor([13, 20, 21, 22, 23]),
        reqs=[],
    )
    marks.inherit(mixed, table)
    assert not marks.is_exact(torch.tensor([13]))
    assert marks.is_exact(torch.tensor([20, 21, 22, 23]))


def batch_of(mode: ForwardMode, **fields: Any) -> Any:
    return SimpleNamespace(req_pool_indices=torch.tensor([0]), forward_mode=mode, reqs=[], **fields)


@pytest.mark.parametrize("num_before", [1, 4])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_the_token_before_decides_and_none_before_it(mode: ForwardMode, num_before: int) -> None:
    """Its KV has read all that the ones before it have, and more."""
    marks, table = Provenance(64, "cpu"), torch.zeros(1, 16, dtype=torch.int64)
    table[0] = torch.arange(10, 26)
    before, new = table[0, num_before - 1 : num_before], table[0, num_before : num_before + 1]
    marks.loaded(before, NOWHERE, exact=False)
    batch = batch_of(
        mode,
        prefix_lens=[num_before],
        extend_lens=[1],
        seq_lens=torch.tensor([num_before + 1]),
        out_cache_loc=new,
    )
    told = marks.inherit(batch, table)
    assert not marks.is_exact(new)
    assert (told is None) == (mode == ForwardMode.DECODE)


@pytest.mark.parametrize(("num_before", "is_exact"), [(0, True), (1, False)])
def test_a_first_token_has_nothing_before_it(num_before: int, is_exact: bool) -> None:
    """Whatever stands at the start of its row: an older request's, of another model's KV."""
    marks, table = Provenance(64, "cpu"), torch.zeros(1, 16, dtype=torch.int64)
    table[0, :3] = torch.tensor([10, 11, 12])
    marks.loaded(torch.tensor([10]), NOWHERE, exact=False)
    batch = batch_of(
        ForwardMode.EXTEND,
        prefix_lens=[num_before],
        extend_lens=[1],
        out_cache_loc=torch.tensor([11]),
    )
    (mark,) = marks.inherit(batch, table)
    assert bool(mark) != is_exact
    assert mark.device.type == "cpu"
    assert marks.is_exact(torch.tensor([11])) == is_exact


def test_the_exact_slots_end_before_the_first_marked_one() -> None:
    marks = Provenance(64, "cpu")
    slots = torch.arange(20, 30)
    assert marks.num_exact(slots) == 10
    marks.loaded(torch.tensor([24]), NOWHERE, exact=False)
    assert marks.num_exact(slots) == 4
    marks.reset()
    assert marks.num_exact(slots) == 10
    assert not marks.any_approximate
