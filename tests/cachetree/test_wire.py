"""Messages, sizes, addresses, settings and rates: all parts of the transport that need no
socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from transport_parts import FAMILY, pages_of
from tree_parts import FakeTime

from cachetree import Family
from cachetree.errors import Cancelled, ConfigError, ProtocolError
from cachetree.ids import KV, Kind, ModelId, Part, Step
from cachetree.planning import Link
from cachetree.transport import PeerConfig, WorkerConfig, advertise, verbs, wire
from cachetree.transport.address import Address, parse_listen, parse_remote, resolved
from cachetree.transport.frames import Frame
from cachetree.transport.pace import Bandwidth, Cap
from cachetree.tree import Change, join_hashes

FETCH = wire.Fetch(
    id=3,
    model="m",
    pages=b"x" * 32,
    steps=(("e", 2), ("kv", 0)),
    frame_bytes=1 << 20,
    timeout_ms=100,
)


@pytest.mark.parametrize(
    "message",
    [
        wire.hello(FAMILY, "m", 0),
        wire.Learned(),
        FETCH,
        wire.Cancel(id=3),
        wire.Ping(),
        wire.Bye(reason="done"),
        verbs.StatusRequest(),
    ],
)
def test_messages_to_a_worker_survive_the_wire(message):
    assert wire.decode_to_worker(memoryview(wire.encode(message))) == message


def test_a_hello_carries_the_family():
    received = wire.decode_to_peer(memoryview(wire.encode(wire.hello(FAMILY, "m", 5))))
    assert isinstance(received, wire.Hello)
    assert wire.family_of(received) == FAMILY
    assert (received.model, received.epoch) == ("m", 5)


def test_another_version_is_refused_before_its_family_is_read():
    later = wire.PROTOCOL_VERSION + 1
    strange = wire.Hello(version=later, family=msgspec.Raw(msgspec.msgpack.encode(["?"])))
    with pytest.raises(ProtocolError, match=f"version is {later} there and {later - 1} here"):
        wire.family_of(strange)


def test_unknown_fields_are_ignored_and_unknown_tags_are_not():
    newer = wire.with_checksum(
        msgspec.msgpack.encode({"type": "cancel", "id": 4, "since": "version 9"})
    )
    assert wire.decode_to_worker(memoryview(newer)) == wire.Cancel(id=4)
    with pytest.raises(ProtocolError, match="teleport"):
        wire.decode_to_worker(
            memoryview(wire.with_checksum(msgspec.msgpack.encode({"type": "teleport"})))
        )


def test_a_worker_does_not_accept_what_only_a_worker_says():
    with pytest.raises(ProtocolError):
        wire.decode_to_worker(memoryview(wire.encode(wire.Pong())))


@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_protocol_errors(noise):
    for decode in (wire.decode_to_worker, wire.decode_to_peer):
        for header in (noise, wire.with_checksum(noise)):
            with contextlib.suppress(ProtocolError):
                decode(memoryview(header))


def test_headers_are_capped_both_ways():
    with pytest.raises(ProtocolError, match="exceeds"):
        wire.encode(msgspec.structs.replace(FETCH, pages=bytes(wire.MAX_MESSAGE_BYTES)))
    with pytest.raises(ProtocolError, match="exceeds"):
        wire.decode_to_peer(memoryview(bytes(wire.MAX_MESSAGE_BYTES + 1)))


def lists_without_a_cap(of: inspect.Type, path: str) -> Iterator[str]:
    """Return the fields of a message by which one side could make the other side allocate without a
    limit."""
    match of:
        case inspect.UnionType(types=types):
            for each in types:
                yield from lists_without_a_cap(each, path)
        case inspect.StructType(cls=kind, fields=fields):
            for field in fields:
                yield from lists_without_a_cap(field.type, f"{kind.__name__}.{field.encode_name}")
        case inspect.TupleType(item_types=items):
            for each in items:
                yield from lists_without_a_cap(each, path)
        case inspect.VarTupleType() | inspect.DictType() as many:
            if many.max_length is None:
                yield path
            item = many.value_type if isinstance(many, inspect.DictType) else many.item_type
            yield from lists_without_a_cap(item, path)
        case inspect.CollectionType():
            yield path


def test_every_list_of_a_message_has_a_longest_form():
    for kinds in (wire.ToWorker, wire.ToPeer, Family):
        assert not list(lists_without_a_cap(inspect.type_info(kinds), ""))


def test_a_list_that_is_too_long_is_not_read():
    asked = msgspec.structs.replace(FETCH, steps=(("kv", 0),) * 100_000)
    with pytest.raises(ProtocolError, match=r"length <= \d+ - at `\$\.steps`"):
        wire.decode_to_worker(memoryview(wire.encode(asked)))
    frame = Frame(id=1, offset=0, size=1, checksum=0)
    located = wire.Located(frame=frame, places=((0, 1),) * 1000)
    with pytest.raises(ProtocolError, match=r"length <= \d+ - at `\$\.places`"):
        wire.decode_to_peer(memoryview(wire.encode(located)))


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "message",
    [
        wire.hello(FAMILY, LONG, 1),
        wire.Bye(reason=LONG),
        wire.Ended(id=1, error="failed", reason=LONG),
        verbs.Denied(reason=LONG),
    ],
)
def test_words_that_are_too_many_are_not_read(message):
    with pytest.raises(ProtocolError, match=r"length <= \d+"):
        wire.decode_to_peer(memoryview(wire.encode(message)))


def test_words_that_are_no_message_are_told_in_short():
    named = wire.with_checksum(msgspec.msgpack.encode({"type": LONG}))
    family = msgspec.Raw(msgspec.msgpack.encode({"codec": LONG}))
    with pytest.raises(ProtocolError, match=r"cannot be read: .{1,500}$"):
        wire.decode_to_worker(memoryview(named))
    with pytest.raises(ProtocolError, match=r"cannot be read: .{1,500}$"):
        wire.family_of(wire.Hello(version=wire.PROTOCOL_VERSION, family=family))


def test_pages_are_whole():
    pages = pages_of(3)
    assert list(wire.pages_of(join_hashes(pages))) == pages
    with pytest.raises(ProtocolError, match="whole number"):
        wire.pages_of(b"x" * 17)


def test_steps_are_checked():
    assert wire.steps_of(FETCH, 4) == (Step(Kind.E, 2), Step(Kind.KV, 0))
    for steps in ((("e", 4),), (("kv", -1),), (("kv", 1), ("kv", 1))):
        with pytest.raises(ProtocolError):
            wire.steps_of(msgspec.structs.replace(FETCH, steps=steps), 4)
    strange = msgspec.structs.replace(FETCH, steps=(("q", 1),))
    with pytest.raises(ProtocolError, match=r"'q' - at `\$\.steps"):
        wire.decode_to_worker(memoryview(wire.encode(strange)))


def test_a_long_change_is_cut_into_entries_that_follow_each_other():
    pages = pages_of(2 * advertise.ENTRY_PAGES + 5)
    parent = pages_of(1, "root")[0]
    change = Change(added=True, model=ModelId("m"), parent=parent, pages=tuple(pages), part=Part(1))
    entries = list(advertise.entries_of(change))
    assert b"".join(entry.pages for entry in entries) == b"".join(pages)
    assert [entry.parent for entry in entries] == [
        parent,
        pages[advertise.ENTRY_PAGES - 1],
        pages[2 * advertise.ENTRY_PAGES - 1],
    ]
    removed = list(advertise.entries_of(msgspec.structs.replace(change, added=False)))
    assert [entry.pages for entry in removed] == [entry.pages for entry in reversed(entries)]


def test_entries_are_packed_in_order_into_small_messages():
    entries = [
        wire.Entry(added=True, model="m" * 32, parent=b"", pages=page * 40, part=KV)
        for page in pages_of(500)
    ]
    groups = list(advertise.pack(entries))
    assert [entry for group in groups for entry in group] == entries
    sizes = [len(wire.encode(wire.Entries(entries=group))) for group in groups]
    assert max(sizes) < 64 << 10
    assert len(groups) < 20
    small = [msgspec.structs.replace(entry, pages=entry.pages[:16]) for entry in entries]
    assert max(map(len, advertise.pack(small))) <= wire.MAX_ENTRIES


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("localhost", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("http://127.0.0.1:1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "tcp://HOST:PORT"),
        ("tcp://me@127.0.0.1:1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:1#x", "tcp://HOST:PORT"),
        ("tcp://a..b:1", "tcp://HOST:PORT"),
        (f"tcp://{64 * 'x'}:1", "tcp://HOST:PORT"),
        ("tcp://0.0.0.0:7788", "insecure: true"),
        ("tcp://*:7788", "insecure: true"),
        ("tcp://worker-3:7788", "insecure: true"),
    ],
)
def test_bad_listen_addresses_name_field_value_and_remedy(value, remedy):
    with pytest.raises(ConfigError) as caught:
        parse_listen(value, field="listen", insecure=False)
    for part in ("listen", repr(value), remedy):
        assert part in str(caught.value)


def test_good_addresses():
    for value in ("tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"):
        assert parse_listen(value, field="listen", insecure=False).is_loopback
    assert parse_listen("tcp://*:7788", field="listen", insecure=True).url == "tcp://*:7788"
    assert parse_remote("tcp://worker-3:7788", field="peer").url == "tcp://worker-3:7788"
    with pytest.raises(ConfigError, match="names no single worker"):
        parse_remote("tcp://127.0.0.1:0", field="peer")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [(["fd00::3"], "fd00::3"), (["fd00::3", "10.0.0.3", "10.0.0.2"], "10.0.0.3")],
)
def test_a_name_may_have_an_ipv6_address_alone(hosts, first, monkeypatch):
    """A host with IPv4 and IPv6 addresses may listen only at the IPv4 one, so that one is
    preferred."""

    def look_up(name: str, port: int, family: int, kind: int) -> list[tuple[object, ...]]:
        every = [(socket.AF_INET6 if ":" in it else socket.AF_INET, it) for it in hosts]
        return [(at, kind, 6, "", (it, port)) for at, it in every if family in (0, at)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert resolved(Address("worker-3", 7788)) == Address(first, 7788)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_bytes_per_s is 0"):
        WorkerConfig(max_bytes_per_s=0)
    with pytest.raises(msgspec.ValidationError, match=r"length <= 128 - at `\$\.model`"):
        msgspec.convert({"model": LONG}, WorkerConfig)
    with pytest.raises(ConfigError, match="frame_bytes is 1"):
        PeerConfig(frame_bytes=1)
    with pytest.raises(ConfigError, match="silence_s"):
        PeerConfig(silence_s=1.0, heartbeat_s=0.9)
    with pytest.raises(msgspec.ValidationError, match="fram_bytes"):
        msgspec.json.decode(b'{"fram_bytes": 1}', type=PeerConfig)


def burst_of(cap: Cap) -> int:
    num = 0
    while not cap.delay_s():
        cap.spend(200_000)
        num += 1
    return num


def test_a_cap_holds_and_unused_time_is_not_saved():
    clock = FakeTime()
    cap = Cap(20e6, clock)
    assert cap.limit(1 << 20) == 200_000  # 10 ms
    sent = 0
    while clock.now_s < 1.0:
        if not cap.delay_s():
            cap.spend(200_000)
            sent += 200_000
        clock.now_s += 0.0013
    assert 19.5e6 <= sent <= 20.5e6

    clock.now_s += 60
    cap.idle()
    assert burst_of(cap) == 1


def test_a_busy_link_catches_up_a_little():
    clock = FakeTime()
    clock.now_s = 100.0
    cap = Cap(20e6, clock)
    cap.spend(200_000)
    clock.now_s += 1.0  # The thread was not scheduled.
    assert burst_of(cap) == 5  # 50 ms


def test_one_stalled_fetch_says_nothing_of_the_link_and_two_do():
    clock, mb = FakeTime(), 1 << 20
    bandwidth = Bandwidth(clock)
    assert bandwidth.bytes_per_s is None
    assert bandwidth.link is None
    for _ in range(4):
        bandwidth.sample(10 * mb, 1.0)
    bandwidth.sample(mb, 1.0)
    assert bandwidth.bytes_per_s == pytest.approx(10 * mb)
    for _ in range(2):
        bandwidth.sample(mb, 1.0)
    assert bandwidth.bytes_per_s == pytest.approx(mb)


def test_late_bytes_count_at_most_as_a_sample():
    bandwidth = Bandwidth(FakeTime())
    bandwidth.sample(0, 0.5)
    assert bandwidth.bytes_per_s == pytest.approx(2 * Bandwidth.MIN_SAMPLE_BYTES)


def test_a_link_that_is_avoided_is_tried_again_in_the_end():
    clock, mb = FakeTime(), 1 << 20
    bandwidth = Bandwidth(clock)
    bandwidth.sample(mb, 1.0)
    began_s = clock.now_s
    weekend_s, most = 3 * 86_400, mb << 20
    for age_s, rate in ((0, mb), (59, mb), (120, 2 * mb), (300, 16 * mb), (weekend_s, most)):
        clock.now_s = began_s + age_s
        assert bandwidth.link.byte_s == pytest.approx(1 / rate)
        assert (bandwidth.bytes_per_s is None) == (age_s > 60), "only what is new is told"


@pytest.mark.parametrize("trip_s", [0.0, 0.0004, 0.05])
def test_a_round_trip_is_told_from_the_rate(trip_s):
    """One fetch in ten is delayed, and every measured time is some per cent off."""
    random, mb = Random(1), 1 << 20
    bandwidth = Bandwidth(FakeTime())
    for turn in range(60):
        num_mb = random.choice((1, 2, 4, 20, 400))
        taken_s = trip_s + num_mb * 1e-4 * random.lognormvariate(0.0, 0.03)
        bandwidth.sample(num_mb * mb, taken_s * (10 if turn % 10 == 3 else 1))
    link = bandwidth.link
    assert link.fixed_s == pytest.approx(trip_s, rel=0.05, abs=3e-5)
    assert link.byte_s * mb == pytest.approx(1e-4, rel=0.15)


def test_one_length_of_fetches_tells_no_round_trip():
    bandwidth, mb = Bandwidth(FakeTime()), 1 << 20
    for _ in range(4):
        bandwidth.sample(4 * mb, 0.004)
    assert bandwidth.link == Link(byte_s=0.001 / mb, fixed_s=Bandwidth._TRIP_S)


@pytest.mark.parametrize("num_short", [0, 1, 3])
def test_one_fetch_that_stalled_before_its_first_byte_moves_neither_delay_nor_rate(num_short):
    """Both are estimated from the last fetches. After more fetches, the stalled one is still among
    them, and the short ones before it are not."""
    bandwidth, mb = Bandwidth(FakeTime()), 1 << 20
    for num_mb in [100] * 14 + [1] * num_short:
        bandwidth.note(num_mb * mb, 0.0005 + num_mb * 0.001, None)
    bandwidth.note(0, 0.8, Cancelled("its reader left"))
    for _ in range(15):
        assert bandwidth.link.fixed_s < 0.005
        assert bandwidth.link.byte_s * mb == pytest.approx(0.001, rel=0.1)
        bandwidth.note(100 * mb, 0.1005, None)


@pytest.mark.parametrize(("trip_s", "mb_s"), [(0.05, 1000), (0.0005, 5)])
def test_fetches_given_up_before_anything_was_due_say_nothing(trip_s, mb_s):
    """The worker may be far away, or slow. After ten minutes it is assumed to have recovered, and
    bytes are due earlier."""
    clock, mb = FakeTime(), 1 << 20
    bandwidth = Bandwidth(clock)
    for num_mb in (1, 100, 1, 100):
        bandwidth.note(num_mb * mb, trip_s + num_mb / mb_s, None)
    known = bandwidth.link
    for _ in range(2):
        bandwidth.note(0, 0.02, Cancelled("its reader left"))
    assert bandwidth.link == known
    clock.now_s += 600.0
    believed = bandwidth.link
    bandwidth.note(0, 0.02, Cancelled("its reader left"))
    assert bandwidth.link.byte_s > believed.byte_s


def test_a_round_trip_that_was_long_is_believed_to_have_recovered():
    clock, mb = FakeTime(), 1 << 20
    bandwidth = Bandwidth(clock)
    for num_mb in (1, 100, 1, 100):
        bandwidth.sample(num_mb * mb, 0.02 + num_mb * 1e-3)
    clock.now_s += 120.0
    link = bandwidth.link
    assert (link.fixed_s, link.byte_s * mb) == (pytest.approx(0.01), pytest.approx(0.0005))


def test_predictions_that_were_too_short_make_a_margin():
    bandwidth, mb = Bandwidth(FakeTime()), 1 << 20
    for turn in range(40):
        bandwidth.sample(mb, 1.3 if turn % 5 == 4 else 1.0)
    assert bandwidth.link.margin == pytest.approx(1.3)


def test_a_fetch_waits_for_as_much_of_every_other():
    link = Link(byte_s=0.1, backlog=[5, 100])
    assert link.seconds(20) == pytest.approx(0.1 * (20 + 5 + 20))
    assert link.seconds(3) == pytest.approx(0.1 * 9)


def test_a_fetch_waits_for_all_that_comes_first():
    link = Link(byte_s=0.1, backlog=[5, 100], ahead=50)
    assert link.seconds(3) == pytest.approx(0.1 * (9 + 50))
    assert link.seconds(0) == 0.0, "who fetches nothing waits for nothing"
