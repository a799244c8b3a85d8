"""`droidspeak verify` names what is wrong with two servers, for every kind of fault."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import msgspec
import pytest
import requests
from answering import answering

from sglang_droidspeak.cli import main
from sglang_droidspeak.cli import verify as command
from sglang_droidspeak.fleet.client import Client
from sglang_droidspeak.guard.plans import GuardState, WatchedPair, WatchedPlan
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.verify import answer as verify_answer
from sglang_droidspeak.verify.answer import Answer, difference, distance_of
from sglang_droidspeak.verify.checks import Run, all_checks
from sglang_droidspeak.verify.prompts import NUM_SUFFIXES, made

PAGE, BLOCK = 16, (2, 5)
Tokens = tuple[int, ...]


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_answer, "time", CLOCK)


class Served(Client):
    """A server that computes answers from token ids, with one fault."""

    def __init__(self, name: str, fault: str = "", peer: Served | None = None) -> None:
        super().__init__(f"http://{name}")
        self.fault, self.peer = fault, peer
        self.device: dict[str, list[Tokens]] = {}
        self.host: dict[str, list[Tokens]] = {}
        self.was_cancelled = False

    def post(self, path: str, timeout_s: float = 60, /, **body: Any) -> dict[str, Any]:
        if path == "/tokenize":
            shift = self.fault == "tokenizer"
            return {"tokens": [ord(it) + shift for it in body["prompt"]]}
        if path == "/detokenize":
            words = str.swapcase if self.fault == "words" else str
            return {"text": [words("".join(map(chr, it))) for it in body["tokens"]]}
        plan = WatchedPlan(block=BLOCK, e_corrected=False, allowed=0.05)
        pair = WatchedPair(sender="s", receiver="r", profile="", plans=(plan,), num_left=1)
        state = GuardState(shadow_rate=0.0, pairs=(pair,), suspects=())
        return msgspec.to_builtins(state)

    def flush(self) -> None:
        for salt, read in self.device.items():
            self.host.setdefault(salt, []).extend([] if self.fault == "flush" else read)
        self.device.clear()

    def replies(self, prompt, *, timeout_s=120.0, **asked):
        ids, salt = tuple(prompt), asked["cache_salt"]
        if self.fault == "dead" and self.device:
            raise requests.ConnectionError("gone")
        try:
            yield from self._replies(ids, salt, **asked)
        except GeneratorExit:
            self.was_cancelled = True
            raise

    def _replies(self, ids: Tokens, salt: str, **asked: Any) -> Iterator[dict[str, Any]]:
        label, cached = self._reuse(ids, salt, asked.get("droidspeak") or {})
        is_reused = label["outcome"] == "reused"
        CLOCK.now_s += (0.03 if self.fault == "slow" else 0.001) if is_reused else 0.006
        is_beside = threading.current_thread() is not threading.main_thread()
        is_crowded = is_beside and self.fault == "crowd"
        spoilt = is_crowded or (self.was_cancelled and self.fault == "cancel" and cached)
        spoilt = spoilt or (self.fault == "warm" and cached and label["outcome"] == "off")
        noise = (0.6 if self.fault in ("far", "exact") else 0.002) if is_reused else 0.0
        noise *= not label.get("exact") or self.fault == "exact"
        own, top = [], []
        for i in range(asked["max_new_tokens"]):
            likely = _likely((*ids, i), noise)
            if spoilt:
                likely = likely[::-1]
            own.append([likely[0][0], likely[0][1], None])
            top.append([[value, token, None] for value, token in likely])
        self.device.setdefault(salt, []).append(ids)
        for num in (1, len(own)):
            yield {
                "meta_info": {
                    "id": "an-id",
                    "prompt_tokens": len(ids),
                    "cached_tokens": cached,
                    "completion_tokens": num,
                    "output_token_logprobs": own[:num],
                    "output_top_logprobs": top[:num],
                    "droidspeak": [label],
                }
            }

    def _reuse(self, ids: Tokens, salt: str, controls: Mapping[str, str]) -> tuple[dict, int]:
        cached = max((_common(ids, it) for it in self._under(self, salt)), default=0)
        if self.fault == "cold":
            cached = max(cached, PAGE)
        if self.fault == "forgets":
            cached = 0
        off = controls.get("mode") == "off"
        own = max((_common(ids, it) for it in self.host.get(salt, [])), default=0)
        if own > cached and not off:
            return {"outcome": "own", "reused_tokens": own}, own
        if self.peer is None or (off and self.fault != "off"):
            return {"outcome": "off" if off else "no_match"}, cached
        offered = self._under(self.peer, salt)
        if self.fault == "document":
            offered = [ids for _ in offered]
        num = max((_common(ids, it) for it in offered), default=0)
        if num > cached and "late" in self.fault:
            self.fault = self.fault.removeprefix("late").strip()
            return {"outcome": "fallback: SlowLink"}, cached
        if num <= cached or self.fault == "no profile":
            outcome = "off" if off else "no_profile" if num else "no_match"
            return {"outcome": outcome}, cached
        if self.fault == "dear" and "block" not in controls:
            return {"outcome": "slower"}, cached
        label = {
            "outcome": "reused",
            "reused_tokens": num + (self.fault == "label"),
            "exact": self.fault == "exact",
            "sender": "s",
            "block": BLOCK,
        }
        return label, num

    def _under(self, server: Served, salt: str) -> list[Tokens]:
        """Return prompts that a server has read under a salt; with the fault, under any salt."""
        is_wrong = self.fault == "tenant" and server is self.peer
        salts = server.device if is_wrong else [salt]
        return [it for key in salts for it in server.device.get(key, [])]


def _likely(ids: Tokens, noise: float) -> list[tuple[float, int]]:
    """Return the log-probabilities of 20 tokens, the most likely first."""
    chosen = Random(hash(ids)).sample(range(1000), 20)
    values = [-0.1 - noise, *(-4.0 - i + 4 * noise for i in range(19))]
    return [*zip(values, chosen, strict=True)]


def _common(one: Tokens, other: Tokens) -> int:
    num = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    num = min(len(one), len(other)) if num is None else num
    return min(num, len(one) - 1) // PAGE * PAGE


def checked(fault: str = "", is_own_data: bool = True) -> dict[str, bool]:
    sender = Served("sender", fault if fault == "sender" else "")
    receiver = Served("receiver", fault, peer=sender)
    run = Run(
        sender=sender,
        receiver=receiver,
        prompts=[*made(receiver, 3, 160, PAGE, "seed")],
        page=PAGE,
        is_own_data=is_own_data,
        flushes=True,
        block="2:5",
    )
    return {it.name: it.ok for it in all_checks(run)}


def test_sound_servers_pass_every_check():
    results = checked()
    assert all(results.values()), results
    assert len(results) == 26


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("tokenizer", "tokenizer"),
        ("words", "tokenizer"),
        ("cold", "receiver: cold"),
        ("forgets", "receiver: warm"),
        ("forgets", "receiver: partial hit"),
        ("warm", "receiver: warm answer"),
        ("flush", "receiver: after a flush"),
        ("crowd", "receiver: four at once"),
        ("cancel", "receiver: cancel"),
        ("dead", "receiver: device"),
        ("no profile", "reuse"),
        ("always late", "reuse"),
        ("off", "mode off"),
        ("document", "another document"),
        ("tenant", "another tenant"),
        ("label", "labels"),
        ("exact", "exact answers"),
        ("far", "distance"),
        ("slow", "first token"),
    ],
)
def test_a_fault_is_named_by_its_check(fault, name):
    results = checked(fault)
    assert results[name] is False, results


@pytest.mark.parametrize(
    ("pages", "gate", "wrong"),
    [((16, 16), "enforce", []), ((16, 32), "enforce", ["page size"]), ((16, 16), "none", ["gate"])],
)
def test_settings_that_do_not_fit_are_named(pages, gate, wrong):
    linker = {"linker_extra_config": {"gate": gate}}
    states = [{"page_size": it, "unified_cache_external_linker_config": linker} for it in pages]
    results = [it for it in command.settings(states) if not it.ok]
    assert [it.name for it in results] == wrong and all(it.remedy for it in results)


def test_reuse_that_does_not_pay_is_tried_by_its_block_and_is_no_fault():
    results = checked("dear")
    assert all(results.values()), results
    assert "first token" in results, "it says that no time is saved"


@pytest.mark.parametrize("fault", ["late", "late dear"])
def test_one_load_that_comes_too_late_is_no_fault(fault):
    results = checked(fault)
    assert all(results.values()), results


def test_disk_that_fills_while_verify_runs_is_one_line_per_server(capsys):
    asked: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, object]:
        asked.append(path)
        if path == "/server_info":
            degraded = ["the disk cannot be written"] if "/generate" in asked else []
            known = {"health": {"live": True, "degraded": degraded}, "off": "", "names": {}}
            known |= {"peers": [], "pairs": [], "links": {}}
            return 200, {"internal_states": [{"page_size": PAGE, KEY: known}]}
        if path == "/tokenize":
            return 200, {"tokens": [*map(ord, body["prompt"])], "max_model_len": 4096}
        return 404, {}

    with answering(answer) as one, answering(answer) as other:
        assert main(["verify", one, other, "--num", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [it for it in lines if it.startswith("WRONG") and "the disk cannot be written" in it]
    assert [it.split(": ")[0] for it in wrong] == [f"WRONG {one}", f"WRONG {other}"], lines
    assert asked.count("/server_info") == 4, "each server before the requests and after them"


def test_distance_is_judged_on_a_users_own_data_alone():
    assert checked("far", is_own_data=False)["distance"]


def test_made_documents_are_whole_pages_that_nobody_has_seen():
    client = Served("any")
    one, two = (list(made(client, 2, 160, PAGE, seed)) for seed in "ab")
    assert all(len(it.prefix) == 160 and len(it.suffixes) == NUM_SUFFIXES for it in one + two)
    assert len({it.prefix for it in one + two}) == 4


def answer(tokens: Tokens, *likely: Mapping[int, float]) -> Answer:
    label: Any = None
    rest = {100 + i: -20.0 for i in range(20)}
    return Answer(0.1, tokens, tuple({**it, **rest} for it in likely), "id", 9, 0, label)


def test_a_near_tie_is_no_difference_and_ends_the_comparison():
    one = answer((1, 5), {1: -0.70, 2: -0.72}, {5: -0.1})
    tie = answer((2, 9), {1: -0.72, 2: -0.70}, {9: -0.1})
    other = answer((2, 9), {1: -3.0, 2: -0.1}, {9: -0.1})
    assert difference(one, tie) == ""
    assert "token 0 is 1 instead of 2" in difference(other, one)
    assert "differs by 0.40" in difference(one, answer((1, 5), {1: -0.7, 2: -0.72}, {5: -0.5}))


def test_the_distance_ends_where_the_texts_part():
    one = answer((1, 5), {1: -0.01}, {5: -0.01})
    assert distance_of(one, one) == 0
    parted = answer((1, 6), {1: -0.01}, {6: -0.01})
    assert distance_of(one, parted) == pytest.approx(0.495, abs=0.02)
    assert distance_of(answer((2, 5), {2: -0.01}, {5: -0.01}), one) > 0.9
