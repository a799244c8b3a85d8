"""Ask a server, and compare two answers. Pure, except `ask`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from profiles.data.documents import common_start
from sglang_droidspeak.fleet import ServerFailed
from sglang_droidspeak.fleet.client import Client
from sglang_droidspeak.guard.plans import POSITIONS, TOP, LogProbs, distance
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance

CLOSE: Final = 0.05
"""Least difference of log-probabilities that counts. A smaller one may be due to rounding."""
_PATIENCE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer of at most `POSITIONS` tokens."""

    ttft_s: float
    tokens: tuple[int, ...]
    likely: tuple[LogProbs, ...]
    """Log-probabilities, at each position, of the most likely tokens and of the answer's own."""
    id: str
    prompt_tokens: int
    cached_tokens: int
    label: RequestProvenance


def ask(client: Client, ids: Sequence[int], salt: str, **controls: str) -> Answer:
    """Send a prompt and stream its answer. Raises requests.RequestException and ServerFailed."""
    begun_s = time.perf_counter()
    arrived_s, parts = begun_s, list[Mapping[str, Any]]()
    for reply in client.replies(
        list(ids),
        max_new_tokens=POSITIONS,
        droidspeak=controls,
        cache_salt=salt,
        return_logprob=True,
        top_logprobs_num=TOP,
        timeout_s=_PATIENCE_S,
    ):
        arrived_s = arrived_s if parts else time.perf_counter()
        parts.append(reply["meta_info"])
    if not parts:
        raise ServerFailed(f"{client.url} ended a stream without a token")
    return answer_of(arrived_s - begun_s, parts)


def answer_of(ttft_s: float, parts: Sequence[Mapping[str, Any]]) -> Answer:
    """Make an answer from the `meta_info` of each reply of a stream. The last reply has all tokens,
    or each reply has only new tokens."""
    meta = {**parts[0], **parts[-1]}
    own, top = (_whole(parts, f"output_{it}_logprobs") for it in ("token", "top"))
    likely = [{token: value for value, token, _ in it} for it in top]
    (label,) = meta[KEY]
    return Answer(
        ttft_s=ttft_s,
        tokens=tuple(token for _, token, _ in own),
        likely=tuple(
            it | {token: value} for it, (value, token, _) in zip(likely, own, strict=True)
        ),
        id=meta["id"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        label=msgspec.convert(label, RequestProvenance),
    )


def _whole(parts: Sequence[Mapping[str, Any]], name: str) -> Sequence[Any]:
    last = parts[-1]
    if len(last[name]) == last["completion_tokens"]:
        return last[name]
    return [it for part in parts for it in part[name]]


def new_salt() -> str:
    """Return a salt that no other request has."""
    return f"verify-{uuid.uuid4().hex}"


def difference(one: Answer, other: Answer) -> str:
    """Return the first difference between two answers that should be equal. Empty if there is none.

    If they differ in two tokens that are equally likely, both are right, and later tokens are not
    compared.
    """
    for i, (ours, theirs) in enumerate(zip(one.likely, other.likely, strict=False)):
        token, instead = one.tokens[i], other.tokens[i]
        if token != instead:
            gap = ours[token] - ours.get(instead, float("-inf"))
            return "" if gap < CLOSE else f"token {i} is {instead} instead of {token}"
        if (gap := abs(ours[token] - theirs[token])) >= CLOSE:
            return f"the log-probability of token {i} differs by {gap:.2f}"
    return ""


def distance_of(served: Answer, exact: Answer) -> float:
    """Return the mean total variation, 0 to 1, up to the first position with different tokens."""
    num = 1 + len(common_start([served.tokens, exact.tokens]))
    return distance(served.likely[:num], exact.likely[:num])
