"""Hold back the ends of answers until peers can read the KV that was computed for them.

SGLang inserts a request's KV when the request is finished, and then answers. A thread then copies
the KV out and advertises it to peers. If a client's next request may go to another server and
continue this answer, the client can ask this server to answer last:

    inserted ──► copied out ──► advertised ──► every peer says that it knows ──► answered
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from cachetree import Cache, Deadline
from sglang_droidspeak.engine.names import Req
from sglang_droidspeak.request.controls import parse_controls
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.store.insertions import Offloader

_LOOK_S: Final = 0.001


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    answer: Callable[[], None]
    num_put: int
    """Number of nodes that the offloader has to copy out before the answer is sent."""
    deadline: Deadline
    knows: Callable[[], bool] | None = None
    """Function that returns whether all peers know the nodes. None until all are copied out."""


@dataclass(eq=False)
class Replies:
    """Hold finished answers back until peers know their KV, or `_patience_s` has passed. The hooks
    `stream` and `sleep` replace SGLang's output and its idle sleep. Scheduler thread only."""

    _cache: Cache
    _offloader: Offloader
    _labels: Labels
    _patience_s: float
    """Largest number of seconds that an answer waits, because a peer may be gone."""
    _held: dict[Req, _Held] = field(default_factory=dict, init=False)
    """Held answers by request, not by id: once the first rank has answered, another request may
    have the id."""

    def stream(
        self,
        original: Any,
        streamer: Any,
        reqs: Sequence[Req],
        return_logprob: bool,
        skip_req: Req | None = None,
    ) -> None:
        """Hooks SchedulerOutputStreamer.stream_output: leave out answers that have to wait, and
        label the other answers."""

        def send(some: Sequence[Req], skipped: Req | None = None) -> None:
            self._labels.report(some, skipped)
            original(streamer, some, return_logprob, skipped)

        for req in reqs:
            if req is not skip_req and _waits(req) and req not in self._held:
                self._held[req] = _Held(
                    answer=partial(send, [req]),
                    num_put=self._offloader.num_put,
                    deadline=Deadline.after(self._patience_s),
                )
        send([it for it in reqs if it not in self._held], skip_req)
        self.release()

    def sleep(self, original: Any, scheduler: Any) -> None:
        """Hooks Scheduler.maybe_sleep_on_idle: sleep only a millisecond while an answer waits."""
        self.release()
        if self._held:
            time.sleep(_LOOK_S)
        else:
            original(scheduler)

    def release(self) -> None:
        """Send the answers that need to wait no longer. Called in every scheduler step."""
        for req, held in list(self._held.items()):
            if held.knows is None and self._offloader.num_done >= held.num_put:
                held.knows = self._cache.knowing()
            is_published = held.knows is not None and held.knows()
            if is_published or held.deadline.has_passed:
                del self._held[req]
                held.answer()


def _waits(req: Req) -> bool:
    params = req.sampling_params
    if not req.finished() or req.finished_output:
        return False
    if params.n > 1 and params.max_new_tokens == 0:
        return False  # SGLang's own request before the samples: only the samples wait.
    try:
        return parse_controls(params.custom_params).publish is not None
    except ValueError:
        return False
