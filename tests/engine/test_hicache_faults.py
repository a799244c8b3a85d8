"""HiCache backends that return wrong bytes, raise errors, fill up or hang."""

from __future__ import annotations

import threading
import time

import pytest
from hicache_parts import (
    Shelf,
    cache_over,
    fetch,
    num_there,
    num_with_e,
    objects_of,
    plan_of,
    search,
    store_and_wait,
    store_without_e,
    tier_of,
)
from kept_parts import PAGE_TOTAL
from tier_parts import fetch_too_late, prompt
from transport_parts import FAMILY, MODEL, eventually, store

from cachetree import (
    Cache,
    Cancelled,
    Deadline,
    DeadlineExceeded,
    FetchError,
    Kind,
    Span,
    StaleEntry,
    Step,
)
from sglang_droidspeak.hicache import Objects, lane, tier
from sglang_droidspeak.hicache.lane import MAX_FAILURES, STALL_S, Lane


def test_a_backend_that_lies_about_what_it_has():
    shelf = Shelf()
    shelf.lies = True
    with cache_over(shelf) as cache:
        assert search(cache, prompt(0)) == 8
        with pytest.raises(StaleEntry):
            fetch(cache, prompt(0), Span(0, 8))
        assert objects_of(cache) == {"missing": 1}
        assert search(cache, prompt(0)) == 8
        assert num_with_e(cache, prompt(0)) == 0, "what was missing"


class Failing(Shelf):
    def __init__(self) -> None:
        super().__init__(self._fail)
        self.fails = False

    def _fail(self, _call: str) -> None:
        if self.fails:
            raise ConnectionError("the backend is away")


def test_a_backend_that_raises_is_left_alone():
    shelf = Failing()
    with cache_over(shelf) as cache:
        for number in range(MAX_FAILURES + 1):
            store_and_wait(cache, prompt(number))
        shelf.fails = True
        for number in range(MAX_FAILURES):
            with pytest.raises(FetchError, match="backend is away"):
                fetch(cache, prompt(number), Span(0, 8))
        shelf.calls.clear()
        with pytest.raises(FetchError, match="paused"):
            fetch(cache, prompt(MAX_FAILURES), Span(0, 8))
        assert search(cache, prompt(99)) == 0
        assert num_there(cache, prompt(MAX_FAILURES)) == 0, "planned from a paused backend"
        assert shelf.calls == []
        status = tier_of(cache).status()
        assert (status.is_reading_paused, status.is_writing_paused) == (True, False)
        for number in range(10, 10 + MAX_FAILURES):
            store_without_e(cache, prompt(number))
        eventually(lambda: tier_of(cache).status().is_writing_paused)
        shelf.calls.clear()
        store_without_e(cache, prompt(20))
        eventually(lambda: tier_of(cache).status().num_late_entries == MAX_FAILURES + 1)
        assert shelf.calls == []


def test_what_could_not_be_written_is_written_with_what_comes_after_it():
    """If it were not, no prompt that begins with the failed pages would match while they are in
    memory."""
    shelf, pages = Failing(), prompt(0)
    with cache_over(shelf) as cache, cache_over(shelf) as other:
        shelf.fails = True
        store(cache.tree, pages[:4])
        eventually(lambda: tier_of(cache).status().num_late_entries == 2)
        shelf.fails = False
        store(cache.tree, pages[4:], pages[3])
        eventually(lambda: num_with_e(cache, pages) == 8)
        assert search(other, pages) == 8
        fetch(other, pages, Span(0, 8))


class Hanging(Shelf):
    def __init__(self) -> None:
        super().__init__(self._hang)
        self.hangs_at = ""
        self.may_go_on = threading.Event()

    def _hang(self, call: str) -> None:
        if call == self.hangs_at:
            self.may_go_on.wait(20)


