"""Controls of one request, in `sampling_params.custom_params["droidspeak"]`.

    {"droidspeak": {"mode": "off"}}                    full prefill
    {"droidspeak": {"block": "2:5"}}                   recompute layers [2, 5)
    {"droidspeak": {"block": "none", "sender": ID}}    load every layer from that model
    {"droidspeak": {"ttft_target_ms": 300}}            recompute as many layers as fit that time
    {"droidspeak": {"peer": "10.0.0.5"}}               prefer this peer to others with the pages
    {"droidspeak": {"publish": "before_reply"}}        answer once peers can read the new KV

A block is text, because SGLang accepts only scalars inside this dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from cachetree import EMPTY_SPAN, ModelId, Span, printable
from cachetree.planning import Match, Requested, Strategy

_MAX_DETAIL: Final = 300
"""Largest number of characters of the message about wrong controls, which may quote them all."""
_MAX_NAME: Final = 64
"""Largest number of characters of a request's id that are logged."""


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "off"] = "auto"
    """`off`: reuse no other model's cache, and read only exact KV."""
    sender: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    """Model id of the only sender to use."""
    block: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    """Layers to recompute: `"2:5"` for [2, 5), `"none"` or `"all"`. The server's setting `gate` has
    to allow this block."""
    ttft_target_ms: float | None = None
    """Time to first token to aim for, in milliseconds, in place of the server's setting of this
    name."""
    publish: Literal["before_reply"] | None = None
    """`before_reply`: send the end of the answer only when every connected peer knows the KV that
    this server has stored of it. The answer waits for at most `fetch_deadline_s`, or longer while
    generation is paused. It waits for no peer that has been silent for five seconds."""
    peer: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    """Host of a configured peer to prefer: pages that this peer has are fetched from no other peer.
    A scheme and a port are ignored, and no new connection is made. The header
    `x-vsr-kv-source-pod` sets it as well."""
    strategy: Strategy = Strategy.PIPELINED
    """`pipelined` recomputes while layers arrive, `reused_first` and `everything_first` after the
    last one. Used only with `gate: none`, to measure."""

    def requested(self, num_layers: int) -> Requested:
        """Return the sender and block that the request names. Raises ValueError."""
        return Requested(
            sender=None if self.sender is None else ModelId(self.sender),
            block=None if self.block is None else _span(self.block, num_layers),
        )

    def preferred(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches to choose a plan from. If the request names a `peer`, leave out each
        match at another peer that has no more pages or E."""
        host = _host_of(self.peer or "")
        if not host:
            return [*matches]
        first = {it.model: it for it in matches if _host_of(it.location) == host}
        return [it for it in matches if not _is_copy(it, first.get(it.model), host)]


def _is_copy(match: Match, first: Match | None, host: str) -> bool:
    """Whether a match is at a peer on another host, and has no more pages or E than `first`."""
    if first is None or "://" not in match.location or _host_of(match.location) == host:
        return False
    e_pages = match.e_pages.items()
    has_e = all(first.e_pages.get(layer, 0) >= num_pages for layer, num_pages in e_pages)
    return has_e and match.num_pages <= first.num_pages


def _host_of(address: str) -> str:
    """Return the host of an address, without scheme and port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return host if port.isdigit() else address.rpartition("://")[2]


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
    "ttft_target_ms: a number; publish: 'before_reply'; peer: a host; strategy: "
    + " or ".join(repr(it.value) for it in Strategy)
)


def parse_controls(custom_params: object) -> Controls:
    """Parse the controls in a user's `custom_params`, which may be any value. Raises ValueError
    naming the wrong field; the request then does a full prefill."""
    try:
        return msgspec.convert(custom_params or {}, _CustomParams).droidspeak
    except msgspec.ValidationError as exc:
        wrong = printable(str(exc)[:_MAX_DETAIL])
        raise ValueError(f"custom_params: {wrong}; accepted in droidspeak: {_ACCEPTED}") from exc


def name_of(rid: str) -> str:
    """Return a request's id for the log. It is cut and escaped, as a user may have chosen it."""
    return printable(rid[:_MAX_NAME])
