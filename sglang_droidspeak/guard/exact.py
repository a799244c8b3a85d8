"""This server's own exact run: what full prefill would have said where something was served.

It is a request like any other: the prompt and the served tokens as its input, log-probabilities of
the latter, nothing generated. It reads and leaves exact KV only, in the user's own tenant: what
approximate KV has given nobody finds there, and what it leaves, later requests with that prompt
find in place of the approximate KV. No metric and no explanation of droidspeak's counts it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from sglang_droidspeak.engine.own import ANSWERED
from sglang_droidspeak.guard.distance import TOP, LogProbs

_KEPT: Final = (
    "lora_path",
    "extra_key",
    "cache_salt",
    "priority",
    "routing_key",
    "no_logs",
    "http_worker_ipc",
)
"""Of the user's request: its model, its tenant, and how it is treated."""


class ExactRunAborted(Exception):
    """Somebody has aborted it."""

    def __init__(self, finish_reason: Mapping[str, Any]) -> None:
        super().__init__(finish_reason)
        self.finish_reason: Final = finish_reason


async def exact_run(
    manager: Any,
    prompt_ids: Sequence[int],
    served_ids: Sequence[int],
    like: Any,
    *,
    rid: str | None = None,
    http: Any = None,
) -> tuple[Sequence[LogProbs], Mapping[str, Any]]:
    """The exact distribution at the position of each served token, and the run's `meta_info`.

    `manager` is SGLang's TokenizerManager and `like` the user's GenerateReqInput. Cancelled, it
    aborts its request; so it does when the client of `http`, a Starlette request, is gone. Raises
    ExactRunAborted, and what SGLang raises of a request that it refuses.
    """
    asked = type(like)(
        input_ids=[*prompt_ids, *served_ids],
        rid=rid or f"droidspeak-{uuid.uuid4().hex}",
        sampling_params={
            "temperature": 0,
            "max_new_tokens": 0,
            "custom_params": {
                "droidspeak": {"mode": "off", "verify": False},
                ANSWERED: len(served_ids),
            },
        },
        return_logprob=True,
        # The first position from there has no log-probability.
        logprob_start_len=len(prompt_ids) - 1,
        top_logprobs_num=TOP,
        log_metrics=False,
        **{name: getattr(like, name) for name in _KEPT},
    )
    async with aclosing(manager.generate_request(asked, http)) as replies:
        meta: Mapping[str, Any] = (await anext(replies))["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise ExactRunAborted(meta["finish_reason"])
    served = meta["input_token_logprobs"][1:]
    tops = meta["input_top_logprobs"][1:]
    distributions = [
        {token: logprob for logprob, token, _ in (*top, one)}
        for one, top in zip(served, tops, strict=True)
    ]
    return distributions, meta


def argmax(distribution: LogProbs) -> int:
    """What greedy sampling takes: of equals the lowest id, as torch's argmax does."""
    return min(distribution, key=lambda token: (-distribution[token], token))
