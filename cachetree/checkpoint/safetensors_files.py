"""Read the content of a checkpoint straight from its safetensors files, without loading it.

A file is an 8-byte little-endian header length, a JSON header (name to dtype, shape and byte
offsets), and the tensors' bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cachetree.errors import UNREADABLE, ConfigError

_MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes that the format allows."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_AFTER_THE_LAYERS = re.compile(r"(?:^|\.)(?:lm_head|norm|final_layernorm|ln_f)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The place of one tensor's bytes in a file. The file's header states `dtype` and `shape`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file beside the safetensors files; raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read ({exc.strerror}); it must be there") from exc
    except UNREADABLE as exc:
        raise ConfigError(f"{file} is not a JSON object: {exc}; save it again") from exc


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files: a single one, or all shards of an index. Raises
    ConfigError."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        if not single.is_file():
            for other in sorted(folder.glob("*.safetensors")):
                raise ConfigError(
                    f"{folder} has {other.name} and no {index.name}, which names the shards; copy "
                    "or download the index too"
                )
            raise ConfigError(
                f"{folder} has neither {single.name} nor {index.name}; only safetensors "
                "checkpoints are supported, so save the model with safe_serialization"
            )
        # SGLang knows and ignores these files of Mistral's own format.
        consolidated = folder / "consolidated.safetensors"
        return require_no_others([single], {*folder.glob("*.safetensors")} - {consolidated})
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except UNREADABLE as exc:
        raise ConfigError(f"{index} is not a safetensors index: {exc}; download it again") from exc
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise ConfigError(f"{index} names {shard}, which is missing; download it again")
    return require_no_others([folder / it for it in shards], folder.glob(single.name))


def require_no_others(files: list[Path], present: Iterable[Path]) -> list[Path]:
    """Return `files`. Raises ConfigError if the folder has other files that SGLang or transformers
    would load in addition, or instead."""
    for other in sorted(set(present).difference(files)):
        raise ConfigError(
            f"{other} is beside other weights, and SGLang loads them otherwise than transformers "
            "does; remove what is not the model's"
        )
    return files


def read_tensors(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return all tensors of these files, with their names. Raises ConfigError naming a broken
    file."""
    return {name: tensor for path in paths for name, tensor in _read_header(path)}


def read_pieces(name: str, tensor: Tensor, num_bytes: int) -> Iterator[memoryview]:
    """Read a tensor's bytes in order, `num_bytes` at a time and then the rest.

    Each piece overwrites the one before. Raises ConfigError if the file ends before the tensor.
    """
    buffer, left = memoryview(bytearray(min(num_bytes, tensor.num_bytes))), tensor.num_bytes
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        while left:
            piece = buffer[:left]
            if file.readinto(piece) < len(piece):
                raise ConfigError(f"{tensor.path} ends before tensor {name}; download it again")
            left -= len(piece)
            yield piece


def _read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    num_file_bytes = path.stat().st_size
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < num_bytes <= min(_MAX_HEADER_BYTES, num_file_bytes - 8):
            raise ConfigError(f"{path} is not a safetensors file or is cut off; download it again")
        raw = file.read(num_bytes)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        headers = {name: msgspec.json.decode(it, type=_Header) for name, it in entries.items()}
    except UNREADABLE as exc:
        raise ConfigError(f"{path} has a broken header: {exc}; download it again") from exc
    for name, header in headers.items():
        start, stop = header.data_offsets
        if not 0 <= start <= stop <= num_file_bytes - 8 - num_bytes:
            raise ConfigError(f"{path} ends before tensor {name}; download it again")
        yield (
            name,
            Tensor(
                path=path,
                dtype=header.dtype,
                shape=header.shape,
                offset=8 + num_bytes + start,
                num_bytes=stop - start,
            ),
        )


def own_layer(name: str) -> int | None:
    """Return the layer that a tensor belongs to. None if the tensor is outside of the layers."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def layer_of(name: str, num_layers: int) -> int:
    """Return the first layer with KV that depends on a tensor: the tensor's own layer, `num_layers`
    for a tensor behind the layers, or 0 for embeddings and unknown tensors."""
    own = own_layer(name)
    if own is not None:
        return own
    return num_layers if _AFTER_THE_LAYERS.search(name) else 0
