"""A peer that never confirms what it has learned costs its worker neither memory nor time."""

from __future__ import annotations

from transport_parts import new_tree, pages_of, store

from cachetree.transport import wire
from cachetree.transport.advertise import MAX_UNANSWERED, MUTE_S, Advertiser
from cachetree.tree import CacheTree


def told(advertiser: Advertiser) -> int:
    """Return how many `Entries` the advertiser sends now."""
    adverts = iter(advertiser.next, None)
    return sum(isinstance(it, wire.Entries) for it in adverts)


def test_mute_peer_is_told_no_more_until_it_answers():
    tree, num_told = new_tree(), 0
    advertiser = Advertiser(tree, 16, lambda: None, lambda: 0.0)
    for number in range(2 * MAX_UNANSWERED):
        store(tree, pages_of(1, f"{number} "))
        num_told += told(advertiser)
    assert num_told == MAX_UNANSWERED
    num_answers = 0
    while num_told:
        for _ in range(num_told):
            advertiser.learned()
        num_answers += num_told
        num_told = told(advertiser)
    assert num_answers > MAX_UNANSWERED, "what waited was not told"
    assert advertiser.knowing()()


def stored(tree: CacheTree, advertiser: Advertiser, name: str) -> None:
    store(tree, pages_of(1, name))
    told(advertiser)


def test_wait_for_a_mute_peer_is_short():
    now = [100.0]
    tree = new_tree()
    advertiser = Advertiser(tree, 16, lambda: None, lambda: now[0])
    told(advertiser)
    stored(tree, advertiser, "one ")
    knows = advertiser.knowing()
    assert not knows()
    now[0] += MUTE_S / 2
    stored(tree, advertiser, "two ")
    assert not knows()
    now[0] += MUTE_S / 2 + 0.1
    assert knows()
    assert advertiser.knowing()(), "the next request waits again"
    advertiser.learned()
    assert not advertiser.knowing()(), "it answers again, and does not know of the second"
    advertiser.learned()
    now[0] += 10 * MUTE_S
    stored(tree, advertiser, "three ")
    assert not advertiser.knowing()()
