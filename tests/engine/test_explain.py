"""A server explains one request: its outcome, the cause, the KV on offer, and the remedy."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import documented_outcomes
import msgspec
import pytest
from answering import answering
from test_labels import Counts, request
from test_planner import PAGE, planned
from test_policy import DEMAND, FAR, MEASURED, OTHER, PROFILES, R, S, match

from cachetree.ids import ModelId
from cachetree.names import ModelNames
from cachetree.planning import Considered, Link
from sglang_droidspeak.cli import main
from sglang_droidspeak.cli.ask import explanation_lines
from sglang_droidspeak.engine import asking
from sglang_droidspeak.request.answers import Answers, explained
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance
from sglang_droidspeak.request.planner import Declined
from sglang_droidspeak.request.report import MAX_ANSWERED, MAX_MATCHES, Label, Labels, consider
from sglang_droidspeak.store.pool import Held

SLOW = replace(MEASURED, links={FAR: Link(byte_s=1e-7)})


def answers(labels: Labels, refusal: str = "") -> Answers:
    planner = SimpleNamespace(profiles=PROFILES, refusal=lambda _req: refusal, heirs={})
    cache = SimpleNamespace(sources=lambda: (), names=ModelNames())

    def guard(_question: str) -> dict[str, Any]:
        raise ArithmeticError("a test")

    return Answers(cache, planner, labels, {}, PAGE, guard)  # type: ignore[arg-type]


def ask(source: Labels | Answers, page: str = asking.EXPLAIN, **question: Any) -> dict[str, Any]:
    output = SimpleNamespace(internal_state={"sglang": "its own"})
    asked = SimpleNamespace(rid=f"{page}: {json.dumps(question)}")
    source = source if isinstance(source, Answers) else answers(source)
    args = SimpleNamespace(model_path="/models/base")
    scheduler = SimpleNamespace(server_args=args, waiting_queue=(), tree_cache=None)
    source.add(output, scheduler, asked)  # type: ignore[arg-type]
    assert output.internal_state.keys() == {KEY}
    return json.loads(json.dumps(output.internal_state[KEY]))


def test_guard_of_a_server_that_reuses_nothing_says_why(labels):
    guard = {"shadow_rate": 0.0, "pairs": [], "suspects": []}
    asked = answers(labels)
    asked._guard = lambda _question: guard
    asked._planner.why_off = "weights_updated"  # type: ignore[misc]
    assert "not known what an update" in ask(asked, asking.GUARD)["off"]
    asked._planner.why_off = ""  # type: ignore[misc]
    assert ask(asked, asking.GUARD)["off"] == ""


@pytest.fixture
def labels() -> Labels:
    return Labels(Counts(), ModelNames())  # type: ignore[arg-type]


def answered(labels: Labels, rid: str, provenance: RequestProvenance) -> Any:
    req = request(rid)
    labels.note(req, provenance)
    labels.report([req])
    return req


def test_after_an_update_of_the_weights_no_prompt_is_planned(labels):
    asked = answers(labels, "weights_updated")
    assert ask(asked, input_ids=[1])["outcome"] == "weights_updated"


@pytest.mark.parametrize("outcome", sorted(documented_outcomes.outcomes() - {"aborted"}))
def test_every_outcome_has_its_cause_and_remedy(labels, outcome):
    answered(labels, "r1", RequestProvenance(outcome=outcome, detail="so"))
    reply = ask(labels, request_id="r1")
    page = re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", documented_outcomes.PAGE.read_text())
    written = f"### `{outcome}`\n\n- **Cause:** {reply['cause']}\n- **Remedy:** {reply['remedy']}\n"
    assert written in page
    assert (reply["outcome"], reply["detail"]) == (outcome, "so")
    assert (reply["prompt_tokens"], reply["page_tokens"]) == (3, PAGE)
    shown = "\n".join(explanation_lines(reply))
    assert f"outcome  {outcome}: so" in shown and reply["remedy"] in shown


def test_an_aborted_request_is_explained(labels):
    labels.aborted(None, None, request("r1"))
    assert ask(labels, request_id="r1")["outcome"] == "aborted"


@pytest.mark.parametrize(
    ("settings", "outcome", "reasons"),
    [
        ({}, "plan", {"taken", "not the best"}),
        ({"sender": R}, "plan", {"taken"}),
        ({"sender": "stranger"}, "no_profile", {"no_profile"}),
        ({"min_tokens": 161}, "too_short", {"too_short"}),
        ({"controls": {"block": "1:2"}}, "ungated_block", {"ungated_block"}),
        ({"max_recompute_tokens": 1}, "recompute_too_long", {"recompute_too_long"}),
        ({"costs": SLOW}, "slower", {"slower"}),
        ({"controls": {"sender": R}}, "no_match", {"not asked for"}),
        ({"controls": {"mode": "off"}}, "off", None),
        ({"controls": {"florp": 1}}, "bad_controls", None),
    ],
)
def test_what_a_request_was_chosen_from(settings, outcome, reasons):
    _, decision = planned(**settings)
    assert getattr(decision, "outcome", "plan") == outcome
    seen = decision.considered
    page = explained(Label(RequestProvenance(outcome=outcome), 161, seen), PAGE, PROFILES)
    shown = "\n".join(explanation_lines(msgspec.to_builtins(page, str_keys=True)))
    assert ("of them on the device" in shown) == (reasons is not None)
    if reasons is None:
        assert seen is None
        return
    assert seen is not None
    assert {way.reason for way in page.ways} == reasons
    assert page.full_prefill_s == pytest.approx(1.61)
    (holding,) = page.holdings
    assert (holding.num_pages, holding.e_pages[3]) == (10, 10)


SQL = SimpleNamespace(lora_name="sql", lora_path="/adapters/my sql")


def with_an_adapter(labels: Labels) -> Answers:
    """A base R, with an adapter of unknown content. Such an adapter reuses nothing."""
    asked = answers(labels)
    asked._lora_refs = {"1": SQL}  # type: ignore[dict-item]
    asked._planner = SimpleNamespace(  # type: ignore[assignment]
        profiles={},
        heirs={},
        refusal=lambda _req: "",
        meet=lambda _req: None,
        model_of=lambda lora_id: "a" * 32 if lora_id else R,
        held=lambda req, _tree: Held(0, 7 if req.lora_id else 0),
        plan=lambda *_: Declined("no_match"),
    )
    return asked


def test_a_pair_on_probation_is_named(labels):
    asked = with_an_adapter(labels)
    asked._planner.heirs = {(S, R): "probation", (S, "another"): "too_far"}  # type: ignore[assignment,dict-item]
    considered = Considered(DEMAND, [match(S)], MEASURED)
    labels.answered["r1"] = Label(RequestProvenance(outcome="reused"), 161, considered)
    reply = ask(asked, request_id="r1")
    assert reply["heirs"] == {S: "probation"}
    assert f"heir     of {S}: probation" in [*explanation_lines(reply)]


@pytest.mark.parametrize(
    ("sender", "remedy"),
    [
        (ModelId("a" * 32), "--sender /models/base --sender-lora '/adapters/my sql'"),
        (S, "--sender PATH_OF_elsewhere"),
        (OTHER.model_id, f"--sender PATH_OF_{OTHER.model_id}"),
    ],
)
def test_a_missing_profile_comes_with_the_command_that_makes_it(labels, sender, remedy):
    asked = with_an_adapter(labels)
    asked._cache.names.call(S, "elsewhere")
    considered = Considered(DEMAND, [match(sender)], MEASURED)
    labels.answered["r1"] = Label(RequestProvenance(outcome="no_profile"), 161, considered)
    shown = [*explanation_lines(ask(asked, request_id="r1"))]
    command = f"droidspeak profile {remedy} --receiver /models/base --data DATA.jsonl"
    assert f"missing  {command} --out PROFILE.json" in shown


def test_a_model_that_has_a_prompt_only_approximately_is_told(labels):
    reply = ask(with_an_adapter(labels), input_ids=[1, 2, 3])
    assert reply["approximate"] == {"a" * 32: 7}
    assert f"has it   {'a' * 32} only approximately: 7 pages" in "\n".join(explanation_lines(reply))
    own = ask(with_an_adapter(labels), input_ids=[1, 2, 3], adapter="sql")
    assert own["approximate"] == {}


@pytest.mark.parametrize("page", [asking.EXPLAIN, asking.GUARD])
def test_what_goes_wrong_with_a_question_is_its_answer(labels, page):
    assert "the server's log has more" in ask(labels, page, input_ids=[1])["error"]


def test_what_goes_wrong_with_a_state_is_told_beside_sglangs_own(labels):
    output = SimpleNamespace(internal_state={"sglang": "its own"})
    asked = answers(labels)
    del asked._cache.sources
    asked.add(output, SimpleNamespace(), SimpleNamespace(rid=None))  # type: ignore[arg-type]
    assert output.internal_state.pop("sglang") == "its own"
    assert "the server's log has more" in output.internal_state[KEY]["error"]


def test_the_last_thousand_are_known(labels):
    for number in range(MAX_ANSWERED + 1):
        answered(labels, f"r{number}", RequestProvenance(outcome="no_match"))
    assert ask(labels, request_id="r1")["outcome"] == "no_match"
    assert "no request 'r0' among the last 1000" in ask(labels, request_id="r0")["error"]
    assert "florp" in ask(labels, florp=1)["error"]
    assert "no adapter 'nobody'" in ask(labels, input_ids=[1], adapter="nobody")["error"]
    assert "no prompt" in ask(labels)["error"]
    assert "the server's log has more" in ask(labels, input_ids=[-1])["error"]


def test_who_has_many_to_choose_from_takes_the_room_of_others(labels):
    many = Considered(DEMAND, [match(S)] * (MAX_MATCHES // 2), MEASURED)
    for rid in ("a", "b", "b", "c"):
        req = request(rid)
        consider(req, many)
        labels.note(req, RequestProvenance(outcome="no_match"))
        labels.report([req])
    assert list(labels.answered) == ["b", "c"]


def test_what_a_retracted_request_is_planned_from_anew_changes_nothing(labels):
    """The request has been answered. It is explained by the KV that its answer was made of."""
    req = answered(labels, "r1", RequestProvenance(outcome="no_match"))
    consider(req, Considered(DEMAND, [match(S)], MEASURED))
    assert ask(labels, request_id="r1")["ways"] == []


def test_nothing_of_a_prompt_is_kept_or_told(labels):
    req = request("r1", origin_input_ids=array("q", [77_777] * 3))
    consider(req, Considered(DEMAND, [match(S)], MEASURED))
    labels.note(req, RequestProvenance(outcome="no_match"))
    labels.report([req])
    (label,) = labels.answered.values()
    assert "77777" not in repr(label) + repr(ask(labels, request_id="r1"))


def test_where_there_is_an_admin_key_the_page_asks_for_it():
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import auth

    for _ in range(2):
        asking.add_pages(KEY)
    assert [getattr(it, "path", "") for it in app.routes].count(asking.EXPLAIN) == 1
    scope = {"type": "http", "method": "POST", "path": asking.EXPLAIN, "headers": []}
    level = auth._get_auth_level_from_app_and_scope(app, scope)
    for key, is_allowed in (("admin", True), ("user", False), ("", False)):
        decision = auth.decide_request_auth(
            method="POST",
            path=asking.EXPLAIN,
            authorization_header=f"Bearer {key}" if key else None,
            api_key="user",
            admin_api_key="admin",
            auth_level=level,
        )
        assert decision.allowed == is_allowed


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Run a stand-in for SGLang's server with this extension. It has questions and answers by
    path."""
    state = SimpleNamespace(asked={}, says={}, status=200)

    def answer(path: str, question: Any) -> tuple[int, object]:
        state.asked[path] = question
        return state.status, state.says[path]

    with answering(answer) as state.url:
        yield state