def test_a_full_backend_is_read_and_soon_not_written():
    shelf = Hanging()
    with cache_over(shelf) as cache:
        store_and_wait(cache, prompt(0))
        shelf.calls.clear()
        shelf.hangs_at, shelf.takes = "write", False
        for number in range(1, 3 + MAX_FAILURES):
            store_without_e(cache, prompt(number))
        shelf.may_go_on.set()
        status = tier_of(cache).status
        eventually(lambda: status().num_late_entries == 2 + MAX_FAILURES)
        assert status().is_writing_paused
        assert [call for call, _ in shelf.calls].count("write") == MAX_FAILURES
        fetch(cache, prompt(0), Span(0, 8))
        assert num_there(cache, prompt(1)) == 0


def test_a_backend_that_takes_longer_than_entries_are_kept_for_it_is_left_alone(monkeypatch):
    monkeypatch.setattr("cachetree.tier._MAX_WRITE_S", 0.05)

    def slowly(call: str) -> None:
        if call == "write":
            time.sleep(0.1)
            cache.tree.sweep()

    with cache_over(Shelf(slowly)) as cache:
        for number in range(MAX_FAILURES):
            store(cache.tree, prompt(number))
        eventually(lambda: tier_of(cache).status().is_writing_paused)


def test_an_entry_that_takes_longer_than_its_lease_is_written_part_by_part(monkeypatch):
    monkeypatch.setattr(tier, "PART_BYTES", 8 * PAGE_TOTAL)
    now = [0.0]

    def slowly(call: str) -> None:
        if call == "write":
            now[0] += 1.0
            cache.tree.sweep()

    with cache_over(Shelf(slowly), lambda: now[0]) as cache:
        store(cache.tree, prompt(0, 64))
        eventually(lambda: num_there(cache, prompt(0, 64)) == 64)
        status = tier_of(cache).status()
        assert (status.num_late_entries, status.is_writing_paused) == (0, False)


def test_what_left_memory_before_it_was_written_is_no_fault_of_the_backend():
    """The entry has been stored again, without E."""
    shelf = Hanging()
    shelf.hangs_at = "write"
    with cache_over(shelf) as cache:
        for number in range(1 + MAX_FAILURES):
            store(cache.tree, prompt(number))
        eventually(lambda: shelf.calls[-1:] and shelf.calls[-1][0] == "write")  # Of the first.
        for number in range(1, 1 + MAX_FAILURES):
            cache.tree.evict(None, prompt(number))
            store_without_e(cache, prompt(number))
        shelf.may_go_on.set()
        eventually(lambda: num_there(cache, prompt(MAX_FAILURES)) == 8)
        status = tier_of(cache).status()
        assert status.num_late_entries == MAX_FAILURES
        assert not status.is_writing_paused
        assert "failed" not in objects_of(cache)


def test_a_backend_that_hangs_costs_the_deadline(monkeypatch):
    monkeypatch.setattr(lane, "STALL_S", 0.2)
    monkeypatch.setattr(tier, "MAX_CLOSE_S", 0.2)
    shelf = Hanging()
    cache = cache_over(shelf)
    store_and_wait(cache, prompt(0))
    shelf.hangs_at = "read"
    with pytest.raises(DeadlineExceeded):
        fetch(cache, prompt(0), Span(0, 8), seconds=0.1)
    eventually(lambda: tier_of(cache).status().is_reading_paused)
    with pytest.raises(FetchError, match="paused"):
        fetch(cache, prompt(0), Span(0, 8))
    assert not cache.search(prompt(1)), "a request would wait for a backend that hangs"
    cache.close()
    assert not shelf.is_closed, "closed under a call"
    shelf.may_go_on.set()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_backend_that_never_ends_in_time_is_known_to_be_slow(is_given_up):
    shelf = Shelf(lambda call: time.sleep(0.15) if call == "read" else None)
    with cache_over(shelf) as cache:
        store_and_wait(cache, prompt(0))
        fetch_too_late(cache, plan_of(Span(0, 8)), prompt(0), is_given_up=is_given_up)


def test_a_search_that_hangs_holds_nobody_for_long(monkeypatch):
    monkeypatch.setattr(lane, "STALL_S", 0.3)
    shelf = Hanging()
    shelf.hangs_at = "exists"
    with cache_over(shelf) as cache:
        (first,) = cache.search(prompt(0))
        eventually(lambda: first.is_over)
        eventually(lambda: not cache.search(prompt(1)))
        shelf.may_go_on.set()


