"""`droidspeak profile --adapters` and `--models`: several pairs in one run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from measuring_parts import bench_of
from msgspec.structs import replace as changed
from sample_profile import failed_profile, sample_profile
from shipped import ASKED, DATA, SHIPPED, WEIGHTS
from test_profile_command import FAST, run

from cachetree import ConfigError, write_profile
from profiles.compute.measuring import judging_steps, measure
from profiles.compute.study import HELD_OUT, REFERENCES
from profiles.data.documents import key_of
from profiles.data.records import context_digest, read_records, write_records
from profiles.evidence import read_measured
from profiles.forecast import endless
from profiles.many import Outcome, is_made_as, outcome_table
from profiles.pairs import Wanted
from profiles.report.derived import next_steps
from profiles.settings import Settings
from tools.pairs.questions import read_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write the adapters of a base. Two of them have data."""
    adapters = tmp_path_factory.mktemp("adapters")
    for name in ("receiver_lora", "slim_lora", "sender_alora"):
        shutil.copytree(WEIGHTS / name, adapters / name)
    for name in ("receiver_lora", "slim_lora"):
        write_records(read_records(DATA / "train.jsonl")[:12], adapters / f"{name}.jsonl")
    return adapters


def many(folder: Path, out: Path, *more: str) -> tuple[int, str]:
    few = [*FAST, "--group", "6", "--plans", "2", "--timing-seconds", "0", "--tolerance", "0.9"]
    args = ["--adapters", str(folder), "--base", str(WEIGHTS / "foundation"), "--out", str(out)]
    return run(*args, *ASKED, *few, *more)


def test_one_command_profiles_what_can_matter_and_says_why_not_the_rest(
    folder, tmp_path, monkeypatch
):
    for module in "profiler", "many":
        monkeypatch.setattr(f"profiles.{module}.slow_dtype", lambda *_: ("a slow dtype",))
    out = tmp_path / "profiles"
    (out / "base_to_slim_lora.json").mkdir(parents=True)
    status, said = many(folder, out)
    assert status == 3, said
    first, second = "1 of 2: base → receiver_lora", "2 of 2: base → slim_lora"
    assert said.index("Pairs to profile: about") < said.index(first) < said.index(second)
    assert said.count("a slow dtype") == 1
    assert said.index("a slow dtype") < said.index("Pairs to profile"), "before it is forecast"
    assert "all of sender_alora" in said and "any → base" in said
    assert said.count("timing: done") == 1, "both receivers are of one shape"
    assert "prompts: of the log" not in said, "there is none"
    assert "1 of 2 pairs passed" in said and "cannot be a profile" in said.replace("\n", " ")
    profile = read_measured(out / "base_to_receiver_lora.json")
    assert profile.passed and profile.made.metric == "f1"
    assert profile.pair == "base (bc31127d) → receiver_lora (55734803)"
    page = (out / "index.html").read_text()
    assert "base → slim_lora" in page and "not measured" in page and "activated adapter" in page

    (out / "base_to_slim_lora.json").rmdir()
    status, said = many(folder, out)
    assert status == 0, said
    assert "base_to_receiver_lora.json is of these models and data" in said
    assert "timing: done" not in said, "the first run kept it"
    assert "2 of 2 pairs passed" in said

    status, said = many(folder, out, "--max-new", "7")
    assert status == 0, said
    assert "is of these models and data" not in said
    profile = read_measured(out / "base_to_receiver_lora.json")
    made = profile.made
    assert (made.max_new, made.e_correction) == (7, False)

    def refuse(*_: object) -> None:
        raise ConfigError("it is measured again")

    monkeypatch.setattr("profiles.many.profile_pair", refuse)
    records = read_records(DATA / "train.jsonl")[12:13]
    write_records(records, tmp_path / "fit.jsonl")
    digest = context_digest(records[0].context)
    again = "base → receiver_lora: it is measured again"
    fits = "--max-new", "7", "--e-correction", "--fit-data", str(tmp_path / "fit.jsonl")
    for fitted, more, is_kept in (
        ((digest,), fits, True),
        (("another",), fits, False),
        ((digest,), fits[:3], False),
        ((), fits[:3], True),
    ):
        before = changed(made, fitted=fitted, e_correction=True)
        write_profile(changed(profile, made=before), out / "base_to_receiver_lora.json")
        _, said = many(folder, out, *more)
        assert (again in said.replace("\n", " ")) != is_kept, said


