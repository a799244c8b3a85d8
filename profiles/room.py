"""How much of a document's work fits into the memory that the profiler may use. Pure.

Beside the two models' weights it holds, for one document at a time,

    KV of the sender, of the receiver and of one recompute, E of the sender    by prefix length
    the residual streams of all mixtures of one starting layer                 by suffix length
    rows that go through a layer together                                      sized to the rest
    distributions over the vocabulary                                          sized to the rest
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cachetree.errors import ConfigError
from profiles.documents import Document
from profiles.layered import LayeredModel

GIB: Final = 1 << 30
MOST_ROWS: Final = 256
MOST_POSITIONS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much may be on the device at a time."""

    rows: int
    """Rows that go through a layer together."""
    positions: int
    """Tokens whose distributions over the vocabulary exist together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that one model needs, per token or per layer."""

    num_layers: int
    kv: int
    """Of a token at one layer."""
    e: int
    """Of a token."""
    attended: int
    """Of a token's K and V as attention reads them, repeated for every query head."""
    inner: int
    """Of a token inside the MLP and the projections."""
    distribution: int
    """Of one distribution over the vocabulary, with what computing it needs."""

    @classmethod
    def of(cls, model: LayeredModel) -> Sizes:
        config, width = model.model.config, model.dtype.itemsize
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return cls(
            num_layers=model.num_layers,
            kv=model.kv_bytes,
            e=model.e_bytes,
            attended=model.kv_bytes * (1 + heads // kv_heads),
            inner=(3 * config.intermediate_size + 8 * config.hidden_size) * width,
            distribution=config.vocab_size * 4 * 6,
        )


def held_bytes(sizes: Sizes, document: Document, num_mixtures: int) -> int:
    """What has to be there whatever the batches are."""
    num_prefix = len(document.prefix)
    num_rows, num_suffix = 2 * len(document.questions), longest_suffix(document)
    layers = sizes.num_layers * num_prefix * (3 * sizes.kv + sizes.e)
    one_pass = num_prefix * (sizes.inner + 2 * sizes.attended)
    streams = 2 * (num_mixtures + 1) * num_rows * num_suffix * sizes.e
    return layers + one_pass + streams


def row_bytes(sizes: Sizes, document: Document) -> int:
    """One row through one layer, and its own tokens' KV of all layers while it is decoded."""
    num_suffix = longest_suffix(document)
    num_tokens = len(document.prefix) + num_suffix
    mask = 6 * num_suffix * num_tokens
    tails = num_suffix * sizes.num_layers * sizes.kv
    return num_tokens * sizes.attended + num_suffix * sizes.inner + mask + tails


def longest_suffix(document: Document) -> int:
    """Tokens of the longest question with its answer."""
    return max(
        len(it.suffix) + max(len(it.reference), document.task.max_new) for it in document.questions
    )


def make_room(
    sizes: Sizes, documents: Iterable[Document], num_mixtures: int, max_memory_gb: float
) -> Room:
    """Batch sizes for the largest of the documents; ConfigError where not even one row fits."""
    bound = max_memory_gb * GIB
    rows, positions = MOST_ROWS, MOST_POSITIONS
    for document in documents:
        held, row = held_bytes(sizes, document, num_mixtures), row_bytes(sizes, document)
        least = held + row + sizes.distribution
        if least > bound:
            raise ConfigError(
                f"--max-memory-gb is {max_memory_gb:g}, and a context of {len(document.prefix)} "
                f"tokens (question {document.questions[0].name}) needs {least / GIB:.2f}; "
                "raise it, or cut contexts with --max-prompt-tokens"
            )
        spare = (bound - held) / 2
        rows = min(rows, max(1, int(spare / row)))
        positions = min(positions, max(1, int(spare / sizes.distribution)))
    return Room(rows=rows, positions=positions)
