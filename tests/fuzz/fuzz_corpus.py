"""The packed corpus: valid inputs of every target, and each input that once found a bug.

python tests/fuzz/fuzz_corpus.py               make the sound ones anew, keep the found ones
python tests/fuzz/fuzz_corpus.py add T FILE... keep what a driver found for target T
"""

from __future__ import annotations

import re
import struct
import sys
import tempfile
from pathlib import Path

import msgspec
from fuzz_targets import PAGES, TARGETS, sealed
from transport_parts import E_LAYER, FAMILY, MODEL

from cachetree import LOCAL, Match
from cachetree.disk import entry_file as files
from cachetree.ids import KV
from cachetree.memory.copying import checksum
from cachetree.memory.slab import Layout
from cachetree.transport import verbs, wire, write_key_pair
from cachetree.transport.frames import KEY_BYTES, MESSAGE, Frame, Seals, Unsealed, pack
from cachetree.tree import join_hashes

CORPUS = Path(__file__).with_name("corpus.msgpack")
ROOT = Path(__file__).resolve().parents[2]


class Corpus(msgspec.Struct, frozen=True):
    sound: dict[str, list[bytes]]
    found: dict[str, list[bytes]]

    def of(self, target: str) -> list[bytes]:
        return self.sound.get(target, []) + self.found.get(target, [])


def read_corpus() -> Corpus:
    return msgspec.msgpack.decode(CORPUS.read_bytes(), type=Corpus)


def _body(message: wire.ToWorker | wire.ToPeer) -> bytes:
    return wire.encode(message)[:-8]


def _messages() -> tuple[list[bytes], list[bytes]]:
    blob = join_hashes(PAGES)
    to_worker = [
        wire.hello(FAMILY, MODEL, 0),
        wire.Fetch(
            id=3,
            model=MODEL,
            pages=blob,
            steps=(("e", 2), ("kv", 0)),
            first_byte=5,
            frame_bytes=4096,
            timeout_ms=10,
        ),
        wire.Cancel(id=3),
        wire.Ping(),
        wire.Learned(),
        wire.Bye(reason="closing"),
        verbs.StatusRequest(),
        verbs.Find(pages=blob),
        verbs.Evict(model=MODEL, pages=blob[:32]),
        verbs.Pin(model="", pages=blob[:32], ttl_s=1.5),
        verbs.Unpin(model=MODEL, pages=blob[:32]),
    ]
    entries = (
        wire.Entry(added=True, model=MODEL, parent=b"", pages=blob, part=E_LAYER),
        wire.Entry(added=False, model=MODEL, parent=PAGES[0], pages=blob[16:32], part=KV),
    )
    to_peer = [
        wire.hello(FAMILY, MODEL, 1 << 60),
        wire.Reset(),
        wire.Entries(entries=entries),
        wire.Synced(),
        wire.Located(frame=Frame(id=3, offset=0, size=9, checksum=1), places=((0, 4), (8, 13))),
        wire.Ended(id=3, error="stale", reason="gone"),
        wire.Pong(),
        wire.Bye(reason="closing"),
        verbs.Found(holdings=(Match(model=MODEL, location=LOCAL, num_pages=2, e_pages={2: 1}),)),
        verbs.Pinned(pages_by_model={MODEL: 2}),
        verbs.Denied(reason="no"),
    ]
    raw = [b"\xff" + wire.encode(wire.Ping())]
    return [_body(it) for it in to_worker] + raw, [_body(it) for it in to_peer]


def _record() -> tuple[bytes, bytes]:
    """Return a header, followed by checksums and a payload of zeros."""
    layout = Layout.of(FAMILY, 2, KV)
    record = files.Record(
        family=FAMILY.digest,
        model=MODEL,
        num_before=1,
        parent=PAGES[0],
        part=KV,
        pages=tuple(PAGES[1:3]),
    )
    rest = bytes(files._checksums_bytes(layout) + layout.num_bytes)
    return files.head_of(record)[files._PREFIX.size :], rest


def _records() -> list[bytes]:
    """Return the inputs of target `record`: the size of the rest of the file, then a header."""
    header, rest = _record()
    size = len(rest).to_bytes(3, "little")
    deep = b"\x81\xa1x" + b"\x91" * 5000
    return [size + header, size + b"\xff" + sealed(header), bytes(3) + deep]


