"""`droidspeak profile --line`: one plan for several consecutive pairs, judged on each of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from shipped import ASKED, DATA, WEIGHTS
from test_profile_command import FAST, run

from cachetree.planning import PairProfile, read_line, read_profile_as
from cachetree.planning.profile import read_profile
from profiles.data.records import read_records, write_records
from profiles.evidence import read_measured
from profiles.stats.gate import is_within
from sglang_droidspeak.cli import main

FILE = "model.safetensors"
STEP = 1e-2
"""Relative change of each tensor from one model of the line to the next."""


def changed(folder: Path, before: Path, share: float, seed: int) -> Path:
    """Write a checkpoint after one more random step."""
    random = torch.Generator().manual_seed(seed)
    shutil.copytree(before, folder)
    tensors = {
        name: it + share * it.norm() / it.numel() ** 0.5 * torch.randn(it.shape, generator=random)
        for name, it in load_file(before / FILE).items()
    }
    tensors = {name: it.to(torch.bfloat16) for name, it in tensors.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("line")
    first = shutil.copytree(WEIGHTS / "receiver", folder / "step0")
    second = changed(folder / "step1", first, STEP, seed=1)
    return [first, second, changed(folder / "step2", second, STEP, seed=2)]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return few contexts: some to choose with, some to judge with."""
    folder, data = tmp_path_factory.mktemp("few"), []
    for flag, name in (("--data", "train"), ("--held-out", "held_out")):
        write_records(read_records(DATA / f"{name}.jsonl")[:9], folder / f"{name}.jsonl")
        data += [flag, str(folder / f"{name}.jsonl")]
    few = [*FAST, "--group", "6", "--plans", "2", "--timing-seconds", "0", "--tolerance", "0.9"]
    return [*data, *ASKED, *few]


def profiled(out: Path, few: list[str], *models: Path | str) -> tuple[int, str]:
    return run("--line", *map(str, models), *few, "--out", str(out))


def test_a_line_of_small_steps_loads_everything(line, few, tmp_path):
    out = tmp_path / "line.json"
    status, said = profiled(out, few, *line)
    assert status == 0, said
    profile, whole = read_line(out), read_measured(out)
    assert (profile.sender, profile.receiver) == profile.line.models[1:]
    assert profile.line.names == ("step0", "step1", "step2")
    assert np.array(profile.line.distances) == pytest.approx(STEP, rel=0.3)
    assert profile.recommended is not None and len(profile.recommended.block) == 0
    assert profile.transition_layers() == frozenset()
    steps = ("step0 → step1", "step1 → step2")
    assert {it.name.partition(" by ")[2] for it in whole.held_out.tasks} == {*steps}
    judged = whole.frontier[whole.order[-1]]
    assert len(judged.block) == 0 and len(judged.tasks) == len(whole.held_out.tasks)
    assert is_within(judged.tasks, profile.tolerance)
    assert len({it.num_contexts for it in whole.held_out.tasks}) == 1, "the same for each pair"
    assert all(it.tv_bound is not None for it in profile.blocks[:-1])
    assert not list(tmp_path.glob(".*")), "no journal is left"
    assert isinstance(read_profile(out), PairProfile), "its last pair, for servers"
    assert run("show", "--verify-verdict", str(out))[0] == 0
    assert run("show", str(out))[0] == 0
    assert run("show", str(out), "--out", str(tmp_path / "page"))[0] == 0
    asked = ["--sender", str(line[1]), "--receiver", str(line[2]), *few[:2]]
    assert "make it again" in run_error("calibrate", str(out), *asked)


def test_a_plan_has_to_be_good_at_every_pair(line, few, tmp_path):
    far = changed(tmp_path / "far", line[1], share=0.7, seed=3)
    out = tmp_path / "line.json"
    profiled(out, few, line[0], line[1], far)
    profile, whole = read_profile_as(PairProfile, out), read_measured(out)
    assert whole.line is not None and min(whole.line.distances[1]) > 0.3
    assert all(len(it.block) for it in profile.blocks), "nothing is proven without a block"


def run_error(*args: str) -> str:
    status, said = run(*args)
    assert status == 1
    return said.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("models", "flags", "says"),
    [
        (["step0"], [], "--line names {step0} only; name three models or more"),
        (["step0", "step1"], [], "--line names {step0} and {step1} only"),
        (["step0", "step1", "step1"], [], "{step1} and {step1} are the same model by content"),
        (["step0", "step1", "none"], [], "model folder {none} does not exist"),
        (["step0", "step1", "other"], [], "are not of one family: num_layers is 12 and 4"),
        (["step0", "step1", "step2"], ["--e-correction"], "--e-correction is given with --line"),
        (["step0", "step1", "step2"], ["--sender", "x"], "--sender is given with --line"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_any_weights_are_read(
    line, few, tmp_path, capsys, monkeypatch, models, flags, says
):
    monkeypatch.setattr("profiles.profiler.load_line", lambda *_, **__: pytest.fail("weights"))
    folders = {it.name: it for it in line} | {"none": tmp_path / "none"}
    folders["other"] = WEIGHTS / "other"
    if "other" in models:
        from profiles.random_models import shape, write_models

        config = shape("llama", layers=4, hidden=128, heads=2, kv_heads=2)
        (folders["other"],) = write_models(tmp_path / "other", config, ["other"])
    capsys.readouterr()  # Writing models shows progress.
    args = ["--line", *(str(folders[it]) for it in models), *few, *flags]
    assert main(["profile", *args, "--out", str(tmp_path / "o.json")]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert says.format(**folders) in complaint
    assert not (tmp_path / "o.json").exists()
