"""If a thread of the server ends with an error, each waiting caller gets the error at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from hicache_parts import Shelf, cache_over, tier_of
from tier_parts import prompt
from transport_parts import MODEL, eventually, new_staging

from sglang_droidspeak.hicache.lane import MAX_FAILURES
from sglang_droidspeak.store import insertions
from sglang_droidspeak.store.insertions import Offloader


def test_a_flush_does_not_wait_for_an_offloader_that_died(monkeypatch):
    monkeypatch.setattr(insertions, "lower_priority", lambda: 1 / 0)
    pool: Any = SimpleNamespace(e_pool=SimpleNamespace(valid=torch.zeros(1)))
    offloader = Offloader(MagicMock(), pool, None)
    assert all(offloader.put(None) for _ in range(3))
    flush = threading.Thread(target=offloader.reset, daemon=True)
    flush.start()
    flush.join(10)
    assert not flush.is_alive()
    assert (offloader.num_done, offloader.num_results) == (3, 0)
    offloader.close()


def test_hicache_threads_that_died_answer_at_once(monkeypatch):
    """No deadline passes in this test."""
    with cache_over(Shelf(), clock=lambda: 0.0) as cache:
        tier, pages = tier_of(cache), prompt(1)
        monkeypatch.setattr(tier, "_find", lambda *_: 1 / 0)
        monkeypatch.setattr(tier, "_note_speed", lambda *_: 1 / 0)
        with monkeypatch.context() as failing:
            failing.setattr(tier._reading, "fail", lambda *_: 1 / 0)
            first = tier.search(pages)
            eventually(lambda: first.is_over)
        second = tier.search(pages)
        eventually(lambda: second.is_over)
        for _ in range(MAX_FAILURES + 1):
            staging = new_staging(len(pages), 60.0)
            tier.fetch(MODEL, pages, staging)
            eventually(lambda it=staging: it.error is not None)
        eventually(lambda: tier.is_paused)
