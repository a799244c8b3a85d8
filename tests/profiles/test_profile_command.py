"""`droidspeak profile` as a user runs it: verdicts, interruptions, mistakes, what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from shipped import ASKED, DATA, SHIPPED, WEIGHTS, flags
from stranger import SEED, write_stranger

from cachetree import ConfigError
from cachetree.corrections import read_corrections
from cachetree.planning import BlockQuality
from cachetree.planning.profile import write_profile
from profiles.cli import _made_as, settings_of
from profiles.compute.fitting import fit_maps
from profiles.compute.journal import Journal
from profiles.compute.layered import LayeredModel
from profiles.compute.study import DocumentPasses
from profiles.data.documents import in_drawn_order
from profiles.data.records import read_records, write_records
from profiles.evidence import BaselineKind, Fidelity, MeasuredProfile, read_measured
from profiles.settings import Settings
from profiles.stats.gate import is_within
from profiles.verification import Verification
from sglang_droidspeak.cli import main, parser
from tools.pairs.questions import make_records, read_documents

FINE_TUNES = SHIPPED[0]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
UNSEEN_SEED = 3003
UNSEEN_DOCUMENTS = 75
"""Number of unseen documents. With fewer than 71, no plan is proven, even without any loss."""
FAILED_GATE, UNDECIDED = 3, 4
FAST = ["--dtype", "float32"]
"""A CPU takes five times as long in bf16."""


def run(*args: str) -> tuple[int, str]:
    """Run the command in this process, which has imported all that it needs. Return its status and
    output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return main(["profile", *args]), said.getvalue()


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> list[str]:
    """Return the flags of a small profile: three training contexts, three held out, blocks of four
    layers or more, and the tolerance that so few contexts can prove."""
    folder = tmp_path_factory.mktemp("few")
    data = []
    for flag, name, number in (("--data", "train", 9), ("--held-out", "held_out", 9)):
        write_records(read_records(DATA / f"{name}.jsonl")[:number], folder / f"{name}.jsonl")
        data += [flag, str(folder / f"{name}.jsonl")]
    few = [*FAST, "--group", "4", "--timing-seconds", "0", "--tolerance", "0.9"]
    return [*flags(FINE_TUNES), *data, *ASKED, *few]


def journals(folder: Path) -> list[Path]:
    return list(folder.glob(".*.jsonl"))


def num_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in journals(folder))


def killed(args: list[str], folder: Path, after_lines: int) -> int:
    """Run until the journal has `after_lines` more lines, then end the process."""
    target = num_lines(folder) + after_lines
    command = [sys.executable, "-m", "sglang_droidspeak.cli", "profile", *args]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=ENVIRONMENT, **piped)
    deadline = time.monotonic() + 120
    while num_lines(folder) < target and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.poll() is None, process.stdout.read().decode()
    process.kill()
    process.communicate(timeout=240)
    return process.returncode


def interrupted(args: list[str], after_lines: int) -> int:
    """Run until the journal has `after_lines` lines, then raise what Ctrl-C raises."""
    put, left = Journal.put, [None] * after_lines

    def put_or_stop(journal: Journal, entry: object) -> None:
        put(journal, entry)
        left.pop()
        if not left:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "put", put_or_stop)
        return run(*args)[0]


def measured(profile: MeasuredProfile) -> MeasuredProfile:
    """Return the profile without what differs from run to run: times, and the number of
    interruptions."""
    without_s = {"ttft_s": 0.0}
    return msgspec.structs.replace(
        profile,
        costs=None,
        made=None,
        frontier=tuple(msgspec.structs.replace(it, **without_s) for it in profile.frontier),
        baselines=tuple(msgspec.structs.replace(it, **without_s) for it in profile.baselines),
    )


