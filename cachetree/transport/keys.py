"""CURVE keys: their text form, their files, and the functions that read and write them.

    NAME.key   # a comment                        a server's own key pair; mode 0600
               ctsec-<64 hexadecimal digits>
    NAME.pub   ctpub-<64 hexadecimal digits> NAME

A file of public keys may have many lines like the one in NAME.pub; text behind a key is a remark.
The prefix tells a secret key from a public one. Unlike Z85, this form needs no quotes in YAML or a
shell. Errors name files and lines, and show no secret key.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NewType

import zmq
from zmq.utils import z85

from cachetree.errors import ConfigError, written

PublicKey = NewType("PublicKey", str)
"""`ctpub-` and 64 hexadecimal digits."""

_PUBLIC: Final = "ctpub-"
_SECRET: Final = "ctsec-"
_PUBLIC_PATTERN: Final = re.compile(_PUBLIC + r"[0-9a-f]{64}")
_SECRET_PATTERN: Final = re.compile(_SECRET + r"[0-9a-f]{64}")
_MAX_FILE_BYTES: Final = 1 << 20
_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAKE_KEYS: Final = "make a pair with `cachetree keygen --out DIR`"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A server's key pair, its proof of identity. Neither `str` nor `repr` shows the secret."""

    public: PublicKey
    secret: bytes = field(repr=False)
    """Secret key of 32 bytes."""


def to_bytes(key: PublicKey) -> bytes:
    return bytes.fromhex(key.removeprefix(_PUBLIC))


def to_public(raw: bytes) -> PublicKey:
    return PublicKey(_PUBLIC + raw.hex())


def write_key_pair(folder: Path, name: str) -> tuple[KeyPair, Path, Path]:
    """Make a new pair and write it into `folder`. Return (pair, secret file, public file).

    Raises ConfigError if one of the files exists or cannot be written.
    """
    if not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"name is {name!r}; use letters, digits, '_', '-' and '.'")
    public, secret = map(z85.decode, zmq.curve_keypair())
    keys = KeyPair(public=to_public(public), secret=secret)
    secret_file, public_file = folder / f"{name}.key", folder / f"{name}.pub"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(public_file, f"{keys.public} {name}\n", 0o644)
        try:
            _write_new(
                secret_file,
                f"# Proves who cachetree server {name} is. Copy it nowhere else.\n"
                f"{_SECRET}{keys.secret.hex()}\n",
                0o600,
            )
        except OSError:
            public_file.unlink()
            raise
    except FileExistsError as exc:
        raise ConfigError(
            f"{exc.filename} exists and is not overwritten; choose another --name or --out, or "
            "remove it if no server uses it"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{exc.filename} cannot be written: {exc.strerror}") from exc
    return keys, secret_file, public_file


def _write_new(file: Path, text: str, mode: int) -> None:
    """Write a new file with this mode, whatever the umask. It never has more permissions."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as writer:
        os.fchmod(descriptor, mode)
        writer.write(text)
        writer.flush()
        os.fsync(descriptor)


def read_key_pair(path: str) -> KeyPair:
    """Read the pair of a secret key file. Raises ConfigError.

    Only the file's owner may be able to read it. If root owns the file, its group may read it, too,
    because secrets are mounted into containers in this way.
    """
    lines = tuple(_lines(Path(path), field="key_file", is_secret=True))
    if len(lines) != 1 or not _SECRET_PATTERN.fullmatch(lines[0][1]):
        what = "a public key" if _PUBLIC in "".join(line for _, line in lines) else "something else"
        raise ConfigError(
            f"key_file {path} holds {what if lines else 'nothing'}; it has to hold one line that "
            f"begins with {_SECRET}: {_MAKE_KEYS}"
        )
    secret = bytes.fromhex(lines[0][1].removeprefix(_SECRET))
    public = z85.decode(zmq.curve_public(z85.encode(secret)))
    return KeyPair(public=to_public(public), secret=secret)


def read_public_key(value: str, *, field: str) -> PublicKey:
    """Return the public key in `value`, or in the file at path `value`, which must have one key.
    Raises ConfigError."""
    keys = list(_public_keys(value, field=field))
    if len(keys) != 1:
        raise ConfigError(f"{field} names {value}, which holds {len(keys)} keys instead of one")
    return keys[0]


def read_public_keys(values: Iterable[str], *, field: str) -> frozenset[PublicKey]:
    """Read public keys: each value is a key, a file of keys, or a folder of `.pub` files. Raises
    ConfigError."""
    collected: set[PublicKey] = set()
    for value in values:
        keys = list(_public_keys(value, field=field))
        if not keys:
            raise ConfigError(f"{field} names {value}, which holds no public key; {_MAKE_KEYS}")
        collected.update(keys)
    return frozenset(collected)


def _public_keys(value: str, *, field: str) -> Iterator[PublicKey]:
    if value.startswith((_PUBLIC, _SECRET)):
        yield _public(value, where=field)
    elif Path(value).is_dir():
        for file in sorted(Path(value).glob("*.pub")):
            yield from _public_keys(str(file), field=field)
    else:
        for number, line in _lines(Path(value), field=field, is_secret=False):
            yield _public(line.split()[0], where=f"{field}: {value}, line {number}")


def _public(text: str, *, where: str) -> PublicKey:
    if text.startswith(_SECRET):
        raise ConfigError(
            f"{where} holds a secret key where a public one belongs; make a new pair if others "
            "could read it"
        )
    if not _PUBLIC_PATTERN.fullmatch(text):
        raise ConfigError(
            f"{where} is not a public key; a public key is {_PUBLIC} and 64 hexadecimal digits"
        )
    return PublicKey(text)


def _lines(path: Path, *, field: str, is_secret: bool) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of a small text file, without comments."""
    try:
        # A pipe is refused, not waited for.
        with open(path, "rb", opener=lambda it, how: os.open(it, how | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{field} {path} is not a file")
            if is_secret:
                _require_private(path, status, field=field)
            blob = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{field} {written(path)} cannot be read: {exc.strerror}") from exc
    if len(blob) > _MAX_FILE_BYTES:
        raise ConfigError(f"{field} {path} is larger than {_MAX_FILE_BYTES} bytes: no key file")
    try:
        text = blob.decode("ascii")
    except UnicodeDecodeError:
        # Without the cause, which would show the content.
        raise ConfigError(f"{field} {path} is not text: no key file") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield number, line


def _require_private(path: Path, status: os.stat_result, *, field: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    forbidden = 0o027 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    if mode & forbidden:
        raise ConfigError(
            f"{field} {path} has mode {mode:04o}: others can read or change it; run "
            f"`chmod 600 {path}`, and make a new pair if they may have read it"
        )
