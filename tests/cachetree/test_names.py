"""Names of models: a server gives them, and each reader cleans the names that it receives."""

from __future__ import annotations

import time

from transport_parts import FAMILY, eventually, new_tree, pages_of, store

from cachetree import Cache, CacheConfig, Location, ModelId, with_names
from cachetree.metrics import health_of
from cachetree.names import MAX_HEARD, MAX_NAME, ModelNames
from cachetree.transport import wire
from cachetree.transport.advertise import Advertiser, RemoteView

BASE, OTHER = ModelId("a" * 32), ModelId("b" * 32)
PAGES = pages_of(4)


def test_a_text_names_each_model_that_has_a_name():
    text = f"pages of {BASE}, none of {OTHER}, and not {BASE}c"
    assert with_names(text, {BASE: "base"}) == f"pages of base (aaaaaaaa), none of {OTHER}, " + (
        f"and not {BASE}c"
    )


def test_names_from_a_peer_are_cleaned_and_bounded_and_rename_nothing():
    names = ModelNames()
    names.hear(OTHER, "")
    assert not names.now
    names.hear(BASE, "\x1b[2Ja (b)\n" + 999 * "x")
    assert names.now[BASE] == ("__2Ja__b__" + 999 * "x")[:MAX_NAME]
    names.hear(BASE, "thief")
    assert "thief" not in names.now.values()
    names.call(BASE, "mine")
    names.hear(BASE, "thief")
    assert names.now == {BASE: "mine"}
    for number in range(MAX_HEARD + 5):
        names.hear(ModelId(f"{number:032x}"), "many")
    assert len(names.now) == MAX_HEARD


def test_a_supposed_name_gives_way_to_what_a_peer_or_this_server_says():
    names = ModelNames()
    names.call(BASE, "mine")
    names.suppose({BASE: "profile", OTHER: "profile"})
    assert names.now == {BASE: "mine", OTHER: "profile"}
    names.hear(OTHER, "other")
    names.hear(OTHER, "thief")
    names.suppose({OTHER: "profile"})
    assert names.now == {BASE: "mine", OTHER: "other"}


def test_an_advert_names_a_model_once():
    source, tree = new_tree(), new_tree()
    advertiser = Advertiser(source, 16, lambda: None, time.monotonic)
    view, adverts = RemoteView(tree, Location("tcp://worker:1")), []

    def tell() -> None:
        while (advert := advertiser.next()) is not None:
            adverts.append(advert)
            view.apply(advert)

    source.names.call(OTHER, "other")
    for model, stop in ((BASE, 1), (OTHER, 1), (BASE, 2)):
        source.names.call(BASE, "base")
        store(source, PAGES[stop - 1 : stop], PAGES[stop - 2] if stop > 1 else None, model=model)
        tell()
    assert [it.names for it in adverts if isinstance(it, wire.Entries)] == [
        {BASE: "base"},
        {OTHER: "other"},
        {},
    ]
    assert tree.names.now == {BASE: "base", OTHER: "other"}
    advertiser.close()


def test_a_name_goes_with_a_copy_and_on_to_the_workers_readers():
    def cache(**fields: object) -> Cache:
        return Cache(FAMILY, CacheConfig(host_bytes=1 << 20, **fields))  # type: ignore[arg-type]

    with cache() as sender, cache(keeps=(sender.address,)) as worker:
        assert worker.address is not None
        sender.names.call(BASE, "base")
        store(sender.tree, PAGES, model=BASE)
        eventually(lambda: worker.names.now == {BASE: "base"})
        eventually(lambda: worker.tree.num_pages == len(PAGES))
        sender.close()
        with cache(serves=False, peers=(worker.address,)) as reader:
            eventually(lambda: reader.names.now == {BASE: "base"})
            # Names come with the first advert, and the peer is ready only after the last.
            eventually(lambda: health_of(reader.status()).degraded == ())
            worker.close()
            since = f"worker {worker.address} is connecting: the peer is unreachable since "
            eventually(lambda: "".join(health_of(reader.status()).degraded).startswith(since))
