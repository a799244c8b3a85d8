"""`droidspeak serve`: the processes that it starts, and the errors that it finds before it starts
any."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

import msgspec
import pytest
import yaml

from sglang_droidspeak.cli import main
from sglang_droidspeak.demo import DemoConfig
from sglang_droidspeak.start.config import LINKER_MODULE, is_configured

SHIPPED = DemoConfig.small()
OTHER = SHIPPED.receiver.parent / "foundation"
MODEL = ["serve", "--model", str(SHIPPED.receiver)]
SETTINGS = ["--peer", "tcp://127.0.0.1:7001", "--profile", str(SHIPPED.profile)]
OPTIONS = ["--", "--device", "cpu", "--port", "30001", "--sleep-on-idle"]


class Started(Exception):
    """Stands for the process that `exec` would replace."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    command: list[str] = []

    def execv(_path: str, argv: list[str]) -> None:
        command[:] = argv
        raise Started

    monkeypatch.setattr(os, "execv", execv)
    return command


def arguments(words: list[str]) -> Any:
    """Parse a command line as SGLang does."""
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(words)


def test_it_starts_what_the_dry_run_shows(started, tmp_path, capsys):
    flags = [*MODEL, *SETTINGS, "--set", "host_gb=0.25", "--set", "gate=none"]
    with pytest.raises(Started):
        main([*flags, *OPTIONS])
    assert started[1:3] == ["-m", "sglang.launch_server"]
    ours = arguments(started[3:])
    assert main([*flags, "--dry-run", *OPTIONS]) == 0
    shown = capsys.readouterr().out
    file = tmp_path / "server.yaml"
    file.write_text(shown)
    command = shlex.split(shown.partition("\n")[0].removeprefix("# ").replace("FILE", str(file)))
    theirs = arguments(command[3:])
    assert msgspec.structs.asdict(ours) == msgspec.structs.asdict(theirs)
    assert is_configured(ours)
    assert (ours.device, ours.port, ours.page_size, ours.sleep_on_idle) == ("cpu", 30001, 16, True)
    assert ours.unified_cache_external_linker_config == {
        "linker": "DroidSpeakLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": {
            "peers": ["tcp://127.0.0.1:7001"],
            "profiles": [str(SHIPPED.profile)],
            "host_gb": 0.25,
            "gate": "none",
        },
    }


def test_only_what_is_given_is_set(capsys):
    listen = ["--listen", "tcp://127.0.0.1:0", "--peer", "tcp://127.0.0.1:7002"]
    assert main([*MODEL, *listen, "--dry-run", "--", "--page-size", "32"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["page-size"] == 32
    extra = shown["unified-cache-external-linker-config"]["linker_extra_config"]
    assert extra == {"listen": "tcp://127.0.0.1:0", "peers": ["tcp://127.0.0.1:7002"]}


def test_adapters_are_read_too(capsys):
    arguments = ["serve", "--model", str(OTHER), "--dry-run", "--", "--enable-lora", "--lora-paths"]
    assert main([*arguments, f"a={OTHER.with_name('receiver_lora')}"]) == 0
    assert "--lora-paths" in capsys.readouterr().out.partition("\n")[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--peer", "127.0.0.1:7001"], "peer.*tcp://"),
        (["--profile", "no.json"], "no.json"),
        (["--set", "hots_gb=1"], "hots_gb; did you mean host_gb?"),
        (["--set", "host_gb"], "NAME=VALUE"),
        (["--set", "host_gb=many"], "host_gb"),
        (["--set", "host_gb=NaN"], "host_gb"),
        (["--set", "ttl_s=Infinity"], "ttl_s"),
        (["--", "--mem-fraction-statc", "0.5"], "did you mean mem-fraction-static?"),
        (["--listen", "tcp://0.0.0.0:7001"], "loopback"),
        (["--", "--page-size", "8"], "page_size is 8: .*--page-size 16"),
        (["--model", "/no/such/model"], "model /no/such/model is no folder"),
        (
            ["--model", str(OTHER), "--profile", str(SHIPPED.profile)],
            re.escape(str(SHIPPED.profile)),
        ),
        (["--", "--tp", "two"], "--tp: invalid int value: 'two'"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(started, capsys, flags, says):
    assert main([*MODEL, *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("droidspeak: ") and said.count("\n") == 1
    assert re.search(says, said), said
    assert not started
