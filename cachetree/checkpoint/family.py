"""Families of models that may exchange caches, their encodings, and the sizes of their pages."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec

from cachetree.checkpoint.digests import digest_of
from cachetree.errors import ConfigError, FamilyMismatch
from cachetree.ids import Kind, ModelId

SCALE_BYTES: Final = 2
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_REMEDIES: Final = {
    "tokenizer": "if one of the models was trained from the other, copy one tokenizer.json into "
    "both folders (`droidspeak profile` names a text of which they make other tokens)"
}
_Size = Annotated[int, msgspec.Meta(ge=1)]


class Codec(StrEnum):
    """The encoding of a family's KV and E: raw, or in fewer bytes. `checkpoint.codecs` computes it.

    Names are in configurations and on the wire, and never change.
    """

    NONE = "none"
    """No encoding: bytes are unchanged."""
    INT8 = "int8"
    INT4 = "int4"


def vector_bytes(codec: Codec, length: int, value_bytes: int) -> int:
    """Bytes of an encoded vector of `length` values. Raises ConfigError for an impossible
    length."""
    if codec is Codec.NONE:
        return length * value_bytes
    if codec is not Codec.INT4:
        return length + SCALE_BYTES
    if length < 2 or length & (length - 1):
        raise ConfigError(
            f"codec int4 rotates vectors of a power of two, and this model's have {length}; "
            "use int8"
        )
    return length // 2 + SCALE_BYTES


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a checkpoint by its content. See `identity.read_model_identity`.

    The fields in `shape` are also in `Family`. All fields together identify the model.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rope: str
    """Canonical JSON of every config field that changes the rotary embedding. K is stored after the
    rotation, so two models that rotate differently cannot share it."""
    tokenizer: str
    """Hexadecimal digest of how the tokenizer turns text into ids, see `checkpoint.tokenizer`."""
    weights: str
    """Hexadecimal digest of all tensors, the adapter, and config fields that change the
    computation."""

    @property
    def model_id(self) -> ModelId:
        """Digest of all fields; equal on every machine."""
        return ModelId(hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:32])

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the model's `Family` that do not depend on how a server runs it."""
        return {it: getattr(self, it) for it in Family.__struct_fields__ if hasattr(self, it)}

    def with_adapter(self, digest: str) -> ModelIdentity:
        """Return the identity of the model with an adapter of this content; see
        `adapters.adapter_digest`."""
        return msgspec.structs.replace(self, weights=digest_of([self.weights, digest]))


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal before one server may read another server's KV.

    Two workers compare it field by field in their handshake. `tp_rank` is a field because a
    tensor-parallel rank has some of the heads and of E's columns. It exchanges them with the same
    rank of another server.
    """

    architecture: str
    num_layers: _Size
    hidden_size: _Size
    num_kv_heads: _Size
    head_dim: _Size
    rope: str
    tokenizer: str
    model_dtype: str
    """Dtype of the model's computation and of E. KV may have another dtype."""
    kv_dtype: str
    page_size: _Size
    quantization: str = "none"
    codec: Codec = Codec.NONE
    """Encoding of KV and E in memory and on the wire. All except `none` are lossy: decoded values
    are not exact."""
    tp_size: _Size = 1
    tp_rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def digest(self) -> str:
        """Digest of all fields; equal on every machine."""
        return _digest_of(self)

    @property
    def kv_page_bytes(self) -> int:
        """Bytes of one page of one layer's KV: rows of `[token, (K, V), kv_head, head_dim]`, each
        vector of `head_dim` encoded."""
        heads = max(1, self.num_kv_heads // self.tp_size)
        return self.page_size * 2 * heads * self._vector_bytes(self.kv_dtype)

    @property
    def e_page_bytes(self) -> int:
        """Bytes of one page of one rank's E at one layer: rows of `[token, e_width]`, encoded in
        vectors of `head_dim`."""
        if self.codec is Codec.NONE:
            return self.page_size * self.e_width * _DTYPE_BYTES[self.model_dtype]
        if self.e_width % self.head_dim:
            ranks = f" over tp_size {self.tp_size}" if self.tp_size > 1 else ""
            raise ConfigError(
                f"codec {self.codec.value} cuts E into pieces of head_dim {self.head_dim}, which "
                f"does not divide hidden_size {self.hidden_size}{ranks}; use codec none"
            )
        vectors = self.e_width // self.head_dim
        return self.page_size * vectors * self._vector_bytes(self.model_dtype)

    @property
    def e_width(self) -> int:
        """Number of E's columns on each rank. The first rank has the first columns. Raises
        ConfigError if the columns cannot be divided equally."""
        width, rest = divmod(self.hidden_size, self.tp_size)
        if rest:
            raise ConfigError(
                f"tp_size is {self.tp_size}, which does not divide hidden_size {self.hidden_size}: "
                "every rank keeps as many columns of E; choose another tp_size"
            )
        return width

    def page_bytes(self, kind: Kind) -> int:
        """Bytes of one page of KV or of E at one layer, on this rank."""
        return self.kv_page_bytes if kind is Kind.KV else self.e_page_bytes

    def _vector_bytes(self, dtype: str) -> int:
        return vector_bytes(self.codec, self.head_dim, _DTYPE_BYTES[dtype])

    def require_equal(self, other: Family, *, who: str) -> None:
        """Raise FamilyMismatch if `other` differs from this family. The error names the first field
        that differs."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                remedy = _REMEDIES.get(field, "use models of one family with equal server settings")
                raise FamilyMismatch(
                    f"{who} cannot exchange caches with this server: {field} is {theirs!r:.200} "
                    f"there and {ours!r:.200} here; {remedy}"
                )


@lru_cache(maxsize=16)
def _digest_of(family: Family) -> str:
    return hashlib.sha256(msgspec.json.encode(family, order="sorted")).hexdigest()[:32]
