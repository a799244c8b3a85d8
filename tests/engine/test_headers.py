"""Every client gets the outcome in headers, for streamed answers and others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from sglang_droidspeak.engine.headers import LabelNotes, OutcomeHeaders

KEY = "droidspeak"
OUTCOME, EXACT = "x-droidspeak-outcome", "x-droidspeak-exact"
STATUS, SOURCE = "x-vsr-kv-transfer-status", "x-vsr-kv-source-pod"


async def replies(_manager: Any, asked: Any, _request: Any = None) -> AsyncIterator[Any]:
    """Yield two replies. Both have the label, as in SGLang's streams."""
    obj = asked.labels
    for _ in range(2):
        if isinstance(obj, list):
            yield [{"meta_info": {KEY: [it]}} for it in obj]
        else:
            yield {"meta_info": {KEY: [obj]} if obj else {}}


def asked(labels: Any, params: Any = None) -> Any:
    return SimpleNamespace(labels=labels, sampling_params=params)


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(OutcomeHeaders, key=KEY)
    notes = LabelNotes(KEY)

    @app.post("/whole")
    async def whole(request: Request) -> dict[str, int]:
        answer = notes.generate(replies, None, asked(await request.json()), request)
        return {"num": len([it async for it in answer])}

    @app.post("/streamed")
    async def streamed(request: Request) -> StreamingResponse:
        answer = notes.generate(replies, None, asked(await request.json()), request)
        first = await anext(answer)

        async def rest() -> AsyncIterator[str]:
            yield str(first)
            async for chunk in answer:
                yield str(chunk)

        return StreamingResponse(rest())

    @app.get("/other")
    async def other() -> str:
        return "well"

    return TestClient(app)


@pytest.mark.parametrize("path", ["/whole", "/streamed"])
@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("reused", "applied"),
        ("on_device", "applied"),
        ("no_match", "fallback_reprefill"),
        ("fallback: SlowLink", "fallback_reprefill"),
        ("no_profile", "unsupported"),
    ],
)
def test_an_answer_says_its_outcome(client, path, outcome, status):
    label = {"outcome": outcome, "exact": outcome != "reused"}
    headers = client.post(path, json=label).headers
    assert (headers[OUTCOME], headers[EXACT]) == (outcome, str(label["exact"]).lower())
    assert STATUS not in headers, "nobody asked"
    assert client.post(path, json=label, headers={SOURCE: "a"}).headers[STATUS] == status


@pytest.mark.parametrize("body", [{}, [{"outcome": "reused", "exact": True}] * 2])
def test_without_one_label_there_are_no_headers(client, body):
    answer = client.post("/whole", json=body)
    assert answer.json() == {"num": 2}
    assert OUTCOME not in answer.headers
    assert OUTCOME not in client.get("/other").headers


def test_each_request_has_its_own(client):
    labels = [{"outcome": it, "exact": True} for it in ("reused", "no_match", "reused")]
    said = [client.post("/streamed", json=it).headers[OUTCOME] for it in labels]
    assert said == [it["outcome"] for it in labels]


def test_what_no_http_request_asked_for_passes_as_it_is():
    answer = LabelNotes(KEY).generate(replies, None, asked({"outcome": "own"}))
    assert answer.__name__ == "replies"


POD = {KEY: {"peer": "10.0.0.5:8000"}}


@pytest.mark.parametrize(
    ("params", "hinted"),
    [
        (None, {"custom_params": POD}),
        ({"n": 1, "custom_params": None}, {"n": 1, "custom_params": POD}),
        ([{}, {}], [{"custom_params": POD}] * 2),
        (
            {"custom_params": {"a": 1, KEY: {"block": "2:5"}}},
            {"custom_params": {"a": 1, KEY: {"block": "2:5", **POD[KEY]}}},
        ),
        ({"custom_params": {KEY: {"peer": "b"}}}, {"custom_params": {KEY: {"peer": "b"}}}),
        ({"custom_params": {KEY: "wrong"}}, {"custom_params": {KEY: "wrong"}}),
        ({"custom_params": "wrong"}, {"custom_params": "wrong"}),
    ],
)
def test_the_pod_that_a_router_names_is_where_the_server_looks(params, hinted):
    obj = asked({}, params)
    headers = [(b"x-vsr-kv-source-pod", b"10.0.0.5:8000")]
    request = SimpleNamespace(scope={"state": {}, "headers": headers})
    LabelNotes(KEY).generate(replies, None, obj, request)
    assert obj.sampling_params == hinted


@pytest.mark.parametrize("source", [b"", b"x" * 257])
def test_a_header_that_names_no_host_changes_nothing(source):
    obj = asked({})
    headers = [(b"x-vsr-kv-source-pod", source)]
    request = SimpleNamespace(scope={"state": {}, "headers": headers})
    LabelNotes(KEY).generate(replies, None, obj, request)
    assert obj.sampling_params is None
