"""Questions of an operator, over SGLang's own HTTP server to its scheduler and back.

They travel as SGLang's question about its scheduler's state: a page of ours puts what is asked in
the place of that question's id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import Req

PATH: Final = "/droidspeak/explain"
_MARK: Final = "droidspeak: "


def add_page(key: str) -> None:
    """In the front end, before its HTTP server starts: what the scheduler says under `key`.

    Asks for SGLang's admin key where there is one, else for its API key, as SGLang's own pages for
    operators do.
    """
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def answer(request: Request) -> JSONResponse:
        manager = get_global_state().tokenizer_manager
        manager.auto_create_handle_loop()
        question = GetInternalStateReq(rid=_MARK + (await request.body()).decode())
        first, *_ = await manager.get_internal_state_communicator(question)
        told = first.internal_state.get(key, {"error": "this server runs without droidspeak"})
        return JSONResponse(told, status_code=404 if "error" in told else 200)

    if all(getattr(it, "path", "") != PATH for it in app.routes):
        app.add_route(PATH, answer, methods=["POST"])


def asked(recv_req: Any) -> str | None:
    """What a question about the scheduler's state asks of this extension; None where it is
    SGLang's own."""
    rid = recv_req.rid or ""
    return rid.removeprefix(_MARK) if rid.startswith(_MARK) else None


def unsent(
    tokens: Sequence[int], lora_id: str | None, extra_key: str | None, cache_salt: str | None
) -> Req:
    """A request as SGLang makes one, which nobody has sent."""
    from sglang_droidspeak.engine.names import Req, SamplingParams

    return Req(
        "an unsent request",
        "",
        array("q", tokens),
        SamplingParams(max_new_tokens=1),
        lora_id=lora_id,
        extra_key=extra_key,
        cache_salt=cache_salt,
    )
