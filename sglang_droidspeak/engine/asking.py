"""Carry questions of operators to the scheduler, and mark requests that the server itself sends.

A question goes from a page of SGLang's HTTP server to the scheduler, and the answer goes back. Both
use SGLang's message about the scheduler's internal state: its request id carries the question.
Requests that the server itself sends are marked in `custom_params`.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Sequence
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, Final

from sglang_droidspeak.engine.headers import OutcomeHeaders

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import Req

EXPLAIN: Final = "/droidspeak/explain"
GUARD: Final = "/droidspeak/guard"
_END: Final = ": "
SECRET: Final = hashlib.sha256(current_process().authkey).hexdigest()[:32]
"""Secret of one server, unknown to users. All processes of the server compute the same secret,
because a process inherits `authkey` from its parent."""
ANSWERED: Final = f"droidspeak_answered_{SECRET}"
"""Key in `custom_params` that marks the server's own requests. Users cannot know it. The value is
the number of tokens at the prompt's end that repeat an earlier answer."""


def add_pages(key: str) -> None:
    """Add HTTP pages that return the scheduler's answers to operators' questions, and add headers
    to the answers of requests. Call it in the front end, before its HTTP server starts.

    The pages need SGLang's admin key if there is one, else its API key, like SGLang's own pages for
    operators.
    """
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def answer(request: Request) -> JSONResponse:
        manager = get_global_state().tokenizer_manager
        path = next(it for it in (EXPLAIN, GUARD) if request.url.path.endswith(it))
        content = await ask(manager, path, (await request.body()).decode(), key)
        return JSONResponse(content, status_code=404 if "error" in content else 200)

    for path in (EXPLAIN, GUARD):
        if all(getattr(it, "path", "") != path for it in app.routes):
            app.add_route(path, answer, methods=["POST"])
    if all(it.cls is not OutcomeHeaders for it in app.user_middleware):
        app.add_middleware(OutcomeHeaders, key=key)


async def ask(manager: Any, path: str, question: str, key: str) -> dict[str, Any]:
    """Send a page's question to the schedulers of all ranks. Return the first rank's answer.
    `manager` is SGLang's TokenizerManager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    asked = GetInternalStateReq(rid=path + _END + question)
    first, *_ = await manager.get_internal_state_communicator(asked)
    answer: dict[str, Any] = first.internal_state.get(
        key, {"error": "this server runs without droidspeak"}
    )
    return answer


def asked(recv_req: Any) -> tuple[str, str]:
    """Return the page and the question that a message about the scheduler's state carries. Both are
    empty if the message is SGLang's own."""
    path, end, question = (recv_req.rid or "").partition(_END)
    return (path, question) if end and path in (EXPLAIN, GUARD) else ("", "")


def unsent(
    tokens: Sequence[int], lora_id: str | None, extra_key: str | None, cache_salt: str | None
) -> Req:
    """Make a request as SGLang would make it if a user sent it. It serves questions about what
    would happen to such a request."""
    from sglang_droidspeak.engine.names import Req, SamplingParams

    return Req(
        f"unsent-{uuid.uuid4().hex}",  # No user's request has this id.
        "",
        array("q", tokens),
        SamplingParams(max_new_tokens=1),
        lora_id=lora_id,
        extra_key=extra_key,
        cache_salt=cache_salt,
    )


def mark_warm_up(manager: Any, obj: Any, request: Any = None) -> None:
    """Mark requests as the server's own if they arrive over HTTP before SGLang's warm-up has ended.
    Hooks TokenizerManager.generate_request.

    Without HTTP (`sgl.Engine`), SGLang's status stays Starting, and no request is marked.
    """
    if request is None or manager.server_status.name != "Starting":
        return
    each = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for params in each:
        if isinstance(params, dict) and isinstance(custom := params.get("custom_params", {}), dict):
            params["custom_params"] = {**custom, ANSWERED: 0}


def is_own(req: Req) -> bool:
    """Whether the server itself has sent the request."""
    custom = req.sampling_params.custom_params
    return isinstance(custom, dict) and ANSWERED in custom


def num_answered(req: Req) -> int:
    """Return the number of tokens at the prompt's end that repeat an earlier answer, as the
    server's own requests do. 0 for a user's request."""
    return req.sampling_params.custom_params[ANSWERED] if is_own(req) else 0
