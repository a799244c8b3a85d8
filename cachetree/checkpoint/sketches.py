"""Distances between models, from sketches: a few random sums of each tensor's values.

A sketch is linear. So the length of the difference of two sketches estimates the length of the
difference of the tensors. The standard error is about 2 % (count sketch: Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002). Here values are assigned to the sums
in turn, not by a hash. The models need not be in memory together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from cachetree.checkpoint.safetensors_files import layer_of, own_layer, read_pieces, read_tensors
from cachetree.errors import ConfigError

_WIDTH: Final = 1021
"""Number of sums in a sketch. It is prime, so that the values of a matrix column are spread over
all sums."""
_ROWS: Final = 256
_PIECE: Final = _ROWS * _WIDTH
"""Number of values that are summed at once."""
_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}

Sketch = NDArray[np.float32]
Sketches = Mapping[str, Sketch]
"""Sketch of each tensor of a model. Keys are tensor names."""
EMPTY: Final[Sketches] = {}


def sketch_of(name: str, dtype: str, content: memoryview) -> Sketch:
    """Return the sketch of a tensor in memory. Raises ConfigError if a tensor of this type has no
    sketch."""
    step = _piece_bytes(name, dtype)
    return _sketch(name, dtype, (content[at : at + step] for at in range(0, len(content), step)))


def folder_sketches(files: Sequence[Path]) -> dict[str, Sketch]:
    """Return sketches of all tensors of safetensors files. Raises ConfigError naming a broken file,
    or a tensor of a type that has no sketch."""
    tensors = read_tensors(files)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        sketches = pool.map(
            lambda name, it: _sketch(
                name, it.dtype, read_pieces(name, it, _piece_bytes(name, it.dtype))
            ),
            tensors,
            tensors.values(),
        )
        return dict(zip(tensors, sketches, strict=True))


@np.errstate(all="ignore")
def distances(sender: Sketches, receiver: Sketches, num_layers: int) -> tuple[float, ...]:
    """Return relative changes of the weights: the length of the difference, divided by the length
    of the sender's weights.

    The first value is for the tensors before the layers, each other value is for one layer. Both
    models have the same tensors. Tensors behind the layers are left out, because no KV depends on
    them. NaN counts as infinite.
    """
    changes, lengths = np.zeros(num_layers + 1), np.zeros(num_layers + 1)
    for name, theirs in sender.items():
        if (layer := layer_of(name, num_layers)) < num_layers:
            place = 0 if own_layer(name) is None else layer + 1
            changes[place] += np.sum((receiver[name] - theirs) ** 2)
            lengths[place] += np.sum(theirs**2)
    relative = np.where(changes == 0, 0.0, np.sqrt(changes / lengths))
    return tuple(np.where(np.isnan(relative), math.inf, relative).tolist())


@np.errstate(all="ignore")  # A broken checkpoint has values that are no numbers.
def _sketch(name: str, dtype: str, pieces: Iterable[Any]) -> Sketch:
    total, signs = np.zeros(_WIDTH), _signs_of_all()
    for number, piece in enumerate(pieces):
        values = _values(dtype, piece)
        rows = np.pad(values, (0, -len(values) % _WIDTH)).reshape(-1, _WIDTH)
        sums = (rows * signs[: len(rows)]).sum(axis=0)
        total += sums * _signs(f"{name}\0{number}", _WIDTH)
    return total.astype(np.float32)


def _values(dtype: str, piece: Any) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(piece, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(piece, f"f{_BYTES[dtype]}").astype(np.float32, copy=False)


@cache
def _signs_of_all() -> NDArray[np.float32]:
    """Return the random signs for the values of a piece (`_PIECE` values of a tensor). All pieces
    have the same; `_sketch` then multiplies the sums of a piece by other signs of its own."""
    return _signs("", _PIECE).reshape(_ROWS, _WIDTH)


def _signs(seed: str, number: int) -> NDArray[np.float32]:
    """Return random signs, equal on every machine."""
    drawn = np.frombuffer(blake3(seed.encode()).digest(length=-(-number // 8)), np.uint8)
    return np.unpackbits(drawn)[:number].astype(np.float32) * 2 - 1


def _piece_bytes(name: str, dtype: str) -> int:
    if dtype not in _BYTES:
        known = ", ".join(_BYTES)
        raise ConfigError(f"{name} is {dtype}, and distances are computed of {known}")
    return _PIECE * _BYTES[dtype]
