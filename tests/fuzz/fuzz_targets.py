"""The decoders of bytes from outside, each as a function that may raise only the errors that
callers expect.

A target takes any bytes. An error that is not in `expected` is a bug. Memory or time without bound
is a bug, too, and the drivers check both.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from transport_parts import E_LAYER, FAMILY, MODEL, new_tree, pages_of

from cachetree import Deadline, Kind, Location, Staging, Step
from cachetree.checkpoint.safetensors_files import read_tensors
from cachetree.cli.serve import read_config
from cachetree.disk import entry_file as files
from cachetree.errors import UNREADABLE, CacheTreeError, ConfigError, ProfileError, ProtocolError
from cachetree.memory.copying import checksum
from cachetree.planning.profile import read_profile
from cachetree.transport import frames, keys, verbs, wire
from cachetree.transport.address import parse_listen, parse_remote
from cachetree.transport.admin import AdminService
from cachetree.transport.advertise import RemoteView
from cachetree.transport.channel import Channel
from cachetree.transport.frames import KEY_BYTES, Frame, Seals, Unsealed
from cachetree.transport.receiver import FrameReceiver
from cachetree.tree import join_hashes
from cachetree.tree.tree import CacheTree
from profiles.environment import memory_bytes
from profiles.evidence import read_measured
from sglang_droidspeak.fleet.fleet import read_fleet
from sglang_droidspeak.request.controls import parse_controls
from sglang_droidspeak.start.config import parse_settings

WORKER = Location("tcp://127.0.0.1:1")
PAGES = pages_of(8)


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    expected: tuple[type[Exception], ...]
    share: float
    """Share of all executions. Slow targets get fewer."""

    def __call__(self, data: bytes) -> None:
        with suppress(*self.expected):
            self.run(data)


@cache
def _folder() -> Path:
    """Return a folder for files that a decoder reads by path. It is in memory if the machine allows
    that."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def _file(data: bytes, name: str = "input") -> Path:
    path = _folder() / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def _header(data: bytes) -> memoryview:
    """Return the data as a header, mostly with the right checksum, because the decoder runs only
    behind a right one."""
    return memoryview(data[1:] if data[:1] == b"\xff" else wire.with_checksum(data))


def to_worker(data: bytes) -> None:
    message = wire.decode_to_worker(_header(data))
    match message:
        case wire.Hello():
            wire.family_of(message)
        case wire.Fetch():
            wire.steps_of(message, FAMILY.num_layers)
            wire.pages_of(message.pages)
        case verbs.Find() | verbs.Evict() | verbs.Pin() | verbs.Unpin():
            answers: list[verbs.ToPeer] = []
            service = AdminService(new_tree(PAGES[:4]), None, _no_status, time.monotonic)
            service.serve(message, answers.append, is_admin=True)
            while service.has_work:
                service.go_on()
            assert len(answers) == 1


def _no_status() -> verbs.Status:
    raise AssertionError("nobody asked")


@cache
def _tree() -> CacheTree:
    return new_tree()


@cache
def _view() -> RemoteView:
    return RemoteView(_tree(), WORKER)


def to_peer(data: bytes) -> None:
    message = wire.decode_to_peer(_header(data))
    match message:
        case wire.Hello():
            wire.family_of(message)
        case wire.Reset() | wire.Entries() | wire.Synced():
            _see(message)


def _see(message: wire.Reset | wire.Entries | wire.Synced) -> None:
    """Apply a message as the next one. A view that holds much begins anew."""
    view = _view()
    view.apply(wire.Reset())
    view.apply(message)
    _tree().match(PAGES)
    view.forget()
    assert not _tree()._trie.root.children, "something stayed in the tree"


class _Receiver(FrameReceiver):
    """Receives the frames of request 1."""

    def __init__(self) -> None:
        steps = dict.fromkeys((Step(Kind.E, E_LAYER), Step(Kind.KV, 0)), 4096)
        staging = Staging(steps, Deadline.after(60))
        super().__init__(MODEL, PAGES[:2], staging, lambda *_: None, self._raise)
        self.id = 1

    def receiver_of(self, frame: Frame) -> _Receiver | None:
        return self if frame.id == 1 else None

    def is_pending(self, frame: Frame) -> bool:
        return frame.offset % 3 > 0

    def _raise(self, _: FrameReceiver, error: CacheTreeError) -> None:
        raise error


