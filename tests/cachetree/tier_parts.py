"""Fetches, wherever entries are, and what holds of every tier below memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from transport_parts import E_LAYER, FAMILY, MODEL, check_content, eventually

from cachetree import (
    Cache,
    Deadline,
    DeadlineExceeded,
    Location,
    ModelId,
    PageHash,
    Plan,
    Span,
)


def plan_of(location: Location, pages: Span) -> Plan:
    """E of one layer, and KV of the three others."""
    return Plan(
        sender=MODEL,
        receiver=ModelId("receiver"),
        location=location,
        pages=pages,
        block=Span(E_LAYER, E_LAYER + 1),
        num_layers=FAMILY.num_layers,
    )


def fetch(
    cache: Cache, location: Location, pages: Sequence[PageHash], span: Span, seconds: float = 10
) -> None:
    """Raises what ended the fetch."""
    staging = cache.fetch(plan_of(location, span), pages, Deadline.after(seconds))
    with staging:
        check_content(staging, pages[span.start : span.stop])


def fetch_too_late(
    cache: Cache, plan: Plan, pages: Sequence[PageHash], *, is_given_up: bool
) -> None:
    """A fetch of which a step takes longer than its deadline, or than its reader waits, shows that
    it comes from somewhere slow."""
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
