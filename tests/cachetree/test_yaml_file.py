"""Files that operators write: their content, and errors that name the file and the place."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cachetree import ConfigError
from cachetree.checkpoint.identity import read_model_identity
from cachetree.config import read_yaml, settings_of
from cachetree.errors import ProfileError
from cachetree.planning.profile import read_profile
from cachetree.transport.keys import read_key_pair


def test_yaml_file_is_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: [1, x]\nb: 2.5\n")
    assert read_yaml(file, "config") == {"a": [1, "x"], "b": 2.5}
    file.write_text("")
    assert read_yaml(file, "config") is None


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\xff\xfe\x00", b"a: 2026-02-30", b"a: !!python/name:os.system", b"[" * 1_000],
    ids=["unfinished", "not text", "no such day", "an object", "too deep"],
)
def test_invalid_yaml_is_refused_with_its_place(tmp_path, content):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"fleet {file} is not YAML: "):
        read_yaml(file, "fleet")


def test_shared_part_is_written_once(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("base: &base {a: 1, b: [2]}\none: *base\ntwo: {<<: *base, a: 3}\n")
    base = {"a": 1, "b": [2]}
    assert read_yaml(file, "fleet") == {"base": base, "one": base, "two": {"a": 3, "b": [2]}}


def test_a_relative_path_says_relative_to_what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = re.escape(f"a.yaml (relative to {tmp_path})")
    with pytest.raises(ConfigError, match=rf"^config {here} cannot be read: No such file"):
        read_yaml(Path("a.yaml"), "config")
    with pytest.raises(ProfileError, match=rf"^profile {here} cannot be read: No such file"):
        read_profile(Path("a.yaml"))
    with pytest.raises(ConfigError, match=rf"^model folder {here} does not exist"):
        read_model_identity(Path("a.yaml"))
    with pytest.raises(ConfigError, match=rf"^key_file {here} cannot be read: No such file"):
        read_key_pair("a.yaml")


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    listen: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ConfigError(f"port is {self.port}")


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    worker: Inner = msgspec.field(default_factory=Inner)
    host_bytes: int = 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"hostbytes": 1}, "there is no key hostbytes; did you mean host_bytes?"),
        ({"worker": {"lisen": ""}}, "there is no key worker.lisen; did you mean worker.listen?"),
        ({"listen": ""}, "there is no key listen; did you mean worker.listen?"),
        (
            {"worker": {"host_bytes": 1}},
            "there is no key worker.host_bytes; did you mean host_bytes",
        ),
        ({"xyz": 1}, "there is no key xyz; known there: worker, host_bytes"),
        ({"worker": {"xyz": 1}}, "there is no key worker.xyz; known there: listen, port"),
        ({"worker": {"port": "a"}}, "Expected `int`, got `str` - at `$.worker.port`"),
        ({"worker": {"port": -1}}, "port is -1"),
        (["x"], "Expected `object`, got `array`"),
    ],
)
def test_a_key_that_nobody_knows_is_held_against_those_there_are(content, said):
    with pytest.raises(ConfigError, match=f"^config a.yaml: {re.escape(said)}"):
        settings_of(content, Outer, "config a.yaml")


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config .*a\.yaml cannot be read: No such file"):
        read_yaml(tmp_path / "a.yaml", "config")
