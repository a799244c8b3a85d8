"""What one request may ask for, in `sampling_params.custom_params["droidspeak"]`.

    {"droidspeak": {"mode": "off"}}                    full prefill
    {"droidspeak": {"block": "2:5"}}                   recompute layers [2, 5)
    {"droidspeak": {"block": "none", "sender": ID}}    load every layer from that model
    {"droidspeak": {"block": "2:5", "refresh": "7,9"}} and project K and V of two more anew
    {"droidspeak": {"ttft_target_ms": 300}}            recompute as much as fits that time
    {"droidspeak": {"publish": "before_reply"}}        answer once others can read it

SGLang carries only scalars here, which is why layers are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from cachetree import EMPTY_SPAN, Span
from cachetree.planning import Strategy


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "off"] = "auto"
    """`off` asks no other model, and reads exact KV only."""
    sender: str | None = None
    """Model id of the only sender to use."""
    block: str | None = None
    """Layers to recompute, `"2:5"` for [2, 5), `"none"` or `"all"`; the gate has to allow it."""
    refresh: str | None = None
    """Layers outside the `block` whose K and V are projected anew from the sender's residual
    stream, `"7,9"`."""
    ttft_target_ms: float | None = None
    """Overrides the server's setting of this name."""
    publish: Literal["before_reply"] | None = None
    """`before_reply`: the answer, or the end of its stream, comes once every connected peer knows
    what was read and written for it, and `fetch_deadline_s` later at most."""
    strategy: Strategy = Strategy.PIPELINED
    """How loads and recompute share time; obeyed with `gate: off` only, for measurements."""

    def span(self, num_layers: int) -> Span | None:
        """The block asked for, None where the server may choose; ValueError where it is wrong."""
        match self.block:
            case None:
                return None
            case "none":
                return EMPTY_SPAN
            case "all":
                return Span(0, num_layers)
        start, colon, stop = self.block.partition(":")
        if not (colon and start.isdigit() and stop.isdigit()):
            raise ValueError(f"block {self.block!r} is not 'start:stop', 'none' or 'all'")
        if not int(start) < int(stop) <= num_layers:
            raise ValueError(f"block {self.block!r} is not within 0:{num_layers}")
        return Span(int(start), int(stop))

    def refreshed(self, num_layers: int) -> tuple[int, ...]:
        """The layers to refresh, ascending; ValueError where they are wrong."""
        if self.refresh is None:
            return ()
        names = self.refresh.split(",")
        block = self.span(num_layers)
        if block is None or not all(name.isdigit() for name in names):
            raise ValueError(f"refresh is {self.refresh!r}; give a block, and layers as in '7,9'")
        layers = tuple(sorted({int(name) for name in names}))
        if layers[-1] >= num_layers or any(layer in block for layer in layers):
            raise ValueError(
                f"refresh is {self.refresh!r}; give layers below {num_layers} outside the block"
            )
        return layers


_ACCEPTED: Final = (
    "mode: 'auto' or 'off'; sender: a model id; block: 'start:stop', 'none' or 'all'; refresh: "
    "layers beside a block, '7,9'; ttft_target_ms: a number; publish: 'before_reply'; strategy: "
    + " or ".join(repr(it.value) for it in Strategy)
)


def parse_controls(custom_params: Mapping[str, Any] | None) -> Controls:
    """Raises ValueError naming the field; the request then does a full prefill."""
    try:
        return msgspec.convert((custom_params or {}).get("droidspeak", {}), Controls)
    except msgspec.ValidationError as exc:
        raise ValueError(f"custom_params['droidspeak']: {exc}; accepted: {_ACCEPTED}") from exc