@pytest.mark.parametrize(("call_s", "is_paused"), [(0.09, False), (0.12, True)])
def test_what_pauses_reading_is_late_answers_not_long_prompts(call_s, is_paused):
    now = [0.0]

    def slowly(_call: str) -> None:
        now[0] += call_s

    shelf = Shelf(slowly)
    shelf.lies = True
    with cache_over(shelf, lambda: now[0]) as cache:
        for number in range(MAX_FAILURES):
            (asked,) = cache.search(prompt(number, 1280))
            eventually(lambda it=asked: it._answered.is_set())
        assert tier_of(cache).status().is_reading_paused == is_paused


def notes_of(cache: Cache) -> list[tuple[int, type]]:
    """Return a list that gets, for each fetch that ends, the bytes that were read and its error."""
    noted: list[tuple[int, type]] = []

    def note(num_bytes: int, _seconds: float, error: FetchError | None) -> None:
        noted.append((num_bytes, type(error)))

    tier_of(cache)._note_speed = note
    return noted


@pytest.mark.parametrize("num_left", [0, 3])
def test_what_is_missing_has_not_been_read(num_left):
    shelf = Shelf()
    with cache_over(shelf) as cache:
        store_and_wait(cache, prompt(0))
        noted = notes_of(cache)
        shelf.objects = dict(list(shelf.objects.items())[-8:][:num_left])  # E is written last.
        with pytest.raises(StaleEntry):
            fetch(cache, prompt(0), Span(0, 8))
        eventually(lambda: noted)
    assert noted == [(num_left * FAMILY.e_page_bytes, StaleEntry)]


def test_a_fetch_that_was_given_up_says_how_much_came_and_writes_nothing():
    """Its memory was given back, and may belong to another fetch."""
    shelf = Hanging()
    with cache_over(shelf) as cache:
        store_and_wait(cache, prompt(0))
        noted = notes_of(cache)
        shelf.hangs_at = "read"
        staging = cache.fetch(plan_of(Span(0, 8)), prompt(0), Deadline.after(5))
        assert staging is not None
        waiting = cache.fetch(plan_of(Span(0, 8)), prompt(0), Deadline.after(5))
        assert waiting is not None
        eventually(lambda: ("read", 4) in shelf.calls)
        staging.release()
        waiting.release()
        shelf.hangs_at = ""
        shelf.may_go_on.set()
        fetch(cache, prompt(0), Span(0, 8))
        assert noted[0] == (4 * FAMILY.e_page_bytes, Cancelled)
        assert staging.num_landed_bytes == waiting.num_landed_bytes == 0
        num_reads = [call for call, _ in shelf.calls].count("read")
        assert num_reads == 1 + 8, "one for the first, none for the second, eight for the last"


def reading_of(shelf: Shelf, now: list[float]) -> Lane:
    return Lane("reading", shelf, Objects(FAMILY), range(4), lambda: now[0])  # type: ignore[arg-type]


def test_a_lane_pauses_doubles_and_recovers():
    now = [0.0]

    def hang(_call: str) -> None:
        now[0] += STALL_S + 1
        assert reading.is_paused

    reading = reading_of(Shelf(hang), now)
    for pause_s in (30.0, 60.0, 120.0, 240.0, 300.0, 300.0):
        for _ in range(MAX_FAILURES):
            assert not reading.is_paused
            reading.fail("a test")
        now[0] += pause_s - 1
        assert reading.is_paused
        now[0] += 1
    reading.succeed()
    reading.fail("a test")
    assert not reading.is_paused
    reading.num_leading(MODEL, prompt(0), Step(Kind.KV, 0))
    assert not reading.is_paused


def test_many_calls_that_answer_are_none_that_hangs():
    now = [0.0]

    def answer(_call: str) -> None:
        now[0] += 0.6 * STALL_S
        assert not reading.is_paused

    shelf = Shelf(answer)
    shelf.lies = True
    reading = reading_of(shelf, now)
    assert reading.num_leading(MODEL, prompt(0, 300), Step(Kind.KV, 0)) == 300
    assert shelf.calls == [("exists", 128), ("exists", 128), ("exists", 44)]
