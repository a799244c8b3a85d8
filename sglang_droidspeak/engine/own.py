"""What the front end tells the scheduler of a request beside the user's controls, in SGLang's
`custom_params`: of a request that the server itself sends, and of an answer that is a draft.

    droidspeak_answered: N   The server's own; the last N tokens of its input are of the answer.
                             Without log-probabilities it goes on with that answer, as a request
                             does that SGLang had retracted.
    droidspeak_draft: N      If its prompt's KV is approximate, it ends after N tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import Req

ANSWERED: Final = "droidspeak_answered"
DRAFT: Final = "droidspeak_draft"


def is_own(req: Req) -> bool:
    """Whether no user has sent it."""
    return ANSWERED in _told(req)


def num_answered(req: Req) -> int:
    """How many tokens at the end of the prompt are of the answer."""
    num = _told(req).get(ANSWERED, 0)
    return num if isinstance(num, int) and 0 < num < len(req.origin_input_ids) else 0


def go_on(req: Req, *_args: Any, **_kwargs: Any) -> None:
    """Give a request that goes on with an answer its prompt, and its first output tokens; hooks
    Scheduler._create_generation_req."""
    num, prompt = num_answered(req), req.origin_input_ids
    if not num or req.return_logprob:
        return
    req.output_ids = prompt[-num:]
    req.origin_input_ids = req.origin_input_ids_unpadded = prompt[:-num]
    params = req.sampling_params
    params.custom_params = {**params.custom_params, ANSWERED: 0}
    if params.max_new_tokens is not None:
        params.max_new_tokens += num


def end_draft(req: Req) -> int | None:
    """Have a draft end where it is to: after how many tokens, None where it ends by itself."""
    params, most = req.sampling_params, _told(req).get(DRAFT)
    if not isinstance(most, int) or not 0 < most < params.max_new_tokens:
        return None
    params.max_new_tokens = most
    return most


def _told(req: Req) -> dict[str, Any]:
    return req.sampling_params.custom_params or {}
