"""Staging: steps arrive in pieces of any size, and every wait ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cachetree.clock import Deadline
from cachetree.errors import Cancelled, DeadlineExceeded, FetchError, ProtocolError
from cachetree.ids import Kind, Step
from cachetree.memory import Arena, Blocks, NoRoom
from cachetree.memory.staging import Staging, staged

E2, KV0, KV1 = Step(Kind.E, 2), Step(Kind.KV, 0), Step(Kind.KV, 1)


def make(seconds: float = 30) -> Staging:
    return Staging({E2: 4, KV0: 6, KV1: 6}, Deadline.after(seconds))


def payload(text: str) -> memoryview:
    return memoryview(text.encode())


def in_thread(function: Callable[..., Any], *args: Any) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function(*args))
        except FetchError as exc:
            outcome.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, outcome


def test_steps_land_piece_by_piece():
    staging = make()
    assert staging.steps == (E2, KV0, KV1)
    assert staging.num_bytes == 16
    staging.write(E2, 2, payload("cd"))
    assert not staging.has_landed(E2)
    staging.write(E2, 0, payload("ab"))
    assert staging.has_landed(E2) and not staging.is_complete
    staging.wait(E2)
    assert b"".join(staging.views(E2)) == b"abcd"
    staging.write(KV0, 0, payload("012345"))
    staging.write(KV1, 0, payload("678901"))
    assert staging.is_complete and staging.num_landed_bytes == 16
    assert b"".join([*staging.views(KV0), *staging.views(KV1)]) == b"012345678901"


@pytest.mark.parametrize(
    ("offset", "text", "before"),
    [(3, "ab", ""), (-1, "a", ""), (0, "abcde", ""), (5, "a", ""), (0, "ab", "abc")],
)
def test_more_bytes_than_a_step_has_are_refused(offset, text, before):
    staging = make()
    staging.write(E2, 0, payload(before))
    with pytest.raises(ValueError, match="do not fit"):
        staging.write(E2, offset, payload(text))
    assert staging.num_landed_bytes == len(before)


@pytest.mark.parametrize("seconds", [30, math.inf])
def test_a_waiting_reader_wakes_when_its_step_lands(seconds):
    staging = make(seconds)
    thread, outcome = in_thread(staging.wait, KV0)
    staging.write(E2, 0, payload("abcd"))
    time.sleep(0.05)
    assert thread.is_alive()
    staging.write(KV0, 0, payload("012345"))
    thread.join(60)
    assert outcome == [None]


def test_a_failure_wakes_every_reader_and_the_first_one_counts():
    staging = make()
    waits = [in_thread(staging.wait, step) for step in (KV0, KV1)]
    first = ProtocolError("broken")
    staging.fail(first)
    staging.fail(Cancelled("too late"))
    for thread, outcome in waits:
        thread.join(60)
        assert [(type(it), it.args) for it in outcome] == [(ProtocolError, ("broken",))]
    assert staging.error is first


def test_landed_bytes_stay_readable_after_a_failure():
    staging = make()
    staging.write(E2, 0, payload("abcd"))
    staging.fail(ProtocolError("broken"))
    staging.wait(E2)
    with pytest.raises(ProtocolError):
        staging.wait(KV0)


def test_a_failure_after_the_last_byte_is_no_failure():
    staging = make()
    for step, text in ((E2, "abcd"), (KV0, "012345"), (KV1, "012345")):
        staging.write(step, 0, payload(text))
    staging.fail(ProtocolError("late"))
    assert staging.error is None
    staging.wait(KV1)


def test_a_cancelled_fetch_stops_its_writer():
    staging = make()
    staging.cancel()
    with pytest.raises(Cancelled):
        staging.write(E2, 0, payload("abcd"))
    with pytest.raises(Cancelled):
        staging.wait(E2)


def test_every_wait_ends_at_the_deadline():
    staging = make(seconds=0.1)
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="kv of layer 1"):
        staging.wait(KV1)
    assert 0.09 <= time.monotonic() - started_s < 5
    assert isinstance(staging.error, DeadlineExceeded)


def test_a_readers_own_deadline_ends_its_wait_and_not_the_fetch():
    staging = make()
    with pytest.raises(DeadlineExceeded, match="kv of layer 0"):
        staging.wait(KV0, Deadline.after(0.05))
    assert staging.error is None
    staging.write(KV0, 0, payload("012345"))
    staging.wait(KV0, Deadline.after(0.05))
    staging.fail(ProtocolError("broken"))
    with pytest.raises(ProtocolError):
        staging.wait(KV1, Deadline.after(0.05))


def test_the_time_of_the_last_byte_is_kept():
    now_s = [3.0]
    staging = Staging({E2: 4}, Deadline.after(9, lambda: now_s[0]))
    assert (staging.started_s, staging.completed_s) == (3.0, None)
    now_s[0] = 5.0
    staging.write(E2, 0, payload("ab"))
    now_s[0] = 6.0
    staging.write(E2, 2, payload("cd"))
    assert staging.completed_s == 6.0


def test_bytes_that_cross_a_border_of_runs_come_to_their_places():
    runs = [memoryview(bytearray(2)), memoryview(bytearray(4))]
    staging = Staging({KV0: 6}, Deadline.after(30), {KV0: runs})
    room = staging.room(KV0, 0, 3)
    room[:] = b"xyz"
    room = staging.room(KV0, 0, 3)  # The connection broke, and another one brings them.
    room[:] = b"012"
    staging.land(KV0, 3)
    assert not staging.has_landed(KV0)
    staging.write(KV0, 3, payload("345"))
    assert staging.is_complete
    assert [bytes(view) for view in staging.views(KV0)] == [b"01", b"2345"]


def test_no_error_that_is_kept_keeps_a_view():
    pool = Arena(40)
    staging = staged(pool, {KV0: Blocks(2, 10), KV1: Blocks(2, 10)}, Deadline.after(30))

    def write() -> None:
        room = staging.room(KV1, 0, 10)
        raise OSError(f"no {room.nbytes} bytes")

    def read() -> None:
        views = staging.views(KV0)
        staging.wait(KV1)
        assert not views

    try:
        try:
            write()
        except OSError as exc:
            raise ProtocolError("broken", 2) from exc
    except FetchError as exc:
        staging.fail(exc)
    for _ in range(2):
        with pytest.raises(ProtocolError) as caught:
            read()
        assert caught.value.args == ("broken", 2)
        del caught
    staging.release()
    assert pool.lent_bytes == 0


def test_memory_goes_back_with_the_last_view_of_a_released_fetch():
    pool = Arena(40)
    ended: list[Staging] = []

    def make() -> Staging:
        return staged(pool, {KV0: Blocks(3, 10)}, Deadline.after(30), ended.append)

    staging = make()
    room = staging.room(KV0, 0, 30)
    with pytest.raises(NoRoom):
        make()
    assert pool.lent_bytes == 30
    staging.release()
    staging.release()
    assert ended == [staging]
    with pytest.raises(Cancelled):
        staging.room(KV0, 0, 30)
    assert pool.lent_bytes == 30
    with pytest.raises(NoRoom):
        make()
    del room
    assert pool.lent_bytes == 0
    make()
    assert pool.lent_bytes == 0, "it was dropped without a release"


def test_deadlines_count_down():
    now_s = [10.0]
    deadline = Deadline.after(5, lambda: now_s[0])
    assert (deadline.remaining_s(), deadline.has_passed) == (5.0, False)
    now_s[0] = 15.0
    assert (deadline.remaining_s(), deadline.has_passed) == (0.0, True)
    now_s[0] = 99.0
    assert deadline.remaining_s() == 0.0


def test_a_large_copy_lets_other_threads_run():
    payload = memoryview(bytes(256 << 20))
    staging = Staging({E2: payload.nbytes}, Deadline.after(60))
    is_over = threading.Event()
    has_begun = threading.Event()
    num_turns = 0

    def other() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            num_turns += 1
            has_begun.set()
            time.sleep(0)

    thread = threading.Thread(target=other)
    thread.start()
    has_begun.wait()
    before = num_turns
    staging.write(E2, 0, payload)
    num_turns_meanwhile = num_turns - before
    is_over.set()
    thread.join()
    assert num_turns_meanwhile > 1


@pytest.mark.parametrize("tell", [Staging.check, lambda it: it.wait(KV0)])
def test_an_error_that_was_told_keeps_no_frames(tell):
    staging = make()
    staging.check()
    staging.fail(ProtocolError("a test"))
    with pytest.raises(ProtocolError, match="a test"):
        tell(staging)
    assert staging.error is not None
    assert staging.error.__traceback__ is None
