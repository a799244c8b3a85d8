"""How a family keeps KV and E: as they are, or in fewer bytes. `checkpoint.codecs` computes."""

from __future__ import annotations

from enum import Enum
from typing import Final

from cachetree.errors import ConfigError

SCALE_BYTES: Final = 2


class Codec(str, Enum):
    """Names are in configurations and on the wire, and never change."""

    NONE = "none"
    """Bytes as they are."""
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


def vector_bytes(codec: Codec, length: int, value_bytes: int) -> int:
    """Bytes that a vector of `length` values takes; ConfigError for a length that cannot be."""
    if codec is Codec.NONE:
        return length * value_bytes
    if codec is not Codec.INT4:
        return length + SCALE_BYTES
    if length < 2 or length & (length - 1):
        raise ConfigError(
            f"codec int4 rotates vectors of a power of two, and this model's have {length}; "
            "use int8 or fp8"
        )
    return length // 2 + SCALE_BYTES