def _frames() -> list[bytes]:
    """Return a message and a frame, both in clear and sealed, and then frames that the target seals
    itself."""
    message, payload = wire.encode(wire.Pong()), bytes(2048)
    inputs = []
    for number, seals in enumerate((Unsealed(), Seals(bytes(KEY_BYTES), is_worker=True))):
        parts = [bytes([number, 0])]
        for id, body in ((MESSAGE, message), (1, payload), (1, payload)):
            offset = 2048 * (len(parts) > 3)
            frame = Frame(id=id, offset=offset, size=len(body), checksum=checksum(body))
            parts += [seals.seal(pack(frame)), *map(bytes, seals.seal_payload([memoryview(body)]))]
        inputs.append(b"".join(parts))
    fields = struct.pack("<QQQI", 1, 0, 0, 4)
    return [*inputs, *(bytes([number, 1]) + fields + b"body" for number in range(2))]


def _sound() -> dict[str, list[bytes]]:
    to_worker, to_peer = _messages()
    with tempfile.TemporaryDirectory() as folder:
        _, secret, public = write_key_pair(Path(folder), "fuzz")
        secret_text, public_text = secret.read_bytes(), public.read_bytes()
    # Nobody's key: the form of a secret one, with content that is plainly none.
    secret_text = re.sub(rb"[0-9a-f]{64}", b"11" * 32, secret_text)
    made = (ROOT / "examples/pairs/sender_to_receiver.json").read_bytes()
    family_yaml = b"".join(
        f"  {name}: {msgspec.json.encode(value).decode()}\n".encode()
        for name, value in msgspec.structs.asdict(FAMILY).items()
    )
    tensor = msgspec.json.encode({"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}})
    deep = b"[" * 1000
    return {
        "to_worker": [*to_worker, b"\x91" * 5000],
        "to_peer": [*to_peer, b"\x91" * 5000],
        "data_connection": _frames(),
        "family": [msgspec.msgpack.encode(FAMILY), b"\x81\xa1x" + b"\x91" * 5000],
        "adverts": [b"\4\0\7\0\1\1\0\0", bytes(range(64)), b"\0"],
        "pages": [join_hashes(PAGES), b"short"],
        "record": _records(),
        "entry_file": [sealed(_record()[0]) + _record()[1]],
        "public_key": [public_text],
        "secret_key": [secret_text],
        "profile": [made, b'{"x":' + deep, b'{"version":5,"\xff":1}'],
        "evidence": [made],
        "serve_config": [
            b"family:\n"
            + family_yaml
            + b"cache:\n  host_bytes: 1\n  worker: {listen: tcp://127.0.0.1:0}\n",
            b"family: {model: /nowhere, kv_dtype: float16, page_size: 16}\n",
            b"? 2001-99-99\n",
            b"\xff",
            deep,
        ],
        "settings": [
            (ROOT / "examples/receiver.yaml").read_bytes(),
            b"peers: [tcp://127.0.0.1:1]\ndisk_path: x\ndisk_gb: 1\n",
            b"when: 2001-99-99\n",
            b"\xff",
            deep,
        ],
        "fleet": [
            b"engines: {e: {model-path: x, port: 1}}\n",
            b"workers: {w: {}}\nengines: {e: {model-path: x, port: 1}}\n",
            b"engines: {e: {model-path: x, port: []}}\n",
            b"\xff",
            deep,
        ],
        "address": [b"tcp://127.0.0.1:7788", b"tcp://[::1]:0", b"tcp://*:1", b"tcp://a:99999"],
        "controls": [b'{"block":"1:3"}', b'{"block":"\xc2\xb2:3"}', deep],
        "safetensors": [len(tensor).to_bytes(8, "little") + tensor + bytes(4)],
    }


def main(arguments: list[str]) -> None:
    by_target = dict(read_corpus().found) if CORPUS.exists() else {}
    if arguments:
        _, target, *files = arguments
        assert target in TARGETS, target
        by_target[target] = [
            *by_target.get(target, []),
            *(Path(file).read_bytes() for file in files),
        ]
    CORPUS.write_bytes(msgspec.msgpack.encode(Corpus(_sound(), by_target)))
    print(f"{CORPUS}: {CORPUS.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
