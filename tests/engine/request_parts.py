"""Requests that have come as far as a test needs, through the phases before."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from cachetree.ids import Span
from cachetree.planning import Patience
from cachetree.planning.plan import Plan
from sglang_droidspeak.request.planner import Planned
from sglang_droidspeak.request.request import Phase, Request
from sglang_droidspeak.request.source import Source


def planned_as(plan: Plan, **others: Any) -> Planned:
    """Asked for by name; it leaves what others may read."""
    fixed = {
        "is_experiment": False,
        "patience": Patience(saving_s=math.inf),
        "step_share": 0.0,
    }
    return Planned(plan=plan, **fixed | others)


def loading(plan: Plan, source: Source, at: Span, slots: torch.Tensor, req: Any) -> Request:
    """Tokens of the plan's pages into these slots."""
    it = Request(req)
    it.take_up(planned_as(plan))
    it.fetch(SimpleNamespace(of=lambda *_: source), None)  # type: ignore[arg-type]
    it.reach(Phase.READY)
    it.begin_load(at, slots)
    return it
