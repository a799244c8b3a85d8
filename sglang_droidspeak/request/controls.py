"""What one request may ask for, in `sampling_params.custom_params["droidspeak"]`.

    {"droidspeak": {"mode": "off"}}                    full prefill
    {"droidspeak": {"block": "2:5"}}                   recompute layers [2, 5)
    {"droidspeak": {"block": "none", "sender": ID}}    load every layer from that model
    {"droidspeak": {"ttft_target_ms": 300}}            recompute as much as fits that time
    {"droidspeak": {"publish": "before_reply"}}        answer once others can read it

SGLang carries only scalars here, which is why a block is text.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from cachetree import EMPTY_SPAN, ModelId, Span, printable
from cachetree.planning import Requested, Strategy

_MAX_DETAIL: Final = 300
"""Characters of what is said of wrong controls: it may quote all of them."""
_MAX_NAME: Final = 64
"""Characters of a request's id that are logged."""


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "off"] = "auto"
    """`off` asks no other model, and reads exact KV only."""
    sender: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    """Model id of the only sender to use."""
    block: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    """Layers to recompute, `"2:5"` for [2, 5), `"none"` or `"all"`; the gate has to allow it."""
    ttft_target_ms: float | None = None
    """Overrides the server's setting of this name."""
    publish: Literal["before_reply"] | None = None
    """`before_reply`: the answer, or the end of its stream, comes once every connected peer knows
    what this server has stored of it, and `fetch_deadline_s` later at most, or where generation is
    paused once it goes on. A peer that has not answered for five seconds is not waited for."""
    strategy: Strategy = Strategy.PIPELINED
    """How loads and recompute share time; obeyed with `gate: none` only, for measurements."""

    def requested(self, num_layers: int) -> Requested:
        """ValueError where the block is wrong."""
        return Requested(
            sender=None if self.sender is None else ModelId(self.sender),
            block=None if self.block is None else _span(self.block, num_layers),
        )


def _span(block: str, num_layers: int) -> Span:
    if block in ("none", "all"):
        return Span(0, num_layers) if block == "all" else EMPTY_SPAN
    start, colon, stop = block.partition(":")
    if not (colon and start.isdigit() and stop.isdigit()):
        raise ValueError(f"block {block!r} is not 'start:stop', 'none' or 'all'")
    if not int(start) < int(stop) <= num_layers:
        raise ValueError(f"block {block!r} is not within 0:{num_layers}")
    return Span(int(start), int(stop))


class _CustomParams(msgspec.Struct):
    droidspeak: Controls = Controls()


_ACCEPTED: Final = (
    "mode: 'auto' or 'off'; sender: a model id; block: 'start:stop', 'none' or 'all'; "
    "ttft_target_ms: a number; publish: 'before_reply'; strategy: "
    + " or ".join(repr(it.value) for it in Strategy)
)


def parse_controls(custom_params: object) -> Controls:
    """Of what a user gave, whatever that is; raises ValueError naming the field, and the request
    then does a full prefill."""
    try:
        return msgspec.convert(custom_params or {}, _CustomParams).droidspeak
    except msgspec.ValidationError as exc:
        wrong = printable(str(exc)[:_MAX_DETAIL])
        raise ValueError(f"custom_params: {wrong}; accepted in droidspeak: {_ACCEPTED}") from exc


def name_of(rid: str) -> str:
    """A request's id, which its user may have given, for a line of the log."""
    return printable(rid[:_MAX_NAME])