def test_a_profile_that_was_made_otherwise_is_no_profile_of_this_run():
    settings = Settings(template="{context} {input}", metric="f1", max_new=8, group=2, chat=True)
    made = changed(
        sample_profile().made,
        **{it: getattr(settings, it) for it in ("template", "metric", "max_new", "group")},
        **{it: getattr(settings, it) for it in ("dtype", "seed", "page_size", "pruned", "chat")},
    )
    assert is_made_as(settings, made) and is_made_as(replace(settings, group=None), made)
    assert is_made_as(settings, changed(made, e_correction=False))
    assert is_made_as(replace(settings, e_correction=True), made), "an old profile does not say"
    assert not is_made_as(replace(settings, e_correction=True), changed(made, e_correction=False))
    others = {"template": "{context}: {input}", "metric": "same", "chat": False, "max_new": 9}
    others |= {"dtype": "float32", "seed": 1, "page_size": 1, "pruned": False, "group": 1}
    for name, value in (others | {"max_prompt_tokens": 99}).items():
        assert not is_made_as(replace(settings, **{name: value}), made), name


def test_models_whose_pairs_would_share_a_file_are_refused(folder, tmp_path):
    base, adapter = (str(WEIGHTS / it) for it in ("foundation", "receiver_lora"))
    tuned = {"model": base, "adapter": adapter, "data": [str(folder / "receiver_lora.jsonl")]}
    names = {"base": {"model": base}, "org/tuned": tuned, "org_tuned": tuned}
    (models := tmp_path / "models.yaml").write_text(json.dumps(names))
    status, said = run("--models", str(models), "--out", str(tmp_path / "out"), *ASKED, *FAST)
    assert status == 1 and said == (
        "droidspeak: base → org/tuned and base → org_tuned would both be written to "
        "base_to_org_tuned.json; rename a model\n"
    )


def test_without_a_pair_the_reasons_are_said_in_one_line(tmp_path):
    shutil.copytree(WEIGHTS / "sender_alora", tmp_path / "a" / "sender_alora")
    status, said = many(tmp_path / "a", tmp_path / "out")
    assert status == 1 and len(said.strip().splitlines()) == 1
    assert "no pair can be profiled: all of sender_alora: sender_alora is an activated" in said


def test_pairs_of_a_receiver_ask_for_its_answers_once():
    """The second bench uses the answers of the first, whatever they are."""
    pair = SHIPPED[0].load()
    documents = read_documents(DATA / "train.jsonl", pair.tokenizer)[:2]
    answers = {key_of(it): [(7, 8)] * 3 for it in documents[:1]}
    with bench_of(pair, documents) as bench:
        measure(
            replace(bench, answers=answers), HELD_OUT, documents, judging_steps(documents, [], 12)
        )
        entries = [bench.journal.get(HELD_OUT, key_of(it), REFERENCES) for it in documents]
    assert entries[0].answers == ((7, 8),) * 3
    assert answers[key_of(documents[1])] == list(entries[1].answers)


def test_a_failed_pair_without_next_steps_says_its_reason():
    failed = changed(sample_profile(), passed=False, recommended=None, order=(), reason="ask more")
    wanted = Wanted(sender="base", receiver="json")
    table = outcome_table([Outcome(wanted=wanted, profile=failed)])
    assert table.rows == (("base → json", "failed", "–", "–", "ask more"),)


def test_next_step_names_the_cause():
    assert next_steps(sample_profile()) == []
    quarter = changed(sample_profile(), full_prefill_quality=0.25)
    assert next_steps(quarter) == [
        "full prefill itself has only 0.250: look at template, data and metric first"
    ]
    slow = tuple(changed(it, ttft_s=9.0) for it in sample_profile().frontier)
    (step,) = next_steps(changed(sample_profile(), frontier=slow))
    assert step.startswith("no plan is faster than full prefill at ")


@pytest.mark.parametrize(
    ("needed", "says"),
    [
        (420, "about 420 held-out contexts of each task could prove [1, 9): give twice as many "),
        (5_000, "no amount of data that you will have could prove [1, 9)"),
        (None, "[1, 9) loses more than 5 %: more data would not change that"),
    ],
)
def test_a_failed_pair_says_how_many_contexts_would_decide(needed, says):
    profile = failed_profile()
    first = profile.frontier[profile.order[0]]
    loss = changed(first.tasks[0], bound=0.3, needed=needed)
    plans = [*profile.frontier]
    plans[profile.order[0]] = changed(first, start=1, stop=9, tasks=(loss,))
    (step,) = next_steps(changed(profile, frontier=tuple(plans)))
    assert step.startswith(says)


def test_answers_without_a_draft_are_forecast_as_long_as_they_may_be():
    from test_progress import FORECAST

    pair_documents = read_documents(DATA / "train.jsonl", SHIPPED[0].load().tokenizer)[:4]
    steps = judging_steps(pair_documents, [], 12)
    short_s = sum(FORECAST.steps(pair_documents, steps))
    assert sum(FORECAST.steps(endless(pair_documents), steps)) > short_s
