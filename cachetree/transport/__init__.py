"""Move pages between servers: a worker serves its tree, and a peer fetches from a worker.

Rules of a session

    - A session is one TCP connection between a peer and a worker. Its fetches and adverts end with
      it. An epoch is a random number that a worker draws at its start.
    - The connection delivers everything whole and in order, or it ends. Each direction numbers its
      headers and pieces, and their seals or checksums cover the number (`frames`). So messages
      need no numbers, and no other code looks for lost messages.
    - An entry is KV of all layers, or E of one layer, for consecutive pages of one model. Its
      parent has the pages before. The worker advertises all entries: a snapshot (Reset, Entries,
      Synced), then every change. The peer answers each Entries with Learned once its tree has these
      entries. At most `MAX_UNANSWERED` are unanswered. If changes overflow their queue, a new
      snapshot begins. So the peer's view may be late, but never wrong.
    - Additions name parents before children; removals name children before parents.
    - A fetch has an id that rises within the session. The worker answers with frames, one transfer
      step (layer) after another. On the same host it sends positions in its memory (Located). Ended
      stops a fetch early.
    - The worker keeps the pages in memory (a lease) until the kernel has the last frame, or until
      the peer has copied them.
    - The peer cancels a fetch that its reader gives up, and then ignores its frames. It also
      cancels a fetch when it has copied all bytes at their positions, which ends the lease.
    - `timeout_ms` is the time left until a fetch's deadline: the two clocks are not compared.
    - Both sides notice silence. The peer pings every `heartbeat_s`; each side ends the session
      after its `silence_s`.
    - Messages may have unknown fields; these are ignored. Unknown messages end the session.
    - Everything from the other side is bounded: sizes, counts and waiting fetches.

How it works

    hello      The peer greets over ZMQ, encrypted by CURVE if keys are set. Both compare version
               and family. The worker's hello has a ticket for one connection to its `bulk_port`.
    loss       The peer first forgets all entries of the worker. Interrupted fetches wait for the
               next session and ask for the rest: `max_retries` times, within `resume_s`. Landed
               bytes were verified and stay.
    failures   Too many errors in a short time open a breaker: the peer reads nothing from the
               worker for a cooldown. Then one fetch tries the worker.
    fairness   The next frame goes to the peer that has got the fewest bytes, for its fetch
               that has got the fewest.
    threads    One for all sessions of a worker, one for each peer, and one that writes to each
               connection. A worker's thread never waits for a disk or for one peer.

Drawings: the paths of a fetch and of a copy through these files are in `cachetree/README.md`, the
messages in `wire`, and the opening of a connection in `frames`.

    peer              one worker: one thread, one `connection` at a time
    pending_fetches   the fetches of one peer, repeated after faults; `pace` measures the link
    pulls             copies of a peer's entries, made as it advertises them
    peers             all peers of a cache; `directory` finds some
    worker            the serving side: one thread for all connections to its `data_port`
    session           one peer's streams; `advertise`, the entries to tell the peer
    channel           one connection; `send_queue`, its outgoing frames
    sender, receiver  pages that leave a worker, and pages that arrive at a peer
    handshake, keys   proofs of identity; `backoff`, the pauses after failures
    verbs, admin      an operator's questions and orders, over ZMQ without a session
    status, tracing   a peer's state in numbers, and OpenTelemetry spans

Why not otherwise

    - Payloads over ZMQ cost a copy and two threads (`benchmarks/README.md`).
    - TLS on the data connection would need certificates beside the CURVE keys. The ticket's key
      comes over CURVE instead.
    - A session that survives its connection would need numbers, acknowledgements and a replay. A
      new snapshot is simple, and a fetch continues at its first missing byte anyway.
    - A peer could ask at each match instead of hearing adverts. This would cost each request a
      round trip; now a match is local.

What could be better

    - A new session sends the whole snapshot again, even if little changed.
    - One thread serves all sessions of a worker, so it bounds the rate of small fetches.
    - libzmq does not bound the connections of strangers, so `crowd` has to.
"""

from cachetree.transport.address import Address, open_port, parse_http, without_password
from cachetree.transport.admin import ask
from cachetree.transport.backoff import Backoff, LogLimiter
from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.directory import is_directory
from cachetree.transport.handshake import Credentials, bind_ports, check_worker, credentials_of
from cachetree.transport.keys import write_key_pair
from cachetree.transport.peer import Peer
from cachetree.transport.peers import Peers, check_peer
from cachetree.transport.pulls import Keeper
from cachetree.transport.status import PeerState, PeerStatus, PullStatus
from cachetree.transport.tracing import serve_spans, untraced
from cachetree.transport.verbs import Source, Status, StatusRequest
from cachetree.transport.wire import MAX_REQUEST_S
from cachetree.transport.worker import Worker

__all__ = [
    "MAX_REQUEST_S",
    "Address",
    "Backoff",
    "Credentials",
    "Keeper",
    "LogLimiter",
    "Peer",
    "PeerConfig",
    "PeerState",
    "PeerStatus",
    "Peers",
    "PullStatus",
    "Source",
    "Status",
    "StatusRequest",
    "Worker",
    "WorkerConfig",
    "ask",
    "bind_ports",
    "check_peer",
    "check_worker",
    "credentials_of",
    "is_directory",
    "open_port",
    "parse_http",
    "serve_spans",
    "untraced",
    "without_password",
    "write_key_pair",
]
