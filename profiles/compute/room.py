"""Choose batch sizes that fit into the memory that the profiler may use.

Beside both models' weights, memory holds the following for one document at a time. The columns say
what it is, where it is, and what decides its size:

    KV of the sender, of the receiver, of recomputes; E of the sender    host    by prefix length
    tensors of one layer over a whole prefix, attention masks            device  by prefix length
    the residual streams of all mixtures of one starting layer           device  by suffix length
    rows that go through a layer together, with their KV of all layers   device  by free memory
    distributions over the vocabulary                                    device  by free memory
    sums that maps of E are fitted on, for all their layers              device  during the fit

If the device is the host, one limit holds for both. Everything except the first line is freed and
made again, layer after layer.

The system does not get all freed memory at once: glibc returns blocks from 32 MiB on. Smaller
blocks leave holes, into which the next blocks, of other sizes, may not fit. So we reserve as many
bytes for holes as are freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PretrainedConfig

from cachetree import ConfigError
from profiles.compute.layered import LayeredModel
from profiles.data.documents import Document
from profiles.environment import free_memory_bytes

GIB: Final = 1 << 30
FREE_SHARE: Final = 0.8
"""Share of the free memory that may be used if the user states no limit."""
MOST_ROWS: Final = 256
MOST_POSITIONS: Final = 8192
MOST_HOLES: Final = GIB // 2
"""Largest number of bytes to reserve for holes between blocks of memory: sixteen blocks of just
below 32 MiB. A layer never has more such blocks at a time."""
SOLVING: Final = 4
"""Memory to solve for one map of E in float64, as a multiple of the map's sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Largest batch sizes for which the device has memory."""

    rows: int
    """Number of batch rows that go through a layer together."""
    positions: int
    """Number of next-token distributions over the vocabulary that exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bytes that the profiler may use in addition to the models' weights."""

    host: int
    device: int | None = None
    """None if the device is the host: then `host` limits both."""