def test_the_command_asks_and_prints(server, labels, tmp_path, capsys):
    measured = RequestProvenance(outcome="reused", reused_tokens=160, exact=False, fetch_ms=1.5)
    seen = Considered(DEMAND, [match(S)], MEASURED)
    page = explained(Label(measured, 161, seen, is_answered=True), PAGE, PROFILES)
    server.says[asking.EXPLAIN] = json.loads(msgspec.json.encode(page)) | {"names": {}}
    assert main(["explain", "r1", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert server.asked == {asking.EXPLAIN: {"request_id": "r1"}}
    assert "160 tokens reused, approximate: fetch 1.5 ms" in out
    assert "layers [3, 6) anew: " in out and "quality 0.960: taken" in out
    assert main(["explain", "r1", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.says[asking.EXPLAIN]

    server.says[asking.EXPLAIN] |= {"names": {"a" * 32: "base"}, "model": "a" * 32}
    assert main(["explain", "r1", "--url", server.url]) == 0
    assert "\nmodel    base (aaaaaaaa)\n" in (out := capsys.readouterr().out)
    for way in server.says[asking.EXPLAIN]["ways"]:  # Peers say what their models are called.
        way["sender"] = "\x1b]0;a title\x07a\nline"
    assert main(["explain", "r1", "--url", server.url]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(map(str.isprintable, shown))
    assert len(shown) == len(out.splitlines()) and "]0;a title a line" in " ".join(shown)

    server.says["/tokenize"] = {"tokens": [5, 6]}
    (tmp_path / "prompt").write_bytes("a\r\nβ".encode())
    text = ["explain", "--text", str(tmp_path / "prompt"), "--model", server.url]
    assert main([*text, "--cache-salt", "bob"]) == 0
    assert server.asked["/tokenize"] == {"prompt": "a\r\nβ"}
    assert server.asked[asking.EXPLAIN] == {"input_ids": [5, 6], "cache_salt": "bob"}


def test_the_command_says_what_is_wrong(server, capsys):
    server.says[asking.EXPLAIN], server.status = {"error": "no request 'r1' here"}, 404
    for argv, words in (
        (["explain", "r1"], "no request 'r1' here"),
        (["explain"], "give a REQUEST_ID, or a prompt"),
        (["explain", "r1", "--adapter", "a"], "adapter needs --text"),
        (["explain", "--text", "/no/such"], "text /no/such cannot be read"),
    ):
        assert main([*argv, "--url", server.url]) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    server.says[asking.EXPLAIN] = {"detail": "Not Found"}
    assert main(["explain", "r1", "--url", server.url]) == 1
    assert "runs without droidspeak" in capsys.readouterr().err
    for server.status in (401, 403):
        assert main(["explain", "r1", "--url", server.url]) == 1
        assert "give --api-key" in capsys.readouterr().err


def test_a_way_without_pages_names_neither_pages_nor_layers():
    way = {"sender": "a", "location": "pool", "pages": [26, 26], "block": [6, 24]}
    way |= {"quality": 0.9, "reason": "too_short"}
    reply = {"outcome": "too_short", "detail": "", "cause": "", "remedy": "", "model": ""}
    reply |= {"approximate": {}, "heirs": {}, "profile_command": ""}
    reply |= {"prompt_tokens": 416, "page_tokens": 16, "device_pages": 26, "full_prefill_s": None}
    (line,) = [
        it
        for it in explanation_lines(reply | {"holdings": [], "ways": [way], "measured": None})
        if it.startswith("way")
    ]
    assert line == "way      a at pool: too_short"
