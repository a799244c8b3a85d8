"""Answers that wait until peers can read the computed KV, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_droidspeak.request.replies import Replies


class Streamer:
    """A streamer that notes sent replies, with a cache and an offloader that publish on demand."""

    def __init__(self, patience_s: float = 100.0) -> None:
        self.sent: list[str] = []
        self.num_put = 2
        self.num_done = 1
        self.is_known = False
        self.labelled: list[str] = []
        stands_for: Any = self
        self.replies = Replies(stands_for, stands_for, stands_for, patience_s)

    def knowing(self) -> Any:
        assert self.num_done == self.num_put, "asked before there is something to know"
        return lambda: self.is_known

    def report(self, reqs: Any, skip_req: Any = None) -> None:
        self.labelled += [req.rid for req in reqs if req is not skip_req]

    def original(self, _streamer: Any, reqs: Any, _logprob: bool, skip_req: Any = None) -> None:
        self.sent += [req.rid for req in reqs if req is not skip_req]

    def stream(self, *reqs: Any, skip_req: Any = None) -> None:
        self.replies.stream(self.original, None, reqs, False, skip_req)


class Request:
    """Stands for SGLang's Req. No two objects of it are equal."""

    finished_output = None

    def __init__(self, rid: str, params: Any, *, is_finished: bool) -> None:
        self.rid, self.sampling_params, self._is_finished = rid, params, is_finished

    def finished(self) -> bool:
        return self._is_finished


def request(rid, *, is_finished=True, n=1, max_new_tokens=8, **controls):
    custom = {"droidspeak": controls}
    params = SimpleNamespace(n=n, max_new_tokens=max_new_tokens, custom_params=custom)
    return Request(rid, params, is_finished=is_finished)


BEFORE = {"publish": "before_reply"}


def test_an_answer_waits_until_its_pages_are_stored_and_known():
    streamer = Streamer()
    waits = request("waits", **BEFORE)
    goes_on = request("goes on", is_finished=False, **BEFORE)
    streamer.stream(waits, goes_on, request("plain"), request("bad", publish="never"))
    assert streamer.sent == ["goes on", "plain", "bad"]
    streamer.stream(waits)
    streamer.num_put = 5  # Others' pages, which it does not wait for.
    streamer.num_done = 1
    streamer.replies.release()
    assert "waits" not in streamer.sent
    streamer.num_put = streamer.num_done = 2
    streamer.replies.release()
    assert "waits" not in streamer.sent
    streamer.is_known = True
    streamer.replies.release()
    streamer.replies.release()
    assert streamer.sent == ["goes on", "plain", "bad", "waits"]
    assert streamer.labelled == streamer.sent, "of what it has read until it is sent"


def test_what_sglang_prefills_for_all_samples_does_not_keep_them_waiting():
    streamer = Streamer()
    stored = request("stored", max_new_tokens=0, **BEFORE)
    samples = [request(it, n=2, **BEFORE) for it in ("first", "second")]
    streamer.stream(request("for all", n=2, max_new_tokens=0, **BEFORE), stored, *samples)
    assert streamer.sent == ["for all"]


def test_who_has_the_id_of_one_that_waits_is_answered_and_labelled():
    """The first rank has answered the waiting request, so its id is free again."""
    streamer = Streamer()
    streamer.stream(request("r1", **BEFORE))
    streamer.stream(request("r1", is_finished=False))
    assert streamer.sent == streamer.labelled == ["r1"]


@pytest.mark.parametrize("custom", [5, "x", [1], {"droidspeak": 5}], ids=str)
def test_custom_params_of_another_type_do_not_end_the_scheduler(custom):
    streamer, odd = Streamer(), request("odd")
    odd.sampling_params.custom_params = custom
    streamer.stream(odd)
    assert streamer.sent == ["odd"]


def test_what_is_published_already_waits_for_nothing():
    streamer = Streamer()
    streamer.num_done, streamer.is_known = 2, True
    streamer.stream(request("waits", **BEFORE))
    assert streamer.sent == ["waits"]


def test_no_answer_waits_for_ever():
    streamer = Streamer(patience_s=0.0)
    streamer.stream(request("waits", **BEFORE))
    assert streamer.sent == ["waits"]


@pytest.mark.parametrize("waits", [True, False])
def test_an_idle_server_looks_again_soon(waits):
    streamer, slept = Streamer(), []
    if waits:
        streamer.stream(request("waits", **BEFORE))
    streamer.replies.sleep(slept.append, "the scheduler")
    assert slept == ([] if waits else ["the scheduler"])