def test_a_run_that_was_stopped_twice_ends_like_one_that_was_not(few, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    few = [*few, "--plans", "2"]
    status, said = run(*few, "--out", str(whole / "pair.json"))
    assert status == 0, said
    stopped.mkdir()
    args = [*few, "--out", str(stopped / "pair.json")]
    assert interrupted(args, 4) == 130
    assert num_lines(stopped) == 4
    assert killed(args, stopped, 6) == -signal.SIGKILL
    assert num_lines(stopped) >= 4 + 6
    assert not (stopped / "pair.json").exists()
    status, said = run(*args)
    assert status == 0, said
    begun = [line.partition(":")[0] for line in said.splitlines()]
    assert "timing" not in begun, "the cost model was measured before the first stop"

    one, other = read_measured(whole / "pair.json"), read_measured(stopped / "pair.json")
    assert measured(one) == measured(other)
    # Each time one pass is lost, and the two that the others are compared with are made again.
    assert 0 <= other.made.prefix_passes - one.made.prefix_passes <= 2 * 2
    assert journals(whole) == journals(stopped) == []
    assert one.made.sweep_passes_per_context == 3 + 1
    assert one.controls.startswith("without the document 0% and with another document ")


@pytest.mark.parametrize("fit_data", [False, True])
def test_corrected_plans_are_tried_with_maps_of_the_contexts_to_fit_on(few, tmp_path, fit_data):
    """The plans are served, judged and read back like others."""
    data, out = tmp_path / "more.jsonl", tmp_path / "pair.json"
    write_records(read_records(DATA / "train.jsonl")[:18], data)
    args = [*few, "--group", "3", "--plans", "4", "--out", str(out)]
    if fit_data:
        args += ["--fit-data", str(data)]
    else:
        args[args.index("--data") + 1] = str(data)
    status, said = run(*args, "--e-correction")
    assert status == 0, said
    profile = read_measured(out)
    assert profile.made.e_correction
    corrected = [it for it in profile.frontier if it.e_map is not None]
    assert corrected, "on this pair a map stays closer to full prefill than none"
    assert any(it.e_map is None for it in profile.frontier)
    assert "E corrected" in run("show", str(out))[1]
    maps = read_corrections(profile, out)
    assert len(maps) == len(profile.e_maps) > 0

    pair = FINE_TUNES.load()
    models = LayeredModel(pair.sender), LayeredModel(pair.receiver)
    layers = sorted({it.layer for it in profile.e_maps})
    documents = in_drawn_order(read_documents(data, pair.tokenizer), seed=0)
    contexts = (DocumentPasses(*models, it.prefix, layers, layers) for it in documents)
    for layer, expected in fit_maps(contexts, layers, torch.float32, "cpu").items():
        (used_map,) = (maps[at.sha256] for at in profile.e_maps if at.layer == layer.layer)
        for one, other in zip(used_map.tensors, expected.tensors, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)
    held_out = few[few.index("--held-out") + 1]
    if fit_data:
        assert_what_maps_were_fitted_on_judges_nothing(out, data, held_out)
        return
    assert_what_servers_use_is_measured_anew(out, tmp_path / "others.jsonl")
    before = tuple(msgspec.structs.replace(it, tv_bound=None) for it in profile.blocks)
    best = msgspec.structs.replace(profile.recommended, tv_bound=None)
    write_profile(msgspec.structs.replace(profile, blocks=before, recommended=best), out)
    status, said = run("calibrate", str(out), *flags(FINE_TUNES), *FAST, "--data", held_out)
    assert status == 0 and said.count("of full prefill") == len(profile.blocks) - 1 > 1, said
    calibrated_profile = read_measured(out)
    bounds = [it.tv_bound for it in (*profile.blocks, profile.recommended)]
    calibrated = [
        it.tv_bound for it in (*calibrated_profile.blocks, calibrated_profile.recommended)
    ]
    assert_no_looser(calibrated, bounds)
    assert journals(tmp_path) == []

    write_records(read_records(DATA / "held_out.jsonl")[:27], data)
    assert run("calibrate", str(out), *flags(FINE_TUNES), *FAST, "--data", str(data))[0] == 0
    tighter = read_measured(out).blocks
    assert all(
        before is None or it.tv_bound < before - 0.1
        for it, before in zip(tighter, bounds, strict=False)
    )


def assert_no_looser(calibrated: list[float | None], bounds: list[float | None]) -> None:
    """Check that no bound grows when all held-out contexts are judged. A plan that was proven early
    had been judged on some of them."""
    for after, before in zip(calibrated, bounds, strict=True):
        assert after is before is None or 0 < after <= before + 1e-4


def assert_what_servers_use_is_measured_anew(out: Path, others: Path) -> None:
    """Check that each number that servers use is measured on other contexts of other lengths, also
    for corrected plans."""
    write_records(read_records(DATA / "held_out.jsonl")[18:27], others)
    profile = read_measured(out)
    used = {(it.block, it.e_map): it for it in profile.blocks}
    stale = Fidelity(kl=9.0)
    points = tuple(msgspec.structs.replace(it, fidelity=stale) for it in profile.frontier)
    write_profile(msgspec.structs.replace(profile, frontier=points), out)
    args = ["verify", str(out), *flags(FINE_TUNES), *FAST, "--data", str(others), "--json"]
    status, said = run(*args)
    assert status == 0, said
    verified = msgspec.json.decode(said.splitlines()[-1], type=Verification)
    assert verified.split.mean_lengths != profile.held_out.mean_lengths
    assert [(it.block, it.e_map) in used for it in points].count(True) == len(verified.plans) > 1
    assert verified.holds and any(it.e_map is not None for it in verified.plans)
    for plan in verified.plans:
        assert (plan.block, plan.e_map) in used and plan.fidelity.kl < 1.0
        expected = profile.costs.ttft_s((plan.block,), *verified.split.mean_lengths)
        assert plan.ttft_s == pytest.approx(expected)


def assert_what_maps_were_fitted_on_judges_nothing(out: Path, fitted_on: Path, held_out: str):
    """Check that the contexts on which maps were fitted judge nothing, not even the three contexts
    that were not used to choose."""
    write_records(read_records(fitted_on)[9:], fitted_on)
    profile, args = read_measured(out), [str(out), *flags(FINE_TUNES), *FAST, "--data"]
    status, said = run("verify", *args, str(fitted_on))
    assert status == 1 and "3 of 3 contexts (100%) are the profile's own" in said, said
    assert run("calibrate", *args, held_out, "--data", str(fitted_on))[0] == 0
    bounds, new_bounds = ([it.tv_bound for it in of.blocks] for of in (profile, read_measured(out)))
    assert_no_looser(new_bounds, bounds)


def test_maps_are_fitted_on_nothing_that_judges(few, tmp_path):
    held_out = few[few.index("--held-out") + 1]
    args = [*few, "--out", str(tmp_path / "pair.json"), "--fit-data", held_out]
    status, said = run(*args, "--e-correction")
    assert status == 1
    assert "contexts are both in --fit-data and among those that judge" in said
    assert "measuring" not in said, "nothing was computed"
    status, said = run(*args)
    assert status == 1
    assert "--fit-data is given without --e-correction" in said


def test_fit_of_maps_that_needs_too_much_memory_is_refused_before_measuring(few, tmp_path):
    records = read_records(DATA / "train.jsonl")[:3]
    long = [msgspec.structs.replace(it, context=f"{it.context} " * 4) for it in records]
    write_records(long, tmp_path / "long.jsonl")
    args = [*few, "--out", str(tmp_path / "pair.json"), "--max-memory-gb", "0.022"]
    status, said = run(*args, "--e-correction", "--fit-data", str(tmp_path / "long.jsonl"))
    assert status == 1 and "--max-memory-gb is 0.022, and a context of 5" in said, said
    assert "with maps of E from 2 layers, needs 0.0" in said
    assert "timing" not in said, "nothing was computed"


def test_sweep_without_a_right_answer_says_so(few, tmp_path):
    """The template or the metric is wrong. Without this message, only the verdict at the end would
    show it."""
    right, wrong = few[few.index("--data") + 1], tmp_path / "wrong.jsonl"
    train = read_records(Path(right))
    write_records([msgspec.structs.replace(it, answers=("nothing",)) for it in train], wrong)
    args = [str(wrong) if it == right else it for it in few]
    _, said = run(*args, "--group", "12", "--out", str(tmp_path / "pair.json"))
    lines = said.splitlines()
    (place,) = (i for i, it in enumerate(lines) if it.startswith("the receiver alone answers no"))
    assert lines[place].endswith("right so far; check data, template and metric")
    assert lines[place - 1].startswith("measuring") and lines[place + 1].startswith("choosing")


def test_the_summary_comes_first_and_the_verdict_last(few, tmp_path, monkeypatch):
    args = [*few, "--out", str(tmp_path / "pair.json"), "--no-prune", "--group", "6"]
    args += ["--small", str(WEIGHTS / "foundation")]
    monkeypatch.setattr(sys, "argv", ["/bin/droidspeak", "profile", *args])
    status, said = run(*args)
    assert status == 0, said
    lines = said.splitlines()
    summary = next(i for i, line in enumerate(lines) if line.startswith("12 layers, 3 blocks"))
    measuring = next(i for i, line in enumerate(lines) if line.startswith("measuring"))
    assert "6 contexts, about" in lines[summary]
    assert lines.index("timing the receiver, to forecast all that follows") < summary
    assert summary < measuring
    assert f"wrote {tmp_path / 'pair.json'}" in said
    profile = read_measured(tmp_path / "pair.json")
    assert [(it.start, it.stop) for it in profile.measured] == [(0, 6), (0, 12), (6, 12)]
    assert not profile.made.pruned and profile.made.metric == "f1"
    assert profile.made.command.startswith("droidspeak profile --sender sender --receiver receiver")
    assert "--data train.jsonl --held-out held_out.jsonl " in profile.made.command
    assert "'<bos> {context} {input}'" in profile.made.command
    assert " /" not in profile.made.command, "folders of this machine say nothing elsewhere"
    (baseline,) = (it for it in profile.baselines if it.kind is BaselineKind.SMALL_MODEL)
    assert baseline.ttft_s > 0 and baseline.quality.mean < profile.full_prefill_quality


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("unseen") / "unseen.jsonl"
    write_records(make_records("unseen", UNSEEN_SEED, UNSEEN_DOCUMENTS), path)
    return path


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_verdict_of_a_shipped_pair_holds_on_unseen_data(shipped, unseen, tmp_path, capsys):
    """Only the recommended plan is tried, because it decides. Without this limit, the other plans
    would be measured, too."""
    profile, path = read_measured(shipped.profile), tmp_path / "pair.json"
    chosen = profile.recommended
    write_profile(profile.limited_to((chosen, profile.blocks[-1]), ""), path)
    args = [*flags(shipped), *FAST, "--data", str(unseen), "--json"]
    assert main(["profile", "verify", str(path), *args]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["holds"] is True
    assert [(it["start"], it["stop"]) for it in verified["plans"]] == [(chosen.start, chosen.stop)]
    assert verified["split"]["num_questions"] == 3 * UNSEEN_DOCUMENTS


def test_a_pair_that_was_not_trained_together_fails(tmp_path):
    """The stranger answers as well as the shipped sender, but no other model can read its cache."""
    write_stranger(WEIGHTS / "sender", tmp_path / "stranger", SEED)
    pair = ["--sender", str(tmp_path / "stranger"), "--receiver", str(WEIGHTS / "receiver"), *FAST]
    train = tmp_path / "train.jsonl"
    write_records(read_records(DATA / "train.jsonl")[:12], train)
    data = ["--data", str(train), *ASKED, "--group", "4", "--timing-seconds", "0", "--plans", "2"]
    out = tmp_path / "pair.json"
    status, said = run(*pair, *data, "--out", str(out))
    assert status == FAILED_GATE, said
    profile = read_measured(out)
    assert not profile.passed
    assert profile.recommended is None
    assert "no plan smaller than all layers passed" in profile.reason
    assert {(it.start, it.stop) for it in profile.blocks} == {(0, 12)}
    assert (profile.train.num_contexts, profile.held_out.num_contexts) == (2, 2)
    status, said = run("verify", str(out), *pair, "--data", "read by nobody")
    assert status == 1 and "none of its plans is served; profile the pair on these data" in said


def claim_too_little(file: Path, *others: BlockQuality) -> None:
    """Write a profile that recommends too small a block, and has the blocks `others` beside it. Its
    tolerance is so large that eight contexts can show that the shipped plan passes."""
    profile = read_measured(FINE_TUNES.profile)
    small = next(point for point in profile.frontier if len(point.block) == 1)
    claimed = msgspec.structs.replace(
        profile.recommended, start=small.start, stop=small.stop, quality=0.99
    )
    claiming = profile.limited_to((claimed, *others), "")
    write_profile(msgspec.structs.replace(claiming, tolerance=0.4), file)


def test_a_wrong_verdict_does_not_hold(unseen, tmp_path, capsys):
    """The output does not say that no plan passed, because another plan did."""
    wide = read_measured(FINE_TUNES.profile).recommended
    claim_too_little(tmp_path / "pair.json", wide)
    some = tmp_path / "some.jsonl"
    write_records(read_records(unseen)[:24], some)
    args = [*flags(FINE_TUNES), *FAST, "--data", str(some), "--json"]
    assert main(["profile", "verify", str(tmp_path / "pair.json"), *args]) == FAILED_GATE
    verified = msgspec.json.decode(capsys.readouterr().out, type=Verification)
    passes = {it.block: is_within(it.tasks, 0.4) for it in verified.plans}
    assert list(passes.values()).count(True) == 1 and passes[wide.block]
    assert verified.reason.startswith("the plan [4, 5) has 0.083 where full prefill has 1.000")
    assert not verified.holds


@pytest.mark.parametrize("right", ["nothing", "what full prefill does not say"])
def test_data_of_which_full_prefill_answers_nothing_are_refused(right, unseen, tmp_path, capsys):
    """The template or the metric is wrong, so the data say nothing about the profile."""
    claim_too_little(tmp_path / "pair.json")
    records, some = read_records(unseen)[:24], tmp_path / "some.jsonl"
    known = {word for it in records for word in " ".join(it.answers).split()}
    for place, record in enumerate(records):
        others = tuple(sorted(known - {*" ".join(record.answers).split()}))
        answers = ("nothing",) if right == "nothing" else others
        records[place] = msgspec.structs.replace(record, answers=answers)
    write_records(records, some)
    args = [*flags(FINE_TUNES), *FAST, "--data", str(some)]
    assert main(["profile", "verify", str(tmp_path / "pair.json"), *args]) == 1
    said = "answers nothing right on held-out questions, so no loss can be judged; check data, temp"
    assert said in capsys.readouterr().err


def test_too_few_data_are_reported_and_change_no_verdict(unseen, tmp_path, capsys):
    """Before models are loaded, the command says how many contexts it needs. Later it says that
    these show nothing."""
    profile, some = read_measured(FINE_TUNES.profile), tmp_path / "some.jsonl"
    write_profile(profile.limited_to((profile.recommended,), ""), tmp_path / "pair.json")
    write_records(read_records(unseen)[:24], some)
    args = [*flags(FINE_TUNES), *FAST, "--data", str(some)]
    assert main(["profile", "verify", str(tmp_path / "pair.json"), *args]) == UNDECIDED
    said = capsys.readouterr().out
    assert said.startswith("8 held-out contexts of biographies are hardly enough to pass")
    assert said.endswith("these data cannot show whether the profile's verdict holds\n")


def test_data_that_have_some_of_the_profiles_contexts_are_refused(unseen, tmp_path, capsys):
    """The profile's data with more records, or without one record, have no or few new contexts."""
    own, some = read_records(DATA / "held_out.jsonl"), tmp_path / "some.jsonl"
    args = ["verify", str(FINE_TUNES.profile), *flags(FINE_TUNES), "--data", str(some)]
    for records, says in (
        ([*read_records(unseen)[:9], *own[:3]], "1 of 4 contexts (25%)"),
        (own[:-1], "24 of 24 contexts (100%)"),
    ):
        write_records(records, some)
        assert main(["profile", *args]) == 1
        assert f"{says} are the profile's own" in capsys.readouterr().err


def test_a_profile_is_verified_as_it_was_made():
    made = {"chat": True, "page_size": 32, "max_prompt_tokens": 64, "max_new": 5}
    profile = read_measured(FINE_TUNES.profile)
    profile = msgspec.structs.replace(profile, made=msgspec.structs.replace(profile.made, **made))
    for options, changed in (([], {}), (["--max-new", "3"], {"max_new": 3})):
        args = parser().parse_args(["profile", "verify", "x", *flags(FINE_TUNES), *options])
        settings = settings_of(args, _made_as(profile, args), Settings)
        assert {it: getattr(settings, it) for it in made} == made | changed
        assert (settings.template, settings.metric) == (profile.made.template, "f1")


@pytest.mark.parametrize("metric", ["f1", None])
def test_statement_about_data_with_their_own_template_is_repeated(metric):
    profile = read_measured(FINE_TUNES.profile)
    made = msgspec.structs.replace(profile.made, template="", max_new=5, metric=metric)
    profile = msgspec.structs.replace(profile, made=made)
    args = parser().parse_args(["profile", "verify", "x", *flags(FINE_TUNES)])
    settings = settings_of(args, _made_as(profile, args), Settings)
    assert (settings.template, settings.max_new, settings.metric) == (None, 5, metric)


def test_metrics_of_several_data_sets_are_each_data_sets_own_again(unseen, tmp_path, capsys):
    """The profile states no metric, so the metric of data from an unknown set is not known."""
    profile = read_measured(FINE_TUNES.profile)
    made = msgspec.structs.replace(profile.made, metric=None)
    write_profile(msgspec.structs.replace(profile, made=made), tmp_path / "pair.json")
    args = ["verify", str(tmp_path / "pair.json"), *flags(FINE_TUNES), "--data", str(unseen)]
    assert main(["profile", *args]) == 1
    assert "judged by --template and --metric" in capsys.readouterr().err


def test_every_task_has_to_be_judged(unseen, tmp_path, capsys):
    """A task with training contexts only could otherwise fail unnoticed."""
    moves = tmp_path / "moves.jsonl"
    write_records(make_records("moves", 1, 2, "moves"), moves)
    data = ["--data", str(moves), "--data", TRAIN, "--held-out", str(unseen), *ASKED]
    assert main(["profile", *flags(FINE_TUNES), *data, "--out", str(tmp_path / "o")]) == 1
    assert "no held-out context is of moves; give some of each task" in capsys.readouterr().err


def test_show_prints_and_draws(tmp_path, capsys):
    assert main(["profile", "show", str(FINE_TUNES.profile)]) == 0
    shown = capsys.readouterr().out
    profile = read_measured(FINE_TUNES.profile)
    assert "passed" in shown and profile.sender.model_id[:16] in shown
    assert main(["profile", "show", "--json", str(FINE_TUNES.profile)]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["passed"] and verdict["recommended"]["start"] == profile.recommended.start
    assert (
        main(["profile", "show", str(FINE_TUNES.profile), "--out", str(tmp_path / "report")]) == 0
    )
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert written[0].name == "index.html" and all(path.stat().st_size > 1000 for path in written)


OTHER = ["--receiver", str(WEIGHTS / "foundation")]
TRAIN = str(DATA / "train.jsonl")


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--sender", "x", "--receiver", "y"], 2, "profile needs --data, --out"),
        (["verify", str(FINE_TUNES.profile)], 2, "verify needs --sender, --receiver, --data"),
        (["calibrate", str(FINE_TUNES.profile)], 2, "calibrate needs --sender, --receiver, --data"),
        (["show", "none.json"], 1, "none.json (relative to "),
        (["--sender", "none", *OTHER, "--data", TRAIN, "--out", "o", *ASKED], 1, "none"),
        ([*flags(FINE_TUNES), "--data", TRAIN, "--out", "o"], 1, "--template and --metric"),
        (
            [*flags(FINE_TUNES), "--data", TRAIN, "--out", "o", *ASKED, "--max-memory-gb", "1e-4"],
            1,
            "--max-memory-gb is 0.0001",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(args, status, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *args]) == status
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith("droidspeak: ")
    assert says in complaint
    assert list(tmp_path.glob("o*")) == []


@pytest.fixture
def no_weights(monkeypatch) -> None:
    def load_pair(*_: object, **__: object) -> None:
        raise ConfigError("weights would be read")

    monkeypatch.setattr("profiles.profiler.load_pair", load_pair)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--out", "."], ". cannot be a profile; give a file in a folder that can be written to"),
        (["--out", "/dev/null"], "/dev/null cannot be a profile; give a file in a folder"),
        (["--small", "none"], "model folder none (relative to "),
        (["--held-out-share", "2"], "--held-out-share is 2.0; it has to be between 0 and 1"),
        (["--data", "longbench:hotpotqa", "--data-dir", "none"], "data folder none is no dir"),
        (["--data", "none.jsonl"], "data 'none.jsonl' is no file"),
        (["--held-out", TRAIN], "24 contexts are both in --data and in --held-out"),
        (["--device", "none"], "--device none cannot be used"),
        (["--sender-device", "none"], "--sender-device none cannot be used"),
        (["--tolerance", "5"], "--tolerance is 5.0; it has to be between 0 and 1"),
        (["--timing-seconds", "-1"], "--timing-seconds is -1.0; it has to be at least 0"),
        (["--most-contexts", "0"], "--most-contexts is 0; it has to be at least 1"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens is 0; it has to be at least 1 token"),
        (["--max-new", "4096"], "answers of 4096 tokens leave no room for prompts in the model's "),
    ],
)
def test_a_mistake_is_found_before_any_weights_are_read(
    args, says, tmp_path, capsys, monkeypatch, no_weights
):
    monkeypatch.chdir(tmp_path)
    right = [*flags(FINE_TUNES), *FAST, "--data", TRAIN, *ASKED, "--out", "o"]
    assert main(["profile", *right, *args]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"droidspeak: {says}")
    assert list(tmp_path.glob("o*")) == []


@pytest.mark.parametrize(
    ("command", "pair", "says"),
    [
        ("verify", FINE_TUNES, "24 of 24 contexts (100%) are the profile's own; verify on others"),
        ("calibrate", FINE_TUNES, "96 of the profile's 96 held-out contexts are not in --data"),
        ("verify", SHIPPED[1], "--sender is not the profile's sender: weights is"),
    ],
)
def test_unverifiable_pair_is_refused_before_weights_are_read(
    command, pair, says, capsys, no_weights
):
    asked = [str(FINE_TUNES.profile), *flags(pair), "--data", TRAIN]
    assert main(["profile", command, *asked]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"droidspeak: {says}")


def test_too_few_contexts_and_a_slow_dtype_are_reported_before_measuring(
    tmp_path, no_weights, monkeypatch
):
    monkeypatch.setattr("profiles.profiler.slow_dtype", lambda *_: ("a slow dtype",))
    args = [*flags(FINE_TUNES), *FAST, "--data", TRAIN, *ASKED, "--out", str(tmp_path / "o")]
    for more, is_told in ((), True), (("--tolerance", "0.5"), False):
        status, said = run(*args, *more)
        assert status == 1 and "weights would be read" in said and "a slow dtype" in said
        warning = "12 held-out contexts of biographies are hardly enough to pass: a plan that loses"
        assert (f"{warning} nothing needs about 71," in said) is is_told


def test_a_bad_record_is_named_by_file_and_line(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    write_records(read_records(DATA / "train.jsonl")[:3], data)
    with data.open("a") as file:
        file.write('{"input": 3}\n')
    args = [*flags(FINE_TUNES), "--data", str(data), *ASKED, "--out", str(tmp_path / "o")]
    assert main(["profile", *args]) == 1
    assert "data.jsonl:4 is not a LongBench record" in capsys.readouterr().err
