"""The command line: what it refuses, and its output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from cachetree.checkpoint.identity import read_model_identity
from cachetree.planning.profile import read_profile, write_profile
from profiles.evidence import read_measured
from sglang_droidspeak.cli import main
from sglang_droidspeak.demo import DemoConfig, config

SMALL = DemoConfig.small()


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main([*argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_identity_prints_the_id_that_profiles_use(capsys):
    code, out, _ = run(capsys, "identity", str(SMALL.sender))
    assert code == 0
    assert read_profile(SMALL.profile).sender.model_id in out


def test_version_names_both(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(
        r"droidspeak \d+\.\d+\.\d+ for SGLang \d+\.\d+\.\d+\S*\n", capsys.readouterr().out
    )


def test_commands_start_without_heavy_imports():
    """An import of SGLang would add five seconds to `--help` and `peers`."""
    code = (
        "import sys, sglang_droidspeak.cli;"
        "print(sorted({'sglang', 'torch', 'transformers'} & sys.modules.keys()))"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == "[]\n"


def test_identity_as_json(capsys):
    code, out, _ = run(capsys, "identity", str(SMALL.receiver), "--json")
    fields = json.loads(out)
    assert code == 0
    assert fields["model_id"] == read_model_identity(SMALL.receiver).model_id
    assert fields["num_layers"] == 12


def test_identity_of_no_model_is_one_line(capsys, tmp_path):
    code, _, err = run(capsys, "identity", str(tmp_path / "none"))
    assert code == 1
    assert err.startswith("droidspeak: model folder")
    assert err.count("\n") == 1


def test_reader_that_closes_the_pipe_early_is_no_error():
    command = [sys.executable, "-m", "sglang_droidspeak.cli", "identity", str(SMALL.sender)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_unwritable_output_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    into = str(tmp_path / "file" / "folder")
    code, _, err = run(capsys, "profile", "show", str(SMALL.profile), "--out", into)
    assert code == 1
    assert err.startswith("droidspeak: ") and into in err and err.count("\n") == 1


@pytest.mark.parametrize("action", ["show", "verify", "calibrate"])
def test_flags_before_an_action_are_refused_and_not_forgotten(capsys, action):
    flags = ["--dtype", "float32", "--data", "x", "--no-prune"]
    message = f"{action} has no --no-prune; leave it out"
    if action == "show":
        message = "show has no --dtype, --data, --no-prune; leave it out"
    with pytest.raises(SystemExit):
        main(["profile", *flags, action, str(SMALL.profile)])
    assert message in capsys.readouterr().err
    if action == "show":
        return
    del flags[-1]
    with pytest.raises(SystemExit) as stop:
        main(["profile", *flags, action, str(SMALL.profile)])
    assert stop.value.code == 2
    assert f"give --dtype, --data after {action}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--bogus"], ["demo", "--num-doc", "3"], []])
def test_unknown_and_abbreviated_flags_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_an_own_pair_needs_all_four(capsys):
    code, _, err = run(capsys, "demo", "--sender", "x", "--data", "y")
    assert code == 2
    assert "--receiver and --profile" in err


def own_pair(tmp_path: Path, **changes: Path) -> list[str]:
    files = {name: getattr(SMALL, name) for name in ("sender", "receiver", "profile", "data")}
    argv = ["demo", "--out", str(tmp_path / "out")]
    for name, path in {**files, **changes}.items():
        argv += [f"--{name}", str(path)]
    return argv


def test_a_profile_of_another_pair_is_refused(capsys, tmp_path):
    code, _, err = run(capsys, *own_pair(tmp_path, sender=SMALL.receiver))
    assert code == 1
    assert "has sender" in err and "profile this pair" in err


def test_a_profile_that_failed_its_gate_is_refused(capsys, tmp_path):
    failed = replace(read_measured(SMALL.profile), passed=False, reason="too bad")
    write_profile(failed, tmp_path / "failed.json")
    code, _, err = run(capsys, *own_pair(tmp_path, profile=tmp_path / "failed.json"))
    assert code == 1
    assert "did not pass its gate: too bad" in err


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n"])
def test_options_that_are_no_keys_are_refused(capsys, tmp_path, text):
    (tmp_path / "options.yaml").write_text(text)
    code, _, err = run(capsys, "demo", "--options", str(tmp_path / "options.yaml"))
    assert code == 1
    assert "options" in err


def test_small_pair_replaces_a_real_pair_that_is_not_made(monkeypatch):
    monkeypatch.setattr(config, "_REAL", Path("nowhere"))
    demo = DemoConfig.shipped()
    assert demo.sender == SMALL.sender
    assert "make real" in demo.instead


def test_the_real_pair_is_taken_where_it_is_made(monkeypatch, tmp_path):
    for made in ("base", "data/json/long.jsonl"):
        (tmp_path / made).mkdir(parents=True)
    monkeypatch.setattr(config, "_REAL", tmp_path)
    monkeypatch.setattr(config, "REAL_PROFILE", SMALL.profile)
    assert DemoConfig.shipped().sender == SMALL.sender, "weights are missing"
    (tmp_path / "base/model.safetensors").touch()
    demo = DemoConfig.shipped()
    assert demo.sender == demo.receiver == tmp_path / "base"
    assert demo.receiver_lora and demo.receiver_lora.name == "json"
    assert not demo.instead
    failed = replace(read_measured(SMALL.profile), passed=False, reason="too bad")
    write_profile(failed, tmp_path / "failed.json")
    for profile in ("failed.json", "none.json"):
        monkeypatch.setattr(config, "REAL_PROFILE", tmp_path / profile)
        assert DemoConfig.shipped().sender == SMALL.sender
