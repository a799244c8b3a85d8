"""A meter may ask a device how long its passes took only in the thread of this device."""

from __future__ import annotations

import threading

import pytest
from virtual_cuda import VirtualCuda
from virtual_streams import Event

from cachetree.ids import Span
from cachetree.planning import PrefillCost
from sglang_droidspeak.cost import Meter


def test_another_thread_is_told_and_leaves_the_device_alone(monkeypatch):
    """The other thread is on the process's first device, which may belong to another server."""
    asking, query = [], Event.query

    def watched(event: Event) -> bool:
        asking.append(threading.current_thread().name)
        return query(event)

    monkeypatch.setattr(Event, "query", watched)
    costs: list[PrefillCost | None] = []
    with VirtualCuda():
        meter = Meter("cuda", 4, 96, PrefillCost(token_s=1.0, context_s=0.0))
        for _ in range(2):  # The first is over when the second is measured.
            with meter.forward([Span(0, 96)]):
                """The pass takes as long as a virtual device takes between two events."""
        other = threading.Thread(target=lambda: costs.append(meter.prefill), name="other")
        other.start()
        other.join()
    (cost,) = costs
    assert cost is not None and cost.seconds(0, 96) == pytest.approx(0.001, rel=0.01)
    assert asking and "other" not in asking
