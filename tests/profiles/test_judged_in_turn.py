"""The gate judges context after context, keeps the scores, and continues after a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from shipped import ASKED, DATA, SHIPPED, flags

from cachetree.planning.profile import write_profile
from profiles import progress
from profiles.compute.journal import Journal
from profiles.compute.models import load_tokenizer
from profiles.data.records import context_digest, read_records, write_records
from profiles.evidence import MeasuredProfile, read_measured
from profiles.settings import Settings
from profiles.splits import load_splits
from sglang_droidspeak.cli import main

FAST = ["--dtype", "float32", "--group", "6", "--timing-seconds", "0", "--plans", "2"]
FAILED_GATE, UNDECIDED = 3, 4


def run(*args: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return main(["profile", *args]), said.getvalue()


def profiled(folder: Path, num_held_out: int, *more: str) -> tuple[int, str]:
    """Run a profile with three training contexts and `num_held_out` held-out contexts."""
    args = []
    for flag, name, number in (("--data", "train", 3), ("--held-out", "held_out", num_held_out)):
        records = read_records(DATA / f"{name}.jsonl")[: 3 * number]
        write_records(records, folder / f"{name}.jsonl")
        args += [flag, str(folder / f"{name}.jsonl")]
    out = str(folder / "pair.json")
    return run(*flags(SHIPPED[0]), *args, *ASKED, *FAST, *more, "--out", out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder for two runs: one with too few contexts, and one with more of them."""
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module")
def begun(folder: Path) -> tuple[MeasuredProfile, list[str], str]:
    status, said = profiled(folder, 3, "--tolerance", "0.5")
    assert status == FAILED_GATE, said
    (path,) = folder.glob(".*.jsonl")
    return read_measured(folder / "pair.json"), Journal(path).documents("held_out"), said


@pytest.fixture(scope="module")
def ended(folder: Path, begun: object) -> MeasuredProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LINE_EVERY_S", 0.0)
        status, said = profiled(folder, 16, "--tolerance", "0.5")
    assert status == 0, said
    (folder / "ended.log").write_text(said)
    return read_measured(folder / "pair.json")


def test_a_run_that_more_contexts_could_decide_says_so_and_keeps_its_journal(begun):
    profile, keys, said = begun
    assert "the same command goes on from here" in said
    assert "such contexts could show it, not 3" in profile.reason
    assert len(keys) == len(profile.judged.tasks) == 3


def test_with_more_contexts_the_run_goes_on_with_those_that_it_had_first(begun, ended):
    before, _, _ = begun
    num_before = len(before.held_out.contexts)
    assert ended.held_out.contexts[:num_before] == before.held_out.contexts
    assert ended.judged.full_prefill[:num_before] == before.judged.full_prefill


def test_contexts_that_an_earlier_run_has_judged_count_as_done_from_the_start(ended, folder):
    """If the time of these contexts were counted, the run would look faster than it is."""
    first, *_ = re.findall(r"^judging: (\d+)%", (folder / "ended.log").read_text(), re.M)
    assert int(first) == pytest.approx(100 * 3 / 16, abs=5)


def test_a_plan_is_judged_until_it_is_proven_and_no_longer(ended):
    """Each plan needs its own number of contexts, fewer than there are."""
    plans = [ended.frontier[it] for it in ended.order]
    numbers = [it.tasks[0].num_contexts for it in plans]
    assert numbers == [len(it) for it in ended.judged.plans]
    assert ended.passed and numbers[0] < 16
    assert max(numbers) == ended.held_out.num_contexts


def test_with_more_data_the_contexts_that_chose_a_plan_do_not_judge_it(tmp_path):
    """No step of the first run is measured again."""
    data, out = tmp_path / "data.jsonl", tmp_path / "pair.json"
    args = [*flags(SHIPPED[0]), "--data", str(data), *ASKED, *FAST, "--out", str(out)]
    args += ["--tolerance", "0.5"]
    records = read_records(DATA / "train.jsonl")
    write_records(records[: 3 * 8], data)
    status, said = run(*args)
    assert status == FAILED_GATE and "goes on from here" in said, said
    first, (path,) = read_measured(out), tmp_path.glob(".*.jsonl")
    _, *entries = map(json.loads, path.read_text().splitlines())
    measured = {(it["split"], it["document"], it["step"]) for it in entries}
    put, steps = Journal.put, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "put", lambda it, of: (put(it, of), steps.append(of)))
        write_records(records, data)
        status, said = run(*args)
    assert status == 0, said
    later = read_measured(out)
    assert later.train.contexts == first.train.contexts
    assert later.held_out.contexts[:4] == first.held_out.contexts
    assert later.held_out.num_contexts > 4
    assert not measured & {(it.split, it.document, it.step) for it in steps}
    assert_only_the_same_split_is_kept(data, out, {*first.train.contexts})


