"""Add a request's outcome to the HTTP headers of its answer, whether it is streamed or not.

A label is this package's part of an answer's meta_info: the outcome, and whether the answer is
exact. SGLang sends the headers after the first reply, which has the label. So `LabelNotes` copies
the label into the state of the HTTP request, and `OutcomeHeaders` reads it there.

Routers that follow the cross-model contract of the project semantic-router name a peer in
`x-vsr-kv-source-pod`. They read the result from `x-vsr-kv-transfer-status`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Final

OUTCOME: Final = b"x-droidspeak-outcome"
EXACT: Final = b"x-droidspeak-exact"
SOURCE_POD: Final = b"x-vsr-kv-source-pod"
STATUS: Final = b"x-vsr-kv-transfer-status"
_MAX_SOURCE: Final = 256
_APPLIED: Final = frozenset({"reused", "own", "on_device"})
_UNSUPPORTED: Final = frozenset(
    {
        *("no_profile", "gate_failed", "ungated_block", "multimodal", "input_embeds", "session"),
        *("bad_controls", "longer_than_measured", "unknown_adapter", "weights_updated"),
    }
)
"""Outcomes that a repeated request would get again. All other outcomes may change with time."""

Label = Mapping[str, Any]
Reply = Any


class OutcomeHeaders:
    """ASGI middleware that adds headers to the answer of a request with a label."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        asks_status = any(name == SOURCE_POD for name, _ in scope["headers"])

        async def labelled(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._key in state:
                added = headers_of(state[self._key], asks_status)
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, labelled)


def headers_of(label: Label, asks_status: bool) -> list[tuple[bytes, bytes]]:
    outcome = label["outcome"]
    headers = [
        (OUTCOME, outcome.encode("latin-1", "replace")),
        (EXACT, b"true" if label["exact"] else b"false"),
    ]
    if asks_status:
        unsupported = outcome in _UNSUPPORTED
        missed = b"unsupported" if unsupported else b"fallback_reprefill"
        headers.append((STATUS, b"applied" if outcome in _APPLIED else missed))
    return headers


class LabelNotes:
    """Hook around SGLang's `generate_request`, in the front end. It copies the peer that a header
    names into the request's controls. It copies the answer's first label into the state of the HTTP
    request."""

    def __init__(self, key: str) -> None:
        self._key: Final = key

    def generate(self, original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
        """Hooks TokenizerManager.generate_request, which returns an async generator of replies."""
        if request is not None:
            self._hint(obj, dict(request.scope["headers"]).get(SOURCE_POD, b""))
        replies = original(manager, obj, request)
        return replies if request is None else self._noted(request.scope["state"], replies)

    def _hint(self, obj: Any, source: bytes) -> None:
        """Set the control `peer` of each prompt in `obj` to `source`, the value of the header. A
        `peer` that the user has set stays. Ignore values of more than `_MAX_SOURCE` bytes."""
        if not 0 < len(source) <= _MAX_SOURCE:
            return
        hint = {"peer": source.decode("latin-1")}
        params = obj.sampling_params = obj.sampling_params or {}
        for each in params if isinstance(params, list) else [params]:
            custom = each.get("custom_params") or {}
            if isinstance(custom, dict) and isinstance(own := custom.get(self._key, {}), dict):
                each["custom_params"] = {**custom, self._key: {**hint, **own}}

    async def _noted(
        self, state: MutableMapping[str, Any], replies: AsyncGenerator[Reply, None]
    ) -> AsyncGenerator[Reply, None]:
        async with aclosing(replies):
            async for reply in replies:
                # Each prompt of a batch has a label, but headers have room for one only.
                if self._key not in state and isinstance(reply, dict):
                    labels = reply["meta_info"].get(self._key)
                    if labels:
                        state[self._key] = labels[0]
                yield reply
