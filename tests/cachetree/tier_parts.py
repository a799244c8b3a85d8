"""Fetches from any location, and properties of every tier below memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from transport_parts import (
    E_LAYER,
    FAMILY,
    MODEL,
    PAGE_BYTES,
    check_content,
    eventually,
    pages_of,
    store,
)

from cachetree import (
    DISK,
    Cache,
    Deadline,
    DeadlineExceeded,
    Location,
    ModelId,
    PageHash,
    Plan,
    Span,
)

PROMPT_BYTES = 8 * 5 * PAGE_BYTES
"""Bytes of a prompt of eight pages: KV of four layers, E of one."""


def prompt(number: int, num_pages: int = 8) -> list[PageHash]:
    return pages_of(num_pages, f"{number} ")


def num_at(cache: Cache, pages: Sequence[PageHash], location: Location = DISK) -> int:
    """Number of leading pages that the location has."""
    return sum(it.num_pages for it in cache.match(pages) if it.location == location)


def num_e_at(cache: Cache, pages: Sequence[PageHash], location: Location = DISK) -> int:
    """Return how many leading pages the location has with KV and E."""
    matches = [it for it in cache.match(pages) if it.location == location]
    return sum(it.e_pages.get(E_LAYER, 0) for it in matches)


def store_and_wait(cache: Cache, pages: Sequence[PageHash], location: Location = DISK) -> None:
    """Store pages of a prompt. Wait until the location has them with their E, and until the thread
    that writes them no longer holds them in memory."""
    store(cache.tree, pages)
    eventually(lambda: num_e_at(cache, pages, location) == len(pages))
    eventually(lambda: not cache.tree.held_bytes)


def plan_of(location: Location, pages: Span) -> Plan:
    """Return a plan that fetches E of one layer, and KV of the three other layers."""
    return Plan(
        sender=MODEL,
        receiver=ModelId("receiver"),
        location=location,
        pages=pages,
        block=Span(E_LAYER, E_LAYER + 1),
        num_layers=FAMILY.num_layers,
    )


def fetch(cache, location, pages, span, seconds=10):
    """Fetch pages. Raises the error that ended the fetch."""
    staging = cache.fetch(plan_of(location, span), pages, Deadline.after(seconds))
    with staging:
        check_content(staging, pages[span.start : span.stop])


def fetch_too_late(cache, plan, pages, *, is_given_up):
    """Run a fetch from a slow place. One of its steps comes after its deadline, or after its reader
    has given up."""
    staging = cache.fetch(plan, pages, Deadline.after(0.1))
    assert staging is not None
    with staging:
        if is_given_up:
            time.sleep(0.05)
        else:
            with pytest.raises(DeadlineExceeded):
                staging.wait(staging.steps[0])
    eventually(lambda: cache.link(plan.location))
    link = cache.link(plan.location)
    assert link is not None and link.fixed_s + link.seconds(1 << 20) > 0.1
