"""What a request and the server's settings ask of the policy: in pages and in seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from permissive import made
from test_policy import ALL_E, FAR, MEASURED, PROFILE, R, S, match

from cachetree.checkpoint.codec import Codec
from cachetree.ids import PageHash, Span
from sglang_droidspeak.adapters.models import Part
from sglang_droidspeak.request.planner import Planner

PAGE = 16
TREE = SimpleNamespace(
    page_size=PAGE,
    match_prefix=lambda _params: SimpleNamespace(device_prefix_len=0, last_device_node=0),
    path_device_indices=lambda _node: torch.empty(0),
)
"""SGLang's, with nothing in it."""


def plan(
    num_pages: int = 10, sender: str = S, controls: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """What is planned where all of a prompt is found at one peer."""
    pages = [PageHash(bytes([number] * 16)) for number in range(num_pages)]
    found = match(sender, num_pages, FAR, dict.fromkeys(ALL_E, num_pages))
    asked = {
        "min_tokens": 1,
        "ttft_target_ms": None,
        "gate": "enforce",
        "max_recompute_tokens": None,
        "max_stall_s": None,
    } | settings
    planner = made(
        Planner,
        site=SimpleNamespace(
            settings=SimpleNamespace(**asked),
            identity=SimpleNamespace(num_layers=10),
            page_size=PAGE,
            profiles=[PROFILE],
            transition_layers=range(10),
        ),
        cache=SimpleNamespace(
            match=lambda _pages: [found],
            link=MEASURED.links.get,
            family=SimpleNamespace(
                kv_page_bytes=MEASURED.kv_page_bytes,
                e_page_bytes=MEASURED.e_page_bytes,
                codec=Codec.NONE,
            ),
        ),
        meter=SimpleNamespace(
            prefill=MEASURED.prefill,
            recompute=MEASURED.recompute,
            copy_byte_s=0.0,
            step_tokens=1 << 20,
        ),
        models=MagicMock(
            part_of=lambda _req: Part(R, None, None), first_differences=lambda _lora_id: {}
        ),
        pool=MagicMock(held=lambda *_: SimpleNamespace(exact=0, approximate=None)),
    )
    req = SimpleNamespace(
        rid="r1",
        lora_id=None,
        extra_key=None,
        cache_salt=None,
        sampling_params=SimpleNamespace(custom_params={"droidspeak": controls or {}}),
        full_untruncated_fill_ids=list(range(num_pages * PAGE + 1)),
    )
    return planner.plan(req, pages, TREE, 0)


@pytest.mark.parametrize(
    ("min_tokens", "num_pages", "is_enough"),
    [(1, 1, True), (96, 6, True), (97, 6, False), (111, 6, False), (111, 7, True), (113, 7, False)],
)
def test_fewer_tokens_than_the_least_are_not_loaded(
    min_tokens: int, num_pages: int, is_enough: bool
) -> None:
    """Also where the least is no whole number of pages."""
    found = plan(num_pages, sender=R, min_tokens=min_tokens)
    assert hasattr(found, "plan") == is_enough
    if not is_enough:
        assert getattr(found, "outcome", found) == "too_short"


@pytest.mark.parametrize(
    ("target_ms", "block"), [(None, Span(3, 6)), (1000, Span(2, 7)), (10_000, Span(0, 8))]
)
@pytest.mark.parametrize("asked_by", ["request", "server"])
def test_a_ttft_target_is_milliseconds(asked_by: str, target_ms: float | None, block: Span) -> None:
    """The blocks take 0.48, 0.8 and 1.28 s; without a target it is the recommended one."""
    if asked_by == "server":
        found = plan(ttft_target_ms=target_ms)
    else:
        found = plan(controls={} if target_ms is None else {"ttft_target_ms": target_ms})
    assert found.plan.block == block


def test_a_requests_own_target_counts() -> None:
    found = plan(ttft_target_ms=10_000, controls={"ttft_target_ms": 1000})
    assert found.plan.block == Span(2, 7)