def bounds_of(host_gb: float | None, device_gb: float | None, device: torch.device) -> Bounds:
    """Return the memory limits that the user states in GiB. Without a stated limit, use most of the
    memory that is free now."""
    free = free_memory_bytes()
    host = int(FREE_SHARE * free if host_gb is None else host_gb * GIB)
    if device.type == "cpu":
        return Bounds(host=host)
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return Bounds(
        host=host, device=int(FREE_SHARE * free if device_gb is None else device_gb * GIB)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of one model's tensors, for each kind of tensor."""

    num_layers: int
    kv: int
    """Bytes of KV of one token at one layer."""
    e: int
    """Bytes of E of one token."""
    attended: int
    """Bytes of a token's K and V in attention: as stored, and once more repeated for every query
    head."""
    inner: int
    """Largest number of bytes that one token takes inside a layer at a time."""
    seen: int
    """Bytes that an attention mask takes for one query and one key, while the mask is made."""
    distribution: int
    """Bytes of one next-token distribution, and of its comparison with another."""
    choice: int
    """Bytes of one next-token distribution, if only its most likely token is needed."""
    sums: int
    """Bytes of the sums that one map of E is fitted on."""

    @classmethod
    def of(cls, model: LayeredModel) -> Sizes:
        config, width = model.model.config, model.dtype.itemsize
        hidden, heads = config.hidden_size, config.num_attention_heads
        of_keys = model.kv_bytes // 2 // width
        of_queries = of_keys * heads // config.num_key_value_heads
        return cls(
            num_layers=model.num_layers,
            kv=model.kv_bytes,
            e=model.e_bytes,
            attended=model.kv_bytes + 2 * of_queries * width,
            # Queries exist at most six times while they are normed (in float32) and rotated.
            inner=(8 * hidden + max(6 * of_queries + 4 * of_keys, _mlp(config))) * width,
            seen=2 + 2 * width,
            distribution=config.vocab_size * 4 * 6,
            choice=config.vocab_size * (4 + width),
            sums=2 * (hidden + 1) * (2 * hidden + 1) * 4,
        )


def _mlp(config: PretrainedConfig) -> int:
    """Return how many numbers a token takes in the MLP: gate, up and their product. With experts,
    each active expert counts."""
    num_experts = getattr(config, "num_experts_per_tok", None)
    if num_experts is None:
        return 3 * config.intermediate_size
    return num_experts * (3 * config.intermediate_size + 4 * config.hidden_size)


def held_bytes(sizes: Sizes, document: Document, num_mixtures: int) -> int:
    """Bytes that a document takes on the device, whatever the batch sizes are."""
    num_prefix = len(document.prefix)
    num_rows, num_suffix = len(document.questions), longest_suffix(document)
    one_pass = num_prefix * (sizes.inner + sizes.attended)
    mask = num_prefix * num_prefix * sizes.seen
    # Four copies: entering a layer, collected for one source, leaving in parts, joined.
    streams = 4 * (num_mixtures + 1) * num_rows * num_suffix * sizes.e
    return _with_holes(one_pass + mask + streams)


def row_bytes(sizes: Sizes, document: Document) -> int:
    """Bytes of one batch row: its work in one layer, its KV of all layers, and one distribution."""
    num_suffix = longest_suffix(document)
    num_tokens = len(document.prefix) + num_suffix
    mask = num_suffix * num_tokens * sizes.seen
    grown = num_tokens * sizes.num_layers * sizes.kv
    in_layer = num_tokens * sizes.attended + num_suffix * sizes.inner
    return in_layer + mask + grown + sizes.choice


def longest_suffix(document: Document) -> int:
    """Number of tokens of the longest question with its answer."""
    return max(len(it.suffix) for it in document.questions) + document.task.max_new


def make_room(
    sizes: Sizes, documents: Iterable[Document], num_mixtures: int, bounds: Bounds
) -> Room:
    """Return the largest batch sizes at which the work on every document fits into memory. Raises
    ConfigError if not even one row fits."""
    rows, positions = MOST_ROWS, MOST_POSITIONS
    for document in documents:
        on_host = _kept_bytes(sizes, document)
        held, row = held_bytes(sizes, document, num_mixtures), row_bytes(sizes, document)
        _require(on_host, _least_bytes(sizes, document, num_mixtures), bounds, document)
        spare = bounds.host - on_host - held if bounds.device is None else bounds.device - held
        usable = max(spare / 2, spare - MOST_HOLES)  # the rest is for the holes
        rows = min(rows, int(usable / row))
        positions = min(positions, int(usable / sizes.distribution))
    return Room(rows=rows, positions=positions)


def most_needed(sizes: Sizes, documents: Iterable[Document]) -> int:
    """Bytes, of host and device together, that the largest document needs beside the weights."""
    return max(_kept_bytes(sizes, it) + _least_bytes(sizes, it, 1) for it in documents)


def _kept_bytes(sizes: Sizes, document: Document) -> int:
    """Bytes that a document takes on the host: E once, KV four times. These are KV of the sender,
    of the receiver and, during judging, of a recompute and of a CacheBlend."""
    return sizes.num_layers * len(document.prefix) * (4 * sizes.kv + sizes.e)


def _least_bytes(sizes: Sizes, document: Document, num_mixtures: int) -> int:
    """Bytes that a document takes on the device with batches of one row and one distribution."""
    most = max(row_bytes(sizes, document), sizes.distribution)
    return held_bytes(sizes, document, num_mixtures) + _with_holes(most)


def require_fitting(
    sizes: Sizes, documents: Iterable[Document], num_maps: int, bounds: Bounds
) -> None:
    """Raise ConfigError if memory has no room for fitting maps of E at `num_maps` layers. A fit
    needs its sums, and KV and E of both models for the longest document."""
    document = max(documents, key=lambda it: len(it.prefix))
    on_host = 2 * len(document.prefix) * (sizes.num_layers * sizes.kv + num_maps * sizes.e)
    held = num_maps * sizes.sums + _with_holes(SOLVING * sizes.sums)
    held += held_bytes(sizes, document, 0)
    _require(on_host, held, bounds, document, f", with maps of E from {num_maps} layers,")


def _require(
    on_host: int, held: int, bounds: Bounds, document: Document, fitting: str = ""
) -> None:
    """Raise ConfigError if the host has no room for `on_host` bytes, or the device for `held`."""
    if bounds.device is None:
        needs = [("max-memory-gb", on_host + held, bounds.host)]
    else:
        needs = [("max-memory-gb", on_host, bounds.host)]
        needs += [("max-device-memory-gb", held, bounds.device)]
    for flag, needed, bound in needs:
        if needed > bound:
            enough_gb = math.ceil(100 * needed / GIB) / 100
            raise ConfigError(
                f"--{flag} is {round(bound / GIB, 4):g}, and a context of {len(document.prefix)} "
                f"tokens (question {document.questions[0].name}){fitting} needs {enough_gb:.2f}; "
                "raise it, or cut contexts with --max-prompt-tokens"
                + (", or take a larger --group" if fitting else "")
            )


def _with_holes(num_bytes: int) -> int:
    """Return the bytes in use plus the bytes to reserve for holes."""
    return num_bytes + min(num_bytes, MOST_HOLES)
