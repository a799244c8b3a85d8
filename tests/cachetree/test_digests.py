"""Digests of whole tensors, and results kept between starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_parts import weights, write
from safetensors.numpy import save_file

from cachetree.checkpoint import read_model_identity, tensor_digests
from cachetree.checkpoint.digests import kept

NAME = "model.layers.1.self_attn.q_proj.weight"


def large() -> dict[str, np.ndarray]:
    """Write tensors that take more than one piece, in a file large enough for its digests to be
    stored."""
    return weights() | {NAME: np.arange(600_001, dtype=np.float32)}


def test_one_byte_anywhere_changes_the_digest_of_its_tensor_only(tmp_path):
    file = tmp_path / "a.safetensors"
    save_file(large(), file)
    before = tensor_digests([file])
    assert len({*before.values()}) == len(before) == len(large())
    content, at = file.read_bytes(), file.stat().st_size
    start = content.index(large()[NAME].tobytes())
    for at in (start, start + 4097, start + 1_500_000, start + 2_400_003):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        after = tensor_digests([file])
        assert {name for name in before if before[name] != after[name]} == {NAME}


def test_dtype_and_shape_count(tmp_path):
    digests = set()
    for number, form in enumerate([np.zeros(4, np.float32), np.zeros((2, 2), np.float32)]):
        for dtype in (np.float32, np.int32):
            file = tmp_path / f"{number}{dtype.__name__}.safetensors"
            save_file({"a": form.astype(dtype)}, file)
            digests |= {*tensor_digests([file]).values()}
    assert len(digests) == 4


def test_a_result_is_read_while_its_file_is_unchanged_and_survives_damage(tmp_path):
    model, cache = write(tmp_path / "m", large()), tmp_path / "cache"
    file = model / "model.safetensors"
    digests = tensor_digests([file], cache)
    (result,) = cache.iterdir()
    assert (result.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    forged = result.read_bytes().replace(digests[NAME].encode(), b"f" * 64)
    result.write_bytes(forged)
    assert tensor_digests([file], cache)[NAME] == "f" * 64, "it was read"
    for damage in (b"", b"{", b'{"file": 3}', b"\xff", forged.replace(b"/m/", b"/n/")):
        result.write_bytes(damage)
        assert tensor_digests([file], cache) == digests
    result.write_bytes(forged)
    stat = file.stat()
    write(model, large() | {NAME: np.ones(600_001, np.float32)})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of equal size and time
    assert tensor_digests([file], cache)[NAME] not in ("f" * 64, digests[NAME])
    assert list(cache.iterdir()) == [result], "replaced"
    assert read_model_identity(model, cache) == read_model_identity(model)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_result_that_others_can_write_is_not_believed(tmp_path, mode):
    file, cache = write(tmp_path / "m", large()) / "model.safetensors", tmp_path / "cache"
    digests = tensor_digests([file], cache)
    (result,) = cache.iterdir()
    result.write_bytes(result.read_bytes().replace(digests[NAME].encode(), b"f" * 64))
    result.chmod(mode)
    assert tensor_digests([file], cache) == digests
    assert result.stat().st_mode & 0o777 == 0o600
    elsewhere = Path(shutil.move(result, tmp_path / "elsewhere"))
    elsewhere.write_bytes(elsewhere.read_bytes().replace(digests[NAME].encode(), b"f" * 64))
    result.symlink_to(elsewhere)
    assert tensor_digests([file], cache) == digests


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_result_of_another_user_is_not_believed(tmp_path):
    file, cache = write(tmp_path / "m", large()) / "model.safetensors", tmp_path / "cache"
    digests = tensor_digests([file], cache)
    (result,) = cache.iterdir()
    result.write_bytes(result.read_bytes().replace(digests[NAME].encode(), b"f" * 64))
    os.chown(result, 12345, 12345)
    assert tensor_digests([file], cache) == digests


def test_a_file_that_changes_while_it_is_read_leaves_no_result(tmp_path):
    file, cache = write(tmp_path / "m", large()) / "model.safetensors", tmp_path / "cache"

    def compute(folder: Path) -> dict[str, str]:
        folder.touch()
        return {"": "old"}

    assert kept(cache, "tensors", file, compute) == {"": "old"}
    assert not cache.exists()


def test_without_a_writable_cache_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("")
    model = write(tmp_path / "m", large())
    assert read_model_identity(model, tmp_path / "file") == read_model_identity(model)
    small = write(tmp_path / "small")
    read_model_identity(small, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
