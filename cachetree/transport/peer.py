"""Read from one remote worker: one thread, which holds one session at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import zmq

from cachetree.clock import Clock, Deadline
from cachetree.errors import (
    AuthenticationError,
    CacheTreeError,
    ConfigError,
    FamilyMismatch,
    FetchError,
    ProtocolError,
    without_frames,
)
from cachetree.ids import Location, ModelId, PageHash
from cachetree.memory import ArenaReader, Staging
from cachetree.planning import Link
from cachetree.transport import wire
from cachetree.transport.address import Address, parse_remote, resolved
from cachetree.transport.advertise import Advert, RemoteView
from cachetree.transport.backoff import Backoff, Breaker, LogLimiter
from cachetree.transport.config import PeerConfig
from cachetree.transport.connection import Connection, answer_of, poll
from cachetree.transport.handshake import credentials_of
from cachetree.transport.pending_fetches import PendingFetches
from cachetree.transport.pulls import Keeper, Pulls
from cachetree.transport.status import PeerState, PeerStatus
from cachetree.transport.wakeup import CLOSE_S, Wakeup
from cachetree.tree import CacheTree

log = logging.getLogger("cachetree.peer")
"""Logger with a name of its own, so that a server can add a prefix to its lines."""

NO_WORKER: Final = 0
"""Epoch that stands for a server without a worker."""
_REFUSED_S: Final = 60.0
"""Seconds until a refused worker is tried again: by then, another worker may have the address."""


class Peer:
    """One remote worker that this server reads from.

    While `state` is READY, `tree` lists the worker's advertised entries at location `address`. If
    the worker is lost, they are removed before `state` changes. Every staging passed to `fetch`
    completes or fails, by its deadline at the latest. With a `keeper`, all entries that the worker
    advertises are copied into `tree`. Raises ConfigError for a bad address or key.
    """

    def __init__(
        self,
        tree: CacheTree,
        address: Location,
        config: PeerConfig,
        *,
        own_epoch: int = NO_WORKER,
        keeper: Keeper | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`own_epoch` is the epoch of this server's own worker, which cannot be a peer."""
        self.address: Final = address
        self._own_epoch = own_epoch
        self._tree = tree
        self._who: Final = f"worker {address}"
        self._remote = parse_remote(address, field="peer address")
        self._credentials = credentials_of(config.key_file, config.server_key)
        if config.server_key is None and not self._remote.is_loopback:
            log.warning(
                "worker %s is another machine, and no key of it is set: its data is neither "
                "encrypted nor proven to come from that machine",
                address,
            )
        self.config: Final = config
        self._clock = clock
        self.state = PeerState.CONNECTING
        """State of the peer. Any thread may read it."""
        self._changed = threading.Condition()
        self.error: CacheTreeError | None = None
        """Last error that kept the peer from being ready."""
        self._view = RemoteView(tree, address)
        self._log_limiter = LogLimiter(clock)
        self._has_warned = False
        self._requests: deque[tuple[ModelId, Sequence[PageHash], Staging]] = deque()
        self._counts = PeerStatus(address=address)
        self._breaker = Breaker(config, clock)
        self._fetches = PendingFetches(
            self._who, tree.family, config, self._breaker, self._counts, clock
        )
        self._attempt_at_s = clock()
        self._backoff = Backoff(config.reconnect_s)
        self._is_closing = False
        self._wakeup = Wakeup()
        self._pulls = Pulls(address, keeper, self._fetches, clock)
        self._thread = threading.Thread(
            target=self._run, name=f"cachetree-peer {address}", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self._wakeup.close()
            raise

    @property
    def link(self) -> Link | None:
        """Measured link to the worker, for a new fetch. None before any fetch. Thread-safe."""
        return self._fetches.free_link

    @property
    def status(self) -> PeerStatus:
        """Return the peer's state in numbers. Thread-safe."""
        connection = self._fetches.connection
        return msgspec.structs.replace(
            self._counts,
            state=self.state,
            error=str(self.error or ""),
            probe_in_s=self._breaker.probe_in_s,
            shares_memory=connection is not None and connection.arena is not None,
            bytes_per_s=self._fetches.bandwidth.bytes_per_s,
            num_pages=self._tree.remote.num_pages[self.address],
            num_dropped_pages=self._tree.remote.num_dropped[self.address],
            pulls=self._pulls.status,
        )

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until `state` is no longer CONNECTING, or the time is over. Return whether it is
        READY."""
        with self._changed:
            self._changed.wait_for(lambda: self.state is not PeerState.CONNECTING, timeout_s)
            return self.state is PeerState.READY

    def fetch(self, model: ModelId, pages: Sequence[PageHash], staging: Staging) -> None:
        """Start to read the transfer steps of `staging`, in order, for all of `pages`. Returns at
        once.

        `staging` fails if the worker is not connected, is lost, no longer has the pages, breaks the
        protocol or is late. `staging.cancel` stops the fetch.
        """
        with self._changed:
            if not self._is_closing:
                self._requests.append((model, pages, staging))
                self._wakeup.wake()
                return
        staging.fail(self._absence)

    def close(self, most_s: float = CLOSE_S) -> None:
        """Fail running fetches, forget the worker's entries, and wait at most `most_s` for the
        thread. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._wakeup.wake()
        self._thread.join(most_s)

    @property
    def _absence(self) -> FetchError:
        """Error of a fetch that starts while the worker cannot be read."""
        if self.state is PeerState.READY:
            return FetchError(f"{self._who} is closed here")
        because = f": {self.error}" if self.error else ""
        return FetchError(f"{self._who} is {self.state.value}{because}")

    # Everything below runs in the peer's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._live()
                except (FamilyMismatch, ConfigError) as exc:
                    self._lose(exc, PeerState.REFUSED)
                except AuthenticationError as exc:
                    self._lose(exc, PeerState.UNTRUSTED)
                except FetchError as exc:
                    self._counts.num_protocol_errors += isinstance(exc, ProtocolError)
                    self._lose(exc, PeerState.CONNECTING)
                except Exception as exc:
                    # A message of the worker may be the cause, so the breaker counts this error.
                    if self._log_limiter.may("internal error"):
                        log.exception("peer %s: internal error", self.address)
                    self._lose(ProtocolError(f"internal error: {exc}"), PeerState.CONNECTING)
        except Exception:
            log.exception("peer %s: its thread has ended", self.address)
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._changed:
            self._is_closing = True
            self._wakeup.close()
        if self._fetches.connection is not None:
            self._fetches.connection.send(wire.Bye(reason="closing"))
        try:
            self._lose(FetchError(f"{self._who} is closed here"), PeerState.CLOSED)
        finally:
            self._set_state(PeerState.CLOSED)
            self._look_after_fetches()

    def _live(self) -> None:
        """Pause, then connect and run the session. Returns when the peer closes; raises the error
        that ends the session."""
        while (pause_s := self._attempt_at_s - self._clock()) > 0:
            self._wait(zmq.Poller(), pause_s)
        if self.state is PeerState.RESTING:
            self._set_state(PeerState.CONNECTING)
        hello = wire.hello(self._tree.family, "", epoch=0)
        to = resolved(self._remote)
        deadline = Deadline.after(self.config.connect_s, self._clock)
        answer = answer_of(to, self._credentials, hello, deadline, until_up=False, wait=self._wait)
        connection = self._fetches.connection = self._greeted(to, answer)
        while not self._is_closing:
            self._turn(connection)

    def _wait(self, poller: zmq.Poller, most_s: float) -> None:
        """Wait while there is no session. Raises FetchError if the peer is closing."""
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        poll(poller, min(most_s, self._fetches.timeout_s()))
        self._wakeup.drain()
        self._look_after_fetches()
        if self._is_closing:
            raise FetchError(f"{self._who} is closed here")

    def _greeted(self, to: Address, hello: wire.ToPeer) -> Connection:
        """Check the worker's hello, and open the session that it offers. Raises an error if the
        worker refuses, cannot exchange caches with this server, or is this server's own."""
        match hello:
            case wire.Bye():
                raise FetchError(f"{self._who} ended the session: {wire.said(hello)}")
            case wire.Hello():
                pass
            case _:
                raise ProtocolError(f"{self._who} did not say hello first")
        if hello.epoch == self._own_epoch:
            raise ConfigError(f"{self._who} is this server's own; remove it from peers or keeps")
        wire.require_family(hello, self._tree.family, who=self._who)
        if hello.ticket is None:
            raise ProtocolError(f"{self._who} gave no ticket for a data connection")
        self._counts.epoch, self._counts.model = hello.epoch, hello.model
        self._view.limit(hello.budget_bytes)
        connection = Connection(to, self._credentials, hello.ticket, self._wakeup, self._clock)
        if self.config.shared_memory and hello.arena is not None:
            with suppress(OSError):  # Payloads arrive in frames if the arena cannot be read.
                connection.arena = ArenaReader(hello.arena)
        return connection

    def _turn(self, connection: Connection) -> None:
        most_s = min(self.config.heartbeat_s, self.config.connect_s, self._fetches.timeout_s())
        if self.state is PeerState.READY:
            most_s = min(most_s, self._pulls.timeout_s())
        connection.wait(most_s)
        for message in connection.channel.receive(self._fetches.receiver_of):
            self._handle(connection, wire.decode_to_peer(message))
        self._look_after_fetches()
        if self._breaker.is_open:
            connection.send(wire.Bye(reason="too many errors"))
            raise FetchError(f"{self._who} failed too often, the last time: {self._breaker.error}")
        is_ready = self.state is PeerState.READY
        if is_ready:
            self._fetches.resume()
            self._pulls.turn()
        patience_s = self.config.silence_s if is_ready else self.config.connect_s
        connection.beat(self.config.heartbeat_s, patience_s)

    def _handle(self, connection: Connection, message: wire.ToPeer) -> None:
        match message:
            case wire.Bye():
                error = FetchError(f"{self._who} ended the session: {wire.said(message)}")
                self._fetches.interrupt(error)  # Before `_lose`, which else counts an error.
                raise error
            case wire.Located():
                self._fetches.read(message)
            case wire.Ended():
                self._fetches.ended(message)
            case wire.Reset() | wire.Entries() | wire.Synced():
                self._learn(connection, message)
            case wire.Pong():
                pass  # `beat` sees that bytes have arrived.
            case _:
                raise ProtocolError(f"{self._who} sent a {type(message).__name__} in a session")

    def _learn(self, connection: Connection, message: Advert) -> None:
        self._view.apply(message)
        self._pulls.hear(message)
        self._counts.num_resyncs += isinstance(message, wire.Reset)
        if isinstance(message, wire.Entries):
            connection.send(wire.Learned())
        if isinstance(message, wire.Synced) and self.state is not PeerState.READY:
            self._backoff.reset()
            self._counts.unreachable_since = None
            self._set_state(PeerState.READY)
            if self._has_warned:
                log.info("peer %s is ready", self.address)
            self._has_warned = False

    def _look_after_fetches(self) -> None:
        """End late fetches. Start requested fetches, or fail them at once."""
        self._fetches.check()
        if self._is_closing:
            self._fetches.end(FetchError(f"{self._who} is closed here"))
        while self._requests:
            model, pages, staging = self._requests.popleft()
            if self._is_closing or self.state is not PeerState.READY:
                self._fetches.refuse(staging, self._absence)
            else:
                self._fetches.begin(model, pages, staging)

    def _lose(self, error: CacheTreeError, state: PeerState) -> None:
        """End the session and remove the worker's entries from the tree. Then fail the running
        fetches, or keep them for the next session."""
        if isinstance(error, ProtocolError) or self._fetches.is_under_way:
            self._breaker.failed(error)
        if state is PeerState.CONNECTING and self._breaker.is_open:
            state = PeerState.RESTING
        cause = state.value
        if state is PeerState.CONNECTING:
            cause = "lost" if self._fetches.connection is not None else "not reached"
        if not self._is_closing and self._log_limiter.may(cause):
            log.warning("peer %s is %s: %s", self.address, cause, error)
            self._has_warned = True
        if self._fetches.connection is not None:
            self._view.forget()
            self._fetches.connection.close()
            self._fetches.connection = None
            self._counts.num_losses += 1
            self._counts.unreachable_since = time.time()
        self._pulls.interrupt()
        self.error = without_frames(error)
        self._set_state(state)
        failure = error if isinstance(error, FetchError) else FetchError(str(error))
        if state in (PeerState.CONNECTING, PeerState.UNTRUSTED):
            self._fetches.interrupt(failure)
        else:
            self._fetches.end(failure)
        least_s = _REFUSED_S if state is PeerState.REFUSED else self._breaker.probe_in_s or 0.0
        self._attempt_at_s = self._clock() + max(self._backoff.drawn_s(), least_s)

    def _set_state(self, state: PeerState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
