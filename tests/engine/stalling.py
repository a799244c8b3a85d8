"""A worker that begins every fetch and does not end it."""

from __future__ import annotations

from engine_parts import page_hashes
from transport_parts import ScriptedWorker

from cachetree.checkpoint.family import Family
from cachetree.transport import wire
from cachetree.transport.frames import Frame


class StallingWorker(ScriptedWorker):
    """Offers one prompt of a model of its own; sends everything but the last steps of a fetch."""

    def __init__(
        self,
        family: Family,
        model: str,
        tokens: list[int],
        *,
        num_unsent: int = 1,
        listen: str = "tcp://127.0.0.1:0",
    ) -> None:
        self.model = model
        self.tokens = tokens
        self._pages = page_hashes(tokens)
        self._sizes = {
            kind: len(self._pages) * size
            for kind, size in (("kv", family.kv_page_bytes), ("e", family.e_page_bytes))
        }
        self._num_unsent = num_unsent
        super().__init__(
            lambda _self, identity, fetch: self._stream(identity, fetch), family, listen=listen
        )

    def send(self, identity: bytes, message: wire.ToPeer | bytes, *payload: bytes) -> None:
        if isinstance(message, wire.Synced):
            entry = wire.Entry(
                added=True,
                model=self.model,
                parent=b"",
                pages=b"".join(self._pages),
                e_layers=(1,),
            )
            super().send(identity, wire.Entries(seq=1, entries=(entry,)))
            message = wire.Synced(seq=1)
        super().send(identity, message, *payload)

    def _stream(self, identity: bytes, fetch: wire.Fetch) -> None:
        for index, (kind, _layer) in enumerate(fetch.steps[: len(fetch.steps) - self._num_unsent]):
            payload = bytes(self._sizes[kind])
            for offset in range(0, len(payload), fetch.frame_bytes):
                part = payload[offset : offset + fetch.frame_bytes]
                frame = Frame(
                    id=fetch.id,
                    step=index,
                    offset=offset,
                    size=len(part),
                    checksum=wire.checksum(part),
                )
                super().send(identity, frame, part)
