"""Digests of all bytes of a checkpoint's tensors, stored for later starts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3
from platformdirs import user_cache_path

from cachetree.checkpoint.safetensors_files import Tensor, read_pieces, read_tensors
from cachetree.errors import UNREADABLE

Digests = dict[str, str]
_VERSION: Final = 5
"""Version of stored digests. It changes when their meaning changes."""
_LEAST_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
_MOST_THREADS: Final = 8
_OTHERS_WRITE: Final = 0o022


class _Kept(msgspec.Struct, frozen=True):
    file: str
    stamp: tuple[int, ...]
    digests: Digests


def tensor_digests(files: Sequence[Path], cache_dir: Path | None = None) -> Digests:
    """Return each tensor's name and BLAKE3 digest. A digest covers dtype, shape and every byte. It
    does not depend on how the tensors are spread over files.

    `cache_dir` has earlier results (see `kept`). Raises ConfigError naming a file that is broken.
    """
    digests: Digests = {}
    for file in files:
        digests |= kept(cache_dir, "tensors", file, _hash_tensors)
    return digests


def user_cache() -> Path:
    """Return the folder in which this user's servers and profiler store digests."""
    return user_cache_path("sglang-droidspeak")


def bytes_digest(dtype: str, shape: tuple[int, ...], content: memoryview) -> str:
    """Return the digest of a tensor in memory. The same tensor in a file has an equal digest."""
    return _begun(dtype, shape).update(content).hexdigest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value. The order of keys does not matter."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def kept(
    cache_dir: Path | None, kind: str, file: Path, compute: Callable[[Path], Digests]
) -> Digests:
    """Return `compute(file)`, or its stored result of an earlier call if the file has not changed.

    A file counts as unchanged if its path, size, inode, and times of modification and of change are
    the same. Results are read only from files that this user owns and no other user can write.
    Nothing is stored without a writable `cache_dir`, or for files below 1 MiB.
    """
    path, before = str(file.resolve()), _stamp(file)
    if cache_dir is None or before[0] < _LEAST_BYTES:
        return compute(file)
    cached = cache_dir / f"{hashlib.sha256(f'{_VERSION} {kind} {path}'.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, *UNREADABLE):
        stored = msgspec.json.decode(_read_own(cached), type=_Kept)
        if (stored.file, stored.stamp) == (path, before):
            return stored.digests
    digests = compute(file)
    if _stamp(file) == before:
        with contextlib.suppress(OSError):
            _write_own(cached, msgspec.json.encode(_Kept(path, before, digests)))
    return digests


def _stamp(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _read_own(file: Path) -> bytes:
    with open(file, "rb", opener=lambda it, flags: os.open(it, flags | os.O_NOFOLLOW)) as opened:
        stat = os.fstat(opened.fileno())
        if stat.st_uid != os.geteuid() or stat.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others can write {file}")
        return opened.read()


def _write_own(file: Path, content: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as fresh:  # for its owner only
        fresh.write(content)
    Path(fresh.name).replace(file)


def _hash_tensors(file: Path) -> Digests:
    tensors = read_tensors([file])
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        digests = pool.map(lambda it: _hash(*it), tensors.items())
        return dict(zip(tensors, digests, strict=True))


def _hash(name: str, tensor: Tensor) -> str:
    digest = _begun(tensor.dtype, tensor.shape)
    for piece in read_pieces(name, tensor, _PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _begun(dtype: str, shape: tuple[int, ...]) -> blake3:
    return blake3(f"{dtype}\0{shape}\0".encode())
