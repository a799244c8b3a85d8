"""Send requests when they are due, whether or not earlier ones were answered (an open loop)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request and the time when it is due."""

    at_s: float
    """Seconds from the start of the run."""
    url: str
    document: int
    tokens: Sequence[int]
    num_new: int
    """Number of tokens to generate."""
    controls: Mapping[str, Any] | None
    """Controls of the request for the extension. None if the server has no extension."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was answered. Times are in seconds from the start of the run."""

    document: int
    replica: str
    due_s: float
    sent_s: float
    tokens_s: list[float]
    """Arrival of each token; the first gives the TTFT."""
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    outcome: str
    """Outcome that the extension reports, or `none` if a server has no extension."""
    reused_tokens: int = 0
    recomputed_layers: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds from the due time to the first token: the wait that a real client would see."""
        return self.tokens_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        return self.tokens_s[-1] - self.due_s

    @property
    def lag_s(self) -> float:
        """Seconds by which this client sent the request too late."""
        return self.sent_s - self.due_s


def run(asks: Sequence[Ask]) -> list[Answer]:
    """Send all requests and return the answers in the order of `asks`. Raises aiohttp.ClientError
    if a server fails a request."""
    return asyncio.run(_run(asks))


async def _run(asks: Sequence[Ask]) -> list[Answer]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # As many requests at once as are due.
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        raise_for_status=True,
    ) as http:
        started_s = time.perf_counter()
        return await asyncio.gather(*(send(http, ask, started_s) for ask in asks))


async def send(http: aiohttp.ClientSession, ask: Ask, started_s: float) -> Answer:
    """Send a request when it is due. `started_s` is the start of the run on `time.perf_counter`."""
    params: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": ask.num_new,
        "ignore_eos": True,
    }
    if ask.controls is not None:
        params["custom_params"] = {"droidspeak": dict(ask.controls)}
    body = {"input_ids": list(ask.tokens), "stream": True, "sampling_params": params}
    await asyncio.sleep(started_s + ask.at_s - time.perf_counter())
    sent_s = time.perf_counter() - started_s
    tokens_s: list[float] = []
    last: dict[str, Any] = {}
    async with http.post(f"{ask.url}/generate", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                last = json.loads(line.removeprefix(b"data: "))
                now_s = time.perf_counter() - started_s
                tokens_s += [now_s] * (len(last["output_ids"]) - len(tokens_s))
    said = (last["meta_info"].get("droidspeak") or [{"outcome": "none"}])[0]
    return Answer(
        document=ask.document,
        replica=ask.url,
        due_s=round(ask.at_s, 5),
        sent_s=round(sent_s, 5),
        tokens_s=[round(at_s, 5) for at_s in tokens_s],
        output_ids=last["output_ids"],
        prompt_tokens=len(ask.tokens),
        cached_tokens=last["meta_info"]["cached_tokens"],
        outcome=said["outcome"],
        reused_tokens=said.get("reused_tokens", 0),
        recomputed_layers=said.get("recomputed_layers", 0),
    )
