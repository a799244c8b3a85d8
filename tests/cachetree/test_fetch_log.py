"""One log line for each fetch, and counts by outcome."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace

import pytest
from test_cache import FETCH_BYTES, PAGES, cache_of, fails, fill, plan_at
from transport_parts import FAMILY, MODEL, PAGE_BYTES, wait_all

from cachetree import LOCAL, Cache, Deadline, Location, ModelId, Span


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    lines = [record.getMessage() for record in caplog.records if record.name == "cachetree.fetch"]
    return [dict(field.split("=", 1) for field in shlex.split(line)) for line in lines]


def fetch(cache: Cache, location: Location, pages: Span = Span(0, 64)) -> None:  # noqa: B008
    staging = cache.fetch(plan_at(location, pages), PAGES, Deadline.after(5))
    with staging:
        wait_all(staging)
    staging.release()


def test_a_fetch_is_one_line_of_fields(caplog):
    caplog.set_level(logging.INFO, "cachetree.fetch")
    with cache_of() as sender:
        fill(sender, PAGES)
        assert sender.address
        with cache_of(peers=(sender.address,), serves=False) as receiver:
            assert receiver.wait_ready(20)
            receiver.names.call(MODEL, "base")
            fetch(receiver, sender.address, Span(4, 20))
            (counts,) = receiver.status().fetches
    (line,) = fields(caplog)
    assert line.keys() == {
        *("outcome", "model", "name", "location", "tokens", "pages"),
        *("layers", "bytes", "seconds", "gb_s"),
    }
    assert line["outcome"] == "ok"
    assert (line["model"], line["name"]) == (MODEL, "base")
    assert line["location"] == sender.address
    assert (line["pages"], line["tokens"]) == ("16", str(16 * FAMILY.page_size))
    assert (line["layers"], line["bytes"]) == ("4", str(16 * 4 * PAGE_BYTES))
    seconds = float(line["seconds"])
    assert 0 < seconds < 5
    assert float(line["gb_s"]) == pytest.approx(16 * 4 * PAGE_BYTES / seconds / 1e9, abs=2e-3)
    assert (counts.location, counts.num_bytes) == (sender.address, 16 * 4 * PAGE_BYTES)
    assert counts.outcomes == {"ok": 1}


def test_a_fetch_that_ended_early_says_why(caplog):
    caplog.set_level(logging.INFO, "cachetree.fetch")
    with cache_of(serves=False) as cache:
        fails(cache, plan_at(LOCAL))
        fails(cache, plan_at(Location("tcp://127.0.0.1:9")))
        fill(cache, PAGES)
        fails(cache, plan_at(LOCAL), seconds=0)
        fetch(cache, LOCAL)
        counted = {counts.location: counts for counts in cache.status().fetches}
    stale, elsewhere, late, done = fields(caplog)
    assert stale["outcome"] == "StaleEntry"
    assert "no longer here" in stale["cause"]
    assert "is not a peer" in elsewhere["cause"]
    assert late["outcome"] == "DeadlineExceeded"
    assert done["outcome"] == "ok"
    assert counted[LOCAL].outcomes == {"StaleEntry": 1, "DeadlineExceeded": 1, "ok": 1}
    assert counted[LOCAL].num_bytes == FETCH_BYTES


def test_a_model_of_a_peers_own_choice_begins_no_line(caplog):
    caplog.set_level(logging.INFO, "cachetree.fetch")
    with cache_of(serves=False) as cache:
        fails(cache, replace(plan_at(LOCAL), sender=ModelId("a\noutcome=ok")))
    (line,) = (it.getMessage() for it in caplog.records if it.name == "cachetree.fetch")
    assert line.isprintable()


def test_a_line_costs_nothing_where_nobody_listens(caplog):
    caplog.set_level(logging.WARNING, "cachetree.fetch")
    with cache_of(serves=False) as cache:
        fill(cache, PAGES)
        fetch(cache, LOCAL)
        assert cache.status().fetches[0].outcomes == {"ok": 1}
    assert not fields(caplog)
