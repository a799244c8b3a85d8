"""Seals: a part that was changed, lost, repeated, swapped or moved is never opened."""

from __future__ import annotations

import random
import secrets

import msgspec
import pytest
from transport_parts import FAMILY

from cachetree import ProtocolError
from cachetree.transport import frames, wire
from cachetree.transport.frames import KEY_BYTES, PIECE_BYTES, Seals, Ticket, Unsealed, new_ticket

HEADER, PAYLOAD = b"header" * 9, memoryview(bytes(range(256)) * 40)


def pair_of() -> tuple[Seals, Seals]:
    key = secrets.token_bytes(KEY_BYTES)
    return Seals(key, is_worker=True), Seals(key, is_worker=False)


def sealed(seals: Seals, payload: memoryview = PAYLOAD) -> tuple[bytes, ...]:
    return (seals.seal(HEADER), *map(bytes, seals.seal_payload([payload])))


def opened(seals: Seals, *parts: bytes) -> list[bytes]:
    header, *pieces = map(memoryview, parts)
    plain = [bytes(seals.open(header))]
    for piece in pieces:
        into = memoryview(bytearray(max(0, piece.nbytes - seals.piece_tag_bytes)))
        seals.open_piece(piece, into)
        plain.append(bytes(into))
    return plain


def test_messages_of_both_directions_are_opened_in_order():
    worker, peer = pair_of()
    for _ in range(3):
        for sender, receiver in ((worker, peer), (peer, worker)):
            message = sealed(sender)
            assert HEADER not in message[0]
            assert bytes(PAYLOAD[:64]) not in message[1]
            assert opened(receiver, *message) == [HEADER, bytes(PAYLOAD)]
        assert opened(peer, worker.seal(b"")) == [b""]


def test_a_long_payload_goes_in_pieces():
    worker, peer = pair_of()
    payload = memoryview(bytes(range(256)) * (3 * PIECE_BYTES // 256 - 1))
    message = sealed(worker, payload)
    assert len(message) == 1 + 3
    assert b"".join(opened(peer, *message)[1:]) == payload
    worker, peer = pair_of()
    header, first, second, third = sealed(worker, payload)
    with pytest.raises(ProtocolError):
        opened(peer, header, second, first, third)


def test_any_bit_that_changes_is_noticed():
    chance = random.Random(5)
    for part in range(2):
        for _ in range(500):
            worker, peer = pair_of()
            message = [bytearray(part) for part in sealed(worker)]
            message[part][chance.randrange(len(message[part]))] ^= 1 << chance.randrange(8)
            with pytest.raises(ProtocolError):
                opened(peer, *map(bytes, message))


def test_each_message_is_opened_once_at_its_place_and_by_its_receiver():
    worker, peer = pair_of()
    first, second = (sealed(worker) for _ in range(2))
    stranger, _ = pair_of()
    for name, seals, message in (
        ("another key", stranger, first),
        ("reflected", worker, first),
        ("out of order", pair_like(peer), second),
        ("payload of another", pair_like(peer), (first[0], second[1])),
        ("payload as header", pair_like(peer), (first[1],)),
        ("header as payload", pair_like(peer), (first[0], first[0])),
        ("cut short", pair_like(peer), (first[0][:10],)),
        ("nothing", pair_like(peer), (b"",)),
    ):
        with pytest.raises(ProtocolError):
            opened(seals, *message)
            pytest.fail(name)
    assert opened(peer, *first) == [HEADER, bytes(PAYLOAD)]
    with pytest.raises(ProtocolError):  # Replayed.
        opened(peer, *first)


def pair_like(seals: Seals) -> Seals:
    """Return new seals, equal to `seals` before its first message."""
    fresh = type(seals)(bytes(32), is_worker=False)
    fresh._cipher = seals._cipher
    return fresh


def test_a_header_in_clear_that_is_lost_repeated_or_damaged_ends_what_follows():
    worker = Unsealed()
    first, second, third = (worker.seal(HEADER) for _ in range(3))
    for name, headers in (
        ("lost", (first, third)),
        ("repeated", (first, first)),
        ("in another order", (second, first)),
        ("damaged", (first[:-9] + b"?" + first[-8:],)),
        ("cut short", (first[:5],)),
    ):
        peer = Unsealed()
        with pytest.raises(ProtocolError):
            for header in headers:
                peer.open(memoryview(header))
            pytest.fail(name)
    peer = Unsealed()
    assert [peer.open(memoryview(it)) for it in (first, second, third)] == [HEADER] * 3


def test_no_nonce_comes_twice():
    nonces = {
        frames._nonce(number, by_worker=by_worker)
        for number in (0, 1, 255, 256, 1 << 40)
        for by_worker in (False, True)
    }
    assert len(nonces) == 5 * 2
    assert {len(it) for it in nonces} == {12}


def test_every_seal_takes_a_number_of_its_own():
    """Equal texts are never sealed to equal bytes: not as header or piece, and not by either
    side."""
    worker, peer = pair_of()
    text = memoryview(HEADER)
    made = [
        part
        for _ in range(50)
        for side in (worker, peer)
        for part in (side.seal(HEADER), *side.seal_payload([text]))
    ]
    assert len({bytes(it) for it in made}) == 200


def test_a_ticket_does_not_show_its_key():
    ticket = new_ticket(7)
    message = wire.hello(FAMILY, "m", 1, ticket=ticket)
    for shown in (repr(message), str(ticket), f"{ticket}"):
        assert repr(ticket.key)[2:-1] not in shown
        assert "port=7" in shown
    header = wire.encode(message)
    assert wire.decode_to_peer(memoryview(header)) == message
    others = {new_ticket(7) for _ in range(9)} | {ticket}
    assert len({it.key for it in others}) == len({it.token for it in others}) == 10


@pytest.mark.parametrize(
    "changed", [{"key": bytes(31)}, {"key": bytes(33)}, {"token": b""}, {"port": 0}]
)
def test_a_ticket_that_cannot_be_is_refused(changed):
    fields = msgspec.structs.asdict(new_ticket(7)) | changed
    body = msgspec.structs.asdict(wire.hello(FAMILY, "m", 1)) | {"ticket": fields}
    header = wire.with_checksum(msgspec.msgpack.encode({"type": "hello", **body}))
    with pytest.raises(ProtocolError):
        wire.decode_to_peer(memoryview(header))
    assert Ticket(**fields)  # type: ignore[arg-type]  # Only what comes from elsewhere is checked.