def data_connection(data: bytes) -> None:
    """Decode a stream of frames. The first byte says how the stream is sealed. A sealed stream
    starts with a valid part."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with far, closing(Channel(near, _seals(data, is_worker=False), lambda: None)) as channel:
        if data[1:2] == b"\1":  # So that what comes is behind the checksum or the seal.
            far.sendall(_seals(data, is_worker=True).seal(frames.pack(_frame(data[2:30]))))
            data = data[28:]
        far.sendall(data[2 : 1 << 16])
        far.shutdown(socket.SHUT_WR)
        sink = _Receiver()
        while channel.error is None:
            for message in channel.receive(sink.receiver_of):
                wire.decode_to_peer(message)


def _seals(data: bytes, *, is_worker: bool) -> Unsealed:
    is_sealed = bool(data) and data[0] % 2
    return Seals(bytes(KEY_BYTES), is_worker=is_worker) if is_sealed else Unsealed()


def _frame(fields: bytes) -> Frame:
    id, offset, digest, size = struct.unpack("<QQQI", fields.ljust(28, b"\0"))
    return Frame(id=id % 3, offset=offset % 4097, checksum=digest, size=size % (1 << 17))


def family(data: bytes) -> None:
    raw = msgspec.Raw(data)
    wire.family_of(wire.Hello(version=wire.PROTOCOL_VERSION, family=raw))


def adverts(data: bytes) -> None:
    """Decode a conversation: messages in any order, about pages with any parents.

    The first byte of each step says what comes, the next ones which pages, models and layers.
    """
    tree = new_tree()
    view = RemoteView(tree, WORKER)
    for at in range(0, min(len(data), 400), 4):
        kind, first, count, other = data[at : at + 4].ljust(4, b"\0")
        if kind == 0:
            view.apply(wire.Reset())
            continue
        start = first % len(PAGES)
        entry = wire.Entry(
            added=kind % 3 > 0,
            model=str(other % 2),
            parent=PAGES[start - 1] if start and kind % 5 else b"",
            pages=join_hashes(PAGES[start : start + count % 9]),
            part=other % 5 - 1,
        )
        view.apply(wire.Entries(entries=(entry,)))
        for match in tree.match(PAGES):
            assert 0 < match.num_pages <= len(PAGES)
    view.forget()
    assert not tree._trie.root.children, "something stayed in the tree"


def pages(data: bytes) -> None:
    assert b"".join(wire.pages_of(data)) == data


def record(data: bytes) -> None:
    """Decode a record. The first bytes are the size of the rest. The checksum is mostly right,
    because the header is decoded only behind a right one."""
    size, header = int.from_bytes(data[:3], "little"), data[3:]
    head = header[1:] if header[:1] == b"\xff" else sealed(header)
    files.read_head(head, len(head) + size, FAMILY)


def sealed(header: bytes) -> bytes:
    """Put the right prefix in front of a header."""
    return files._PREFIX.pack(files._MAGIC, len(header), checksum(header)) + header


def entry_file(data: bytes) -> None:
    record = files.read_record(str(_file(data, "entry")), FAMILY)
    assert record is None or record[1] == len(data)


def public_key(data: bytes) -> None:
    keys.read_public_keys([str(_file(data))], field="allowed_peers")


def secret_key(data: bytes) -> None:
    keys.read_key_pair(str(_file(data)))


def profile(data: bytes) -> None:
    _use(read_profile(_file(data)))


def evidence(data: bytes) -> None:
    _use(read_measured(_file(data)))


def _use(profile: Any) -> None:
    assert profile.is_usable in (True, False)
    assert profile.transition_layers is not None
    assert profile.lossless is None or len(profile.lossless) >= 0


def serve_config(data: bytes) -> None:
    read_config(_file(data, "serve.yaml"))


memory_bytes()
"""This call comes before any input, because it imports torch: the default settings ask for the
machine's memory. Torch's own memory must not count as an input's."""


def settings(data: bytes) -> None:
    parse_settings({"config": str(_file(data, "settings.yaml"))})


def fleet(data: bytes) -> None:
    read_fleet(_file(data, "fleet.yaml"))


def address(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with suppress(ConfigError):
        assert parse_remote(text, field="peers").port
    parse_listen(text, field="listen", insecure=True)


def controls(data: bytes) -> None:
    try:
        content = msgspec.json.decode(data)
    except UNREADABLE:
        return  # The server reads the JSON.
    parse_controls({"droidspeak": content}).requested(4)


def safetensors(data: bytes) -> None:
    for tensor in read_tensors([_file(data, "model.safetensors")]).values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(data)


TARGETS = {
    "to_worker": Target(to_worker, (ProtocolError,), 0.18),
    "to_peer": Target(to_peer, (ProtocolError,), 0.17),
    "data_connection": Target(data_connection, (ProtocolError,), 0.01),
    "family": Target(family, (ProtocolError,), 0.09),
    "adverts": Target(adverts, (ProtocolError,), 0.01),
    "pages": Target(pages, (ProtocolError,), 0.11),
    "record": Target(record, (), 0.16),
    "entry_file": Target(entry_file, (), 0.04),
    "public_key": Target(public_key, (ConfigError,), 0.04),
    "secret_key": Target(secret_key, (ConfigError,), 0.04),
    "profile": Target(profile, (ProfileError,), 0.04),
    "evidence": Target(evidence, (ProfileError,), 0.03),
    "serve_config": Target(serve_config, (ConfigError,), 0.005),
    "settings": Target(settings, (ConfigError,), 0.004),
    "fleet": Target(fleet, (ConfigError,), 0.004),
    "address": Target(address, (ConfigError,), 0.027),
    "controls": Target(controls, (ValueError, CacheTreeError), 0.03),
    "safetensors": Target(safetensors, (ConfigError,), 0.01),
}