def assert_only_the_same_split_is_kept(data: Path, out: Path, chose: set[str]) -> None:
    sender, receiver = SHIPPED[0].sender, SHIPPED[0].receiver
    named = {"sender": sender.path, "receiver": receiver.path, "template": ASKED[1]}
    settings = Settings(**named, metric="f1", data=(str(data),), out=out)
    tokenizer = load_tokenizer(receiver)

    def chosen(**other: object) -> set[str]:
        train, _ = load_splits(dataclasses.replace(settings, **other), tokenizer, 512)
        return {it.context for it in train.documents}

    drawn = chosen(out=None)
    assert chosen() == chose != drawn
    assert chosen(sender=receiver.path) == drawn == chosen(out=data)
    assert chosen(held_out_share=0.75) == chosen(held_out_share=0.75, out=None)
    assert chosen(seed=1) == chosen(seed=1, out=None)
    lacking = [it for it in read_records(data) if context_digest(it.context) != min(chose)]
    write_records(lacking, data)
    assert chosen() == chosen(out=None)


def test_no_more_contexts_judge_than_are_asked_for(folder, tmp_path):
    status, said = profiled(tmp_path, 16, "--tolerance", "0.5", "--most-contexts", "4")
    assert status == FAILED_GATE, said
    assert read_measured(tmp_path / "pair.json").held_out.num_contexts <= 4


def test_a_verdict_is_computed_again_from_the_scores(ended, folder, tmp_path):
    out = tmp_path / "pair.json"

    def verified(profile: MeasuredProfile) -> tuple[int, str]:
        write_profile(profile, out)
        return run("show", str(out), "--verify-verdict")

    assert verified(ended) == (
        0,
        f"the verdict follows from the scores of {ended.held_out.num_contexts} contexts\n",
    )
    first, *rest = ended.judged.plans
    wrong = replace(ended.judged, plans=(((0.0,) * 3, *first[1:]), *rest))
    status, said = verified(replace(ended, judged=wrong))
    assert status == FAILED_GATE and "does not follow from the scores: the plan [" in said
    status, said = verified(replace(ended, reason="it is good"))
    assert status == FAILED_GATE and "it says 'it is good'" in said
    more = (*ended.blocks, replace(ended.blocks[0], start=1, stop=2))
    status, said = verified(replace(ended, blocks=more))
    assert status == FAILED_GATE and "[1, 2) is served" in said
    for best in (None, ended.blocks[-1], replace(ended.recommended, quality=0.5)):
        status, said = verified(replace(ended, recommended=best))
        assert status == FAILED_GATE and "it recommends" in said, said
    judged, whole = ended.judged, "the scores are not of all its plans, tasks, contexts and"
    for name, value in (
        ("plans", rest),
        ("plans", ((*first, *first), *rest)),
        ("plans", (((), *first[1:]), *rest)),
        ("full_prefill", judged.full_prefill[1:]),
        ("full_prefill", ((), *judged.full_prefill[1:])),
        ("tasks", (5, *judged.tasks[1:])),
        ("tasks", (-1, *judged.tasks[1:])),
        ("tasks", ()),
        ("tasks", (*judged.tasks, 0)),
    ):
        status, said = verified(replace(ended, judged=replace(judged, **{name: value})))
        assert status == FAILED_GATE and whole in said, (name, said)
    full, *plans = (((), *it[1:]) for it in (judged.full_prefill, *judged.plans))
    unasked = replace(judged, full_prefill=full, plans=tuple(plans))
    status, said = verified(replace(ended, judged=unasked))
    assert status == FAILED_GATE and whole in said
    status, said = verified(replace(ended, order=(99, *ended.order[1:])))
    assert status == FAILED_GATE and whole in said
    assert verified(replace(ended, judged=None))[0] == UNDECIDED
    for name, value, place in (
        ("full_prefill", ((99.0,) * 3, *judged.full_prefill[1:]), "full_prefill[0][0]"),
        ("plans", (((-1.0,) * 3, *first[1:]), *rest), "plans[0][0][0]"),
    ):
        status, said = verified(replace(ended, judged=replace(judged, **{name: value})))
        assert status == 1 and place in said and "float" in said, said
        assert len(said.strip().splitlines()) == 1


SCORED = [
    it for it in sorted(DATA.parents[1].glob("*/*.json")) if b'"judged": {' in it.read_bytes()
]


@pytest.mark.parametrize("file", SCORED, ids=lambda it: it.stem)
def test_the_verdict_of_a_shipped_profile_follows_from_its_scores(file):
    assert run("show", str(file), "--verify-verdict")[0] == 0
