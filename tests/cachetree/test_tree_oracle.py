"""The tree compared with the oracle, on long random walks and by hypothesis, which shrinks a
failing case."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tree_oracle import ALPHABETS, LIAR, LOCATIONS, NAMES, PARTS, Mirror
from tree_walks import DEEP, SHALLOW, random_walk, retention_of

from cachetree.ids import KV, Location, Part
from cachetree.tree.eviction import Retention


@pytest.mark.parametrize("longest", [SHALLOW, DEEP])
@pytest.mark.parametrize("seed", range(8))
def test_long_random_walks(seed, longest):
    assert random_walk(seed, 1250, longest, retention_of(seed)) > 100


texts = st.one_of([st.text(it, min_size=1, max_size=SHALLOW) for it in ALPHABETS])
names = st.sampled_from(NAMES)
locations = st.sampled_from(LOCATIONS)
parts = st.sampled_from(PARTS)
indices = st.integers(0, SHALLOW)


class TreeMachine(RuleBasedStateMachine):
    """The same operations under hypothesis, which shrinks a failing case to a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()

    @initialize(ttl_s=st.sampled_from((None, 3.0)))
    def choose(self, ttl_s: float | None) -> None:
        self.mirror = Mirror(retention=Retention(ttl_s=ttl_s))

    @rule(name=names, part=parts, text=texts, start=indices)
    def reserve(self, name: str, part: Part, text: str, start: int) -> None:
        self.mirror.reserve((self.mirror.loaded[name], part), text, start % len(text))

    @rule(name=names, part=parts, text=texts)
    def store(self, name: str, part: Part, text: str) -> None:
        num_open = len(self.mirror.reservations)
        self.mirror.reserve((self.mirror.loaded[name], part), text, 0)
        if len(self.mirror.reservations) > num_open:
            self.mirror.commit(num_open)

    @precondition(lambda self: self.mirror.reservations)
    @rule(index=indices)
    def commit(self, index: int) -> None:
        self.mirror.commit(index % len(self.mirror.reservations))

    @precondition(lambda self: self.mirror.reservations)
    @rule(index=indices)
    def release(self, index: int) -> None:
        self.mirror.release(index % len(self.mirror.reservations))

    @rule(name=names, part=parts, text=texts, start=indices, seconds=st.integers(1, 5))
    def lease(self, name: str, part: Part, text: str, start: int, seconds: int) -> None:
        model = self.mirror.loaded[name]
        self.mirror.lease(model, list({KV, part}), text, start % len(text), seconds)

    @precondition(lambda self: self.mirror.leases)
    @rule(index=indices)
    def end_lease(self, index: int) -> None:
        self.mirror.end_lease(index % len(self.mirror.leases))

    @rule(seconds=st.integers(0, 2))
    def advance(self, seconds: int) -> None:
        self.mirror.advance(seconds)

    @rule(name=st.one_of(st.none(), names), text=texts, seconds=st.sampled_from((None, 1, 4)))
    def pin(self, name: str | None, text: str, seconds: float | None) -> None:
        self.mirror.pin(self.mirror.loaded[name] if name else None, text, seconds)

    @precondition(lambda self: self.mirror.pins)
    @rule(index=indices)
    def unpin(self, index: int) -> None:
        self.mirror.unpin(*list(self.mirror.pins)[index % len(self.mirror.pins)])

    @rule(name=names)
    def load(self, name: str) -> None:
        self.mirror.load(name)

    @rule()
    def clear(self) -> None:
        self.mirror.clear()

    @rule(location=locations, name=names, part=parts, text=texts, start=indices)
    def add_remote(self, location: Location, name: str, part: Part, text: str, start: int) -> None:
        key = (self.mirror.loaded[name], part)
        self.mirror.add_remote(location, key, text, start % len(text))

    @rule(location=locations, name=names, part=parts, text=texts, start=indices)
    def drop_remote(self, location: Location, name: str, part: Part, text: str, start: int) -> None:
        key = (self.mirror.loaded[name], part)
        self.mirror.drop_remote(location, key, text, start % len(text))

    @rule(
        key=st.tuples(names, parts),
        text=texts,
        order=st.permutations(range(SHALLOW)),
        num=indices,
        parent=indices,
    )
    def lie(self, key, text, order, num, parent):
        of = self.mirror.loaded[key[0]], key[1]
        had = [it[2] for it in sorted(self.mirror.remote) if it[:2] == (LIAR, of)]
        pages = [text[: at + 1] for at in order if at < len(text)][: num + 1]
        self.mirror.lie(of, ["", *had][parent % (len(had) + 1)], pages)

    @rule(location=st.sampled_from((*LOCATIONS, LIAR)))
    def forget(self, location: Location) -> None:
        self.mirror.forget(location)

    @rule(text=texts)
    def match(self, text: str) -> None:
        self.mirror.match(text)

    @invariant()
    def agree(self) -> None:
        self.mirror.check()

    def teardown(self) -> None:
        for reservation in self.mirror.reservations:
            reservation.handle.release()
        for lease in self.mirror.leases:
            lease.handle.release()
        for pin in list(self.mirror.pins):
            self.mirror.unpin(*pin)
        self.mirror.unsubscribe()
        self.mirror.tree.evict()
        assert (self.mirror.tree.num_bytes, self.mirror.tree.num_pages) == (0, 0)
        assert self.mirror.memory.num_bytes == 0


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
