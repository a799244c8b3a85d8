"""Key files: their content, which files are accepted, and that no secret is ever shown."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from cachetree import ConfigError
from cachetree.cli import main
from cachetree.transport import keys

OTHER = "ctpub-" + "ab" * 32
SECRET_TEXT = "ctsec-" + "5e" * 32


def test_a_pair_is_written_and_read_back(tmp_path):
    made, secret_file, public_file = keys.write_key_pair(tmp_path / "new", "a")
    assert keys.read_key_pair(str(secret_file)) == made
    assert keys.read_public_key(str(public_file), field="f") == made.public
    assert z85.decode(zmq.curve_public(z85.encode(made.secret))) == keys.to_bytes(made.public)
    assert keys.write_key_pair(tmp_path / "new", "b")[0] != made


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_modes_do_not_depend_on_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        _, secret_file, public_file = keys.write_key_pair(tmp_path, "a")
    finally:
        os.umask(before)
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert public_file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("taken", ["a.key", "a.pub"])
def test_nothing_is_overwritten_or_left_half_written(tmp_path, taken):
    (tmp_path / taken).write_text("mine")
    with pytest.raises(ConfigError, match=f"{taken} exists"):
        keys.write_key_pair(tmp_path, "a")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(taken, "mine")]


@pytest.mark.parametrize("name", ["", ".", "../a", "a/b", "a b", "-a", "a\n"])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(ConfigError, match="name is"):
        keys.write_key_pair(tmp_path, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("", 0o600, ["holds nothing", "cachetree keygen"]),
        ("# only a comment\n", 0o600, ["holds nothing"]),
        (f"{OTHER} name\n", 0o600, ["holds a public key", "ctsec-"]),
        (f"{SECRET_TEXT}\n{SECRET_TEXT}\n", 0o600, ["something else"]),
        (f"{SECRET_TEXT}0\n", 0o600, ["something else"]),
        (f"{SECRET_TEXT} name\n", 0o600, ["something else"]),
        (SECRET_TEXT.upper(), 0o600, ["something else"]),
        (SECRET_TEXT, 0o640, ["mode 0640", "chmod 600"]),
        (SECRET_TEXT, 0o604, ["mode 0604", "chmod 600"]),
        (SECRET_TEXT, 0o620, ["mode 0620", "chmod 600"]),
        (SECRET_TEXT + "\n\xff", 0o600, ["not text"]),
        (SECRET_TEXT + "\n" * (1 << 20), 0o600, ["larger than"]),
    ],
)
def test_a_bad_secret_file_is_one_line_without_the_secret(tmp_path, content, mode, words):
    file = tmp_path / "a.key"
    file.write_bytes(content.encode("latin-1"))
    file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        keys.read_key_pair(str(file))
    (line,) = str(caught.value).splitlines()
    for word in [str(file), *words]:
        assert word in line
    shown = "".join(traceback.format_exception(caught.value))
    assert "5e5e" not in shown.lower()


def test_a_good_secret_file_may_have_comments_and_space(tmp_path):
    file = tmp_path / "a.key"
    file.write_text(f"# mine\r\n\n  {SECRET_TEXT}  \n")
    file.chmod(0o400)
    assert keys.read_key_pair(str(file)).secret == bytes.fromhex("5e" * 32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, ["No such file"]),
        (lambda path: path.mkdir(), ["key_file", "directory"]),
        (lambda path: path.symlink_to("/dev/zero"), ["not a file"]),
        (os.mkfifo, ["not a file"]),
    ],
)
def test_missing_key_file_is_refused(tmp_path, make, words):  # type: ignore[no-untyped-def]
    path = tmp_path / "a.key"
    make(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError) as caught:
        keys.read_key_pair(str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_public_keys_come_singly_in_files_and_in_folders(tmp_path):
    a, b, c, d = (f"ctpub-{letter * 64}" for letter in "abcd")
    (tmp_path / "list").write_text(f"# ours\n{a} the first\n\n{b}\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "c.pub").write_text(f"{c} c\n")
    (folder / "c.key").write_text(SECRET_TEXT)
    public = keys.read_public_keys([str(tmp_path / "list"), str(folder), d, a], field="f")
    assert public == {a, b, c, d}
    with pytest.raises(ConfigError, match="holds 2 keys"):
        keys.read_public_key(str(tmp_path / "list"), field="f")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("ctpub-12", "64 hexadecimal digits"),
        (OTHER + "\n", "64 hexadecimal digits"),
        (SECRET_TEXT, "secret key where a public one belongs"),
        ("missing", "No such file"),
        ("wrong", "wrong, line 2"),
        ("secret", "secret, line 1"),
        ("empty", "holds no public key"),
        ("folder", "holds no public key"),
    ],
)
def test_a_bad_allow_list_names_the_place(tmp_path, monkeypatch, value, word):
    monkeypatch.chdir(tmp_path)
    Path("wrong").write_text(f"{OTHER}\nctpub-{'g' * 64}\n")
    Path("secret").write_text(SECRET_TEXT)
    Path("empty").write_text("# nobody\n")
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        keys.read_public_keys([OTHER, value], field="allowed_peers")
    assert "allowed_peers" in str(caught.value)
    assert word in str(caught.value)
    assert "5e5e" not in str(caught.value)


def test_a_pair_does_not_show_its_secret(tmp_path):
    pair, _, _ = keys.write_key_pair(tmp_path, "one")
    for shown in (repr(pair), str(pair), f"{pair}"):
        assert pair.public in shown
        assert pair.secret.hex() not in shown
        assert repr(pair.secret)[2:12] not in shown


def test_keygen_prints_the_public_key_and_no_secret(tmp_path, capsys):
    assert main(["keygen", "--out", str(tmp_path), "--name", "a", "--json"]) == 0
    out = capsys.readouterr().out
    made = json.loads(out)
    pair = keys.read_key_pair(made["key_file"])
    assert made["public_key"] == pair.public
    assert Path(made["public_key_file"]).read_text() == f"{pair.public} a\n"
    assert main(["keygen", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ctpub-")
    second = keys.read_key_pair(str(tmp_path / "cachetree.key"))
    assert pair.secret.hex() not in out
    assert second.secret.hex() not in text
    assert main(["keygen", "--out", str(tmp_path)]) == 1
    assert "not overwritten" in capsys.readouterr().err
    assert keys.read_key_pair(str(tmp_path / "cachetree.key")) == second
