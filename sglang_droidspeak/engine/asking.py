"""What the scheduler is asked that no user has sent.

Questions of an operator go over SGLang's own HTTP server to its scheduler and back. They travel as
SGLang's question about its scheduler's state: a page of ours puts what is asked in the place of
that question's id. What the server itself sends says so in `custom_params`.
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
"""Of a server, which no user can tell: the process that starts its others draws `authkey` and hands
it on."""
ANSWERED: Final = f"droidspeak_answered_{SECRET}"
"""Key that the server's own requests have, with the number of tokens at the end of their input that
are of an answer. No user can name it."""


def add_pages(key: str) -> None:
    """In the front end, before its HTTP server starts: what the scheduler says under `key`, and the
    headers of answers.

    Asks for SGLang's admin key where there is one, else for its API key, as SGLang's own pages for
    operators do.
    """
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def answer(request: Request) -> JSONResponse:
        manager = get_global_state().tokenizer_manager
        path = next(it for it in (EXPLAIN, GUARD) if request.url.path.endswith(it))
        told = await ask(manager, path, (await request.body()).decode(), key)
        return JSONResponse(told, status_code=404 if "error" in told else 200)

    for path in (EXPLAIN, GUARD):
        if all(getattr(it, "path", "") != path for it in app.routes):
            app.add_route(path, answer, methods=["POST"])
    if all(it.cls is not OutcomeHeaders for it in app.user_middleware):
        app.add_middleware(OutcomeHeaders, key=key)


async def ask(manager: Any, path: str, question: str, key: str) -> dict[str, Any]:
    """What the first rank's scheduler answers to a page's question; all ranks hear it. `manager` is
    SGLang's TokenizerManager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    asked = GetInternalStateReq(rid=path + _END + question)
    first, *_ = await manager.get_internal_state_communicator(asked)
    told: dict[str, Any] = first.internal_state.get(
        key, {"error": "this server runs without droidspeak"}
    )
    return told


def asked(recv_req: Any) -> tuple[str, str]:
    """The page and what it asks, of a question about the scheduler's state; the page is empty where
    the question is SGLang's own."""
    path, end, question = (recv_req.rid or "").partition(_END)
    return (path, question) if end and path in (EXPLAIN, GUARD) else ("", "")


def unsent(
    tokens: Sequence[int], lora_id: str | None, extra_key: str | None, cache_salt: str | None
) -> Req:
    """A request as SGLang makes one, which nobody has sent."""
    from sglang_droidspeak.engine.names import Req, SamplingParams

    return Req(
        f"unsent-{uuid.uuid4().hex}",  # That no user's request has.
        "",
        array("q", tokens),
        SamplingParams(max_new_tokens=1),
        lora_id=lora_id,
        extra_key=extra_key,
        cache_salt=cache_salt,
    )


def mark_warm_up(manager: Any, obj: Any, request: Any = None) -> None:
    """Hooks TokenizerManager.generate_request: what comes over HTTP before SGLang's warm-up has
    ended counts as the server's own. Without HTTP (`sgl.Engine`) SGLang's status stays Starting."""
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
    """Tokens at the end of the prompt that are of an answer; 0 for a user's request."""
    return req.sampling_params.custom_params[ANSWERED] if is_own(req) else 0
