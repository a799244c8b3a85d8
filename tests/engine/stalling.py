"""Workers that begin every fetch, and do not end it, or end it only when a test allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy
from engine_parts import page_hashes
from transport_parts import ScriptedWorker

from cachetree.checkpoint.family import Family
from cachetree.ids import KV, PAGE_HASH_BYTES, Part
from cachetree.transport import wire
from cachetree.transport.frames import Frame


class _OfferingWorker(ScriptedWorker):
    """A worker that offers prompts of a model of its own, with E at layer 1."""

    def __init__(self, family, model, prompts, listen="tcp://127.0.0.1:0"):
        self.model = model
        self._prompts = [page_hashes(tokens) for tokens in prompts]
        self._page_bytes = {"kv": family.kv_page_bytes, "e": family.e_page_bytes}
        super().__init__(
            lambda _self, identity, fetch: self._asked(identity, fetch), family, listen=listen
        )

    def send(self, identity: bytes, message: wire.ToPeer | bytes, *payload: bytes) -> None:
        if isinstance(message, wire.Synced):
            entries = tuple(
                wire.Entry(
                    added=True, model=self.model, part=part, parent=b"", pages=b"".join(pages)
                )
                for pages in self._prompts
                for part in (KV, Part(1))
            )
            super().send(identity, wire.Entries(entries=entries))
        super().send(identity, message, *payload)

    def _asked(self, identity: bytes, fetch: wire.Fetch) -> None:
        raise NotImplementedError

    def _send_step(self, identity: bytes, fetch: wire.Fetch, begins: int, payload: bytes) -> int:
        """Send the step that begins at this byte of the fetch. Return the byte at which the next
        step begins."""
        for offset in range(0, len(payload), fetch.frame_bytes):
            part = payload[offset : offset + fetch.frame_bytes]
            checksum = wire.checksum(part)
            frame = Frame(id=fetch.id, offset=begins + offset, size=len(part), checksum=checksum)
            super().send(identity, frame, part)
        return begins + len(payload)


class StallingWorker(_OfferingWorker):
    """A worker that sends zeros. It sends all of one prompt; of other fetches it leaves out the
    last steps."""

    def __init__(self, family, model, tokens, *, num_unsent=1, listen="tcp://127.0.0.1:0"):
        self.tokens = tokens
        self._num_unsent = num_unsent
        super().__init__(family, model, [tokens], listen)

    def _asked(self, identity: bytes, fetch: wire.Fetch) -> None:
        (pages,) = self._prompts
        begins = 0
        for kind, _layer in fetch.steps[: len(fetch.steps) - self._num_unsent]:
            payload = bytes(len(pages) * self._page_bytes[kind])
            begins = self._send_step(identity, fetch, begins, payload)


class GatedWorker(_OfferingWorker):
    """A worker that sends nothing of a fetch while its gate is shut. Once the gate is open, it
    sends everything in order.

    The gate is shut at first. KV and E are random numbers, different for each page and layer: a
    request that gets the KV of another answers differently.
    """

    def __init__(self, family: Family, model: str, prompts: Sequence[Sequence[int]]) -> None:
        self._is_open = threading.Event()
        self._held: list[tuple[bytes, wire.Fetch]] = []
        super().__init__(family, model, prompts)

    @property
    def num_held(self) -> int:
        """Fetches that wait for the gate."""
        return len(self._held)

    def open(self) -> None:
        self._is_open.set()

    def shut(self) -> None:
        self._is_open.clear()

    def turn(self) -> None:
        while self._held and self._is_open.is_set():
            identity, fetch = self._held[0]
            hashes = [
                fetch.pages[at : at + PAGE_HASH_BYTES]
                for at in range(0, len(fetch.pages), PAGE_HASH_BYTES)
            ]
            begins = 0
            for kind, layer in fetch.steps:
                payload = b"".join(self._content(page, kind, layer) for page in hashes)
                begins = self._send_step(identity, fetch, begins, payload)
            self._held.pop(0)

    def _asked(self, identity: bytes, fetch: wire.Fetch) -> None:
        self._held.append((identity, fetch))

    def _content(self, page: bytes, kind: str, layer: int) -> bytes:
        numbers = numpy.random.default_rng([*page, layer, *kind.encode()])
        floats = numbers.standard_normal(self._page_bytes[kind] // 4, dtype=numpy.float32)
        return floats.tobytes()
