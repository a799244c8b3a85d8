"""What a router is told of a prompt: of models, places and speeds, and over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from push_parts import cache_of
from serve_parts import serving
from test_policy import DEMAND, FAR, MEASURED, PROFILE, PROFILES, UNKNOWN, R, S, match
from transport_parts import FAMILY, MODEL, eventually, store
from tree_parts import FakeTime

from cachetree import DISK, LOCAL, Cache, CacheConfig, ConfigError, Deadline, Location, ProfileError
from cachetree.cli import serve
from cachetree.cli.serve import parse_config
from cachetree.metrics import Queries, StatusPage
from cachetree.metrics import http as page_of_status
from cachetree.metrics.query import MAX_BODY_BYTES, MAX_TOKENS
from cachetree.planning import Costs, write_profile
from cachetree.transport import ask, parse_http, verbs
from cachetree.tree import join_hashes, page_hashes

PAGE = FAMILY.page_size
TOKENS = list(range(8 * PAGE + 1))


def queries(*matches: Any, costs: Costs = MEASURED, **told: Any) -> Queries:
    """Of ten layers and pages of 16 tokens, as in `test_policy`."""
    cache = SimpleNamespace(
        match=lambda _pages, is_use: list(matches), family=SimpleNamespace(tp_size=2)
    )
    told = {"profiles": PROFILES, **told}
    return Queries(cache=cache, name="me", usual=DEMAND, costs=lambda _at: costs, **told)  # type: ignore[arg-type]


def answer(of: Queries, tokens: Any = range(161), model: str = R, **asked: Any) -> dict[str, Any]:
    question = {"model": model, "token_ids": list(tokens), **asked}
    found: dict[str, Any] = json.loads(of.answer(msgspec.json.encode(question)))
    return found


def test_a_sender_is_told_with_its_plan_bytes_and_seconds() -> None:
    """One token more than ten pages takes 10 ms, a page of the block [3, 6) two token-layers a
    token; 10 pages are 70 MB of KV and 20 MB of E at 1 GB/s, beside it."""
    (mine,) = answer(queries(match(S, location=FAR)))["default"].values()
    (it,) = mine.pop("senders")
    nothing = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}
    assert mine == {**nothing, "full_prefill_s": pytest.approx(1.61)}
    assert it == {
        "sender": S,
        "location": FAR,
        "matched_tokens": 160,
        "reused_tokens": 160,
        "block": [3, 6],
        "exact": False,
        "bytes": 2 * 90_000_000,
        "seconds": pytest.approx(0.02 + 0.32 + 0.01),
    }


def test_what_the_model_has_itself_is_told_by_medium() -> None:
    held = [match(R, 2, Location("pool:")), match(R, 9), match(R, 4, DISK)]
    mine = answer(queries(*held))["default"]["me"]
    assert [mine[it] for it in ("GPU", "CPU", "DISK", "longest_matched")] == [32, 144, 64, 144]
    assert mine["full_prefill_s"] == pytest.approx(1.61 - 0.32)
    assert {(it["location"], it["exact"], it["block"]) for it in mine["senders"]} == {
        (LOCAL, True, None),
        (DISK, True, None),
    }


def test_the_soonest_comes_first_and_who_may_not_be_read_not_at_all() -> None:
    held = [match(S, 3, FAR), match("stranger"), match(S, 10, FAR)]
    (first, second) = answer(queries(*held))["default"]["me"]["senders"]
    assert first["matched_tokens"] == 160 and first["seconds"] < second["seconds"]


def test_without_speeds_there_are_no_seconds() -> None:
    mine = answer(queries(match(S, location=FAR), costs=UNKNOWN))["default"]["me"]
    assert mine["full_prefill_s"] is None
    assert [it["seconds"] for it in mine["senders"]] == [None]


def test_a_name_stands_for_an_id_and_others_instances_are_not_ours() -> None:
    named = queries(match(S, location=FAR), names={"answers": R})
    by_name = answer(named, model="answers", instance_id="me", lora_id=-1)
    assert by_name == answer(named)
    assert answer(named, instance_id="you") == {"default": {}}
    assert answer(named, tenant_id="them") == {"them": {}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "llama"}, "model is 'llama'; give an id"),
        ({"block_size": 64}, "block_size is 64; pages here have 16"),
        ({"lora_name": "sql"}, "lora_name is 'sql'; name an adapter by its id"),
        ({"cache_salt": "bob"}, "cache_salt is given"),
        ({"token_ids": [-1]}, "cannot be read"),
        ({"token_ids": [1 << 32]}, "cannot be read"),
        ({"token_ids": [0] * (MAX_TOKENS + 1)}, "cannot be read"),
        ({"token_ids": None}, "cannot be read"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        queries().answer(msgspec.json.encode({"model": R, "token_ids": [], **asked}))
    assert words in str(found.value) and "\n" not in str(found.value)


def test_no_prompt_is_matched_by_nothing() -> None:
    with cache_of() as cache:
        mine = answer(replace(queries(), cache=cache), [])["default"]["me"]
    assert (mine["longest_matched"], mine["senders"]) == (0, [])


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """As little of a client as there can be: it sends what it is told to."""
    page = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    page.putrequest("POST", "/query")
    for name, value in ({"Content-Length": str(len(body))} | headers).items():
        page.putheader(name, value)
    page.endheaders(body)
    reply = page.getresponse()
    found = reply.status, json.loads(reply.read())
    page.close()
    return found


def queries_of(cache: Cache) -> Queries:
    usual = replace(DEMAND, num_layers=FAMILY.num_layers, page_size=PAGE, min_pages=1)
    costs = Costs(kv_page_bytes=1, e_page_bytes=1)
    return Queries(
        cache=cache,
        name="me",
        usual=usual,
        costs=lambda _at: costs,
        profiles={},
        names={"m": MODEL},
    )


def page_of(cache: Cache) -> StatusPage:
    return StatusPage(parse_http("0"), cache.status, queries_of(cache))


def test_a_cache_answers_of_itself_its_disk_and_its_peers(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    pages = page_hashes(TOKENS, PAGE)
    question = msgspec.json.encode({"model": "m", "token_ids": TOKENS, "block_size": PAGE})
    with cache_of(**disk) as worker, page_of(worker) as page:
        store(worker.tree, pages)
        eventually(lambda: worker.status().disk.num_pages == 8)  # type: ignore[union-attr]
        code, told = post(page.url, question)
        mine = told["default"]["me"]
        assert (code, mine["CPU"], mine["DISK"]) == (200, 8 * PAGE, 8 * PAGE)
        with (
            cache_of(peers=(worker.address,), serves=False) as reader,
            page_of(reader) as other,
        ):
            eventually(lambda: reader.match(pages))
            there = post(other.url, question)[1]["default"]["me"]
    assert (there["longest_matched"], there["CPU"]) == (0, 0)
    (sender,) = there["senders"]
    assert (sender["location"], sender["exact"]) == (worker.address, True)
    assert (sender["matched_tokens"], sender["bytes"]) == (8 * PAGE, 8 * FAMILY.num_layers)


def test_questions_keep_nothing_in_memory() -> None:
    """Neither a router's nor an operator's: of what the cache has, and of what it knows of."""
    time, pages = FakeTime(), page_hashes(TOKENS, PAGE)
    with Cache(FAMILY, CacheConfig(host_bytes=1 << 20, ttl_s=1), clock=time) as cache:
        assert cache.address
        store(cache.tree, pages)
        cache.tree.remote.limit(FAR, 2 * len(pages))
        for far in (pages, page_hashes(TOKENS[1:], PAGE)):
            cache.tree.remote.add(FAR, MODEL, None, far, ())
        router, question = queries_of(cache), verbs.Find(pages=join_hashes(pages))
        for cpu in (8 * PAGE, 8 * PAGE, 0):
            cache.tree.sweep()
            assert answer(router, TOKENS, "m")["default"]["me"]["CPU"] == cpu
            found = ask(cache.address, question, verbs.Found, timeout_s=5).holdings
            assert len(found) == 1 + (cpu > 0)
            time.now_s += 0.5
        cache.tree.remote.add(FAR, MODEL, None, page_hashes(TOKENS[2:], PAGE), ())
        assert cache.tree.remote.reach(FAR, MODEL, pages) == 0


def test_what_is_no_question_is_refused_and_what_is_too_long_not_even_kept() -> None:
    with cache_of() as cache, page_of(cache) as page:
        for body, headers, words in (
            (b"{", {}, "cannot be read"),
            (b"\xff", {}, "cannot be read"),
            (b"", {"Content-Length": str(MAX_BODY_BYTES + 1)}, "give one of at most"),
            (bytes(MAX_BODY_BYTES + 1), {}, "give one of at most"),
            (bytes(MAX_BODY_BYTES), {"Content-Length": ""}, "give one of at most"),
            (b"", {"Content-Length": "-1"}, "give one of at most"),
            (b"", {"Content-Length": "1" * 5000}, f"'{'1' * 40}'; give one of at most"),
            (b"", {"Content-Length": ""}, "give one of at most"),
        ):
            code, told = post(page.url, body, **headers)
            assert code == 400 and words in told["error"]
        reply = http.client.HTTPConnection(urlsplit(page.url).netloc, timeout=10)
        reply.request("GET", "/query")
        assert reply.getresponse().status == 400


def test_who_asks_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_of_status, "_PATIENCE_S", 0.2)
    with cache_of() as cache, page_of(cache) as page:
        netloc = urlsplit(page.url)
        with socket.create_connection((netloc.hostname, netloc.port), timeout=10) as asking:
            asking.sendall(b"POST /nowhere HTTP/1.0\r\n\r\n")
            deadline = Deadline.after(10)
            with pytest.raises(ConnectionError):
                while not deadline.has_passed:
                    asking.sendall(bytes(1 << 16))


def test_retired_queries_leave_monitors_what_they_see() -> None:
    question = msgspec.json.encode({"model": "m", "token_ids": TOKENS})
    with cache_of() as cache, page_of(cache) as page:
        assert post(page.url, question)[0] == 200
        page.retire_queries()
        code, told = post(page.url, question)
        assert code == 503 and "until its server restarts" in told["error"]
        for path in ("/metrics", "/health", "/health/live", "/health/ready"):
            reply = http.client.HTTPConnection(urlsplit(page.url).netloc, timeout=10)
            reply.request("GET", path)
            assert reply.getresponse().status == 200


def test_a_worker_with_two_profiles_of_one_pair_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(PROFILE, tmp_path / "a.json")
    write_profile(msgspec.structs.replace(PROFILE, reason="another"), tmp_path / "b.json")
    given = {"family": FAMILY, "http": "0", "query": True, "profiles": [str(tmp_path)]}
    config = parse_config(msgspec.to_builtins(given), "config")
    monkeypatch.setattr(serve, "Cache", None)  # Which is not reached.
    with pytest.raises(ProfileError, match=r"a\.json and .*b\.json are of"):
        serve.run(config)


def test_a_served_worker_answers_only_where_its_file_says_so(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "pair.json")
    given = {"family": msgspec.to_builtins(FAMILY), "cache": {"host_bytes": 1 << 20}}
    with pytest.raises(ConfigError, match="query is true and http is not set"):
        parse_config({**given, "query": True}, "config")
    with pytest.raises(ConfigError, match="profiles are named and query is not true"):
        parse_config({**given, "http": "0", "profiles": [str(tmp_path)]}, "config")
    for query in ({"query": True, "profiles": [str(tmp_path)]}, {}):
        with serving(tmp_path, http="0", **query) as process:
            address, url = (process.stdout.readline().split()[-1] for _ in range(2))
            body = msgspec.json.encode({"model": R, "token_ids": TOKENS})
            reply = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
            reply.request("POST", "/query", body)
            answered = reply.getresponse()
            assert answered.status == (200 if query else 404)
            if query:
                assert json.loads(answered.read())["default"][address]["senders"] == []
