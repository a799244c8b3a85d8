"""Convert rows of KV and E between the KV pool's layout and the bytes that cachetree stores.

stored, per layer   KV  [token, (K, V), head, head_dim]     E  [token, column]
pool, per layer     K   [slot, head, head_dim]   V  the same

If the family has a codec, every stored vector of `head_dim` values is encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from cachetree import ConfigError, Kind, Step
from cachetree.checkpoint import Codec, vector_bytes
from cachetree.checkpoint.codecs import decode, encode, prepare

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import MHATokenToKVPool
    from sglang_droidspeak.store.e_pool import EPool

log = logging.getLogger(__name__)

_PIECE_TOKENS: Final = 1024
"""Tokens that are stored in one piece: 4 MiB of KV per layer for a Llama-3-8B."""
_LOADED_TOKENS: Final = 8192
"""Tokens that are loaded in one piece: 32 MiB. While they are decoded, the device holds several
copies."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Encode tensors on any device into stored bytes, and decode them, by a family's codec."""

    codec: Codec
    length: int
    """Values of one vector."""

    def store(self, values: torch.Tensor, target: memoryview) -> None:
        """Write `values`, which fill whole vectors, to `target`. Returns once they are written."""
        encoded = encode(self.codec, values.reshape(-1, self.length))
        torch.frombuffer(target, dtype=torch.uint8).view(encoded.shape).copy_(encoded)

    def load(self, raw: memoryview, like: torch.Tensor) -> torch.Tensor:
        """Decode bytes into rows of the dtype and width of `like`, on its device. On CUDA this runs
        on the current stream, without waiting for it."""
        encoded = torch.frombuffer(raw, dtype=torch.uint8).to(like.device, non_blocking=True)
        if self.codec is not Codec.NONE:  # Without a codec a token's E may not fill whole vectors.
            size = vector_bytes(self.codec, self.length, like.dtype.itemsize)
            encoded = encoded.view(-1, size)
        return decode(self.codec, encoded, like.dtype).view(-1, like.shape[-1])


@dataclass(frozen=True, slots=True)
class ServerPool:
    """This server's KV and E by slot, and how both are stored."""

    rows: DeviceRows | HostRows
    e_pool: EPool
    coding: Coding
    page_size: int

    def store(self, step: Step, slots: torch.Tensor, targets: Sequence[memoryview]) -> None:
        """Copy KV or E of these slots to host memory, in one or several runs. Returns once it is
        written. Copies in pieces, because the device's memory holds each piece first."""
        for target, part in _parts(targets, slots, _PIECE_TOKENS):
            if step.kind is Kind.E:
                self.coding.store(self.e_pool.e[step.layer][part], target)
            else:
                self.rows.read_into(step.layer, part, target)

    def load(self, layer: int, slots: torch.Tensor, sources: Sequence[memoryview]) -> int:
        """Copy KV from host memory, in one or several runs, into slots, as `DeviceRows.write_from`.
        Returns the number of bytes. Copies in pieces, because the device's memory holds each piece
        first."""
        for source, part in _parts(sources, slots, _LOADED_TOKENS):
            self.rows.write_from(layer, part, source)
        return sum(source.nbytes for source in sources)


def _parts(
    runs: Sequence[memoryview], slots: torch.Tensor, most: int
) -> Iterator[tuple[memoryview, torch.Tensor]]:
    """Pieces of the runs in order, of at most `most` slots each, with their slots."""
    row_bytes, at = sum(run.nbytes for run in runs) // len(slots), 0
    for run in runs:
        for start in range(0, run.nbytes, most * row_bytes):
            piece = run[start : start + most * row_bytes]
            num_slots = piece.nbytes // row_bytes
            yield piece, slots[at : at + num_slots]
            at += num_slots


def rows_of(pool: MHATokenToKVPool, coding: Coding) -> DeviceRows | HostRows:
    """Object that reads and writes whole layers of chosen slots of one KV pool."""
    is_plain = pool.k_buffer[0].device.type == "cpu" and coding.codec is Codec.NONE
    return HostRows(pool) if is_plain else DeviceRows(pool, coding)


class DeviceRows:
    """A pool on an accelerator: gathered, encoded, decoded and scattered there."""

    def __init__(self, pool: MHATokenToKVPool, coding: Coding) -> None:
        self._pool = pool
        self._coding = coding
        prepare(coding.codec, coding.length, pool.k_buffer[0].device)

    def read_into(self, layer: int, slots: torch.Tensor, target: memoryview) -> None:
        """Copy the KV of `slots` to host memory. Returns once it is written."""
        rows = torch.stack([buffer[slots] for buffer in self._buffers(layer)], dim=1)
        self._coding.store(rows, target)

    def write_from(self, layer: int, slots: torch.Tensor, source: memoryview) -> None:
        """Copy host memory into `slots`. On CUDA this runs on the current stream, without waiting
        for it."""
        buffers = self._buffers(layer)
        rows = self._coding.load(source, buffers[0]).view(-1, 2, *buffers[0].shape[1:])
        for part, buffer in enumerate(buffers):
            buffer[slots] = rows[:, part]

    def copy(self, layer: int, source: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the KV of slots `source` to as many others; on CUDA as `write_from`."""
        for buffer in self._buffers(layer):
            buffer[slots] = buffer[source]

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.k_buffer[layer], self._pool.v_buffer[layer]


class HostRows:
    """A pool in host memory. Only the calling thread copies.

    torch would copy with a team of threads, which would compete with the team that computes.
    """

    def __init__(self, pool: MHATokenToKVPool) -> None:
        self._buffers = [
            (_bytes_of(key), _bytes_of(value))
            for key, value in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]

    def read_into(self, layer: int, slots: torch.Tensor, target: memoryview) -> None:
        rows = self._rows(target)
        for row_run, slot_run in _runs(torch.arange(len(slots)), slots):
            for part, buffer in enumerate(self._buffers[layer]):
                rows[row_run, part] = buffer[slot_run]

    def write_from(self, layer: int, slots: torch.Tensor, source: memoryview) -> None:
        rows = self._rows(source)
        for row_run, slot_run in _runs(torch.arange(len(slots)), slots):
            for part, buffer in enumerate(self._buffers[layer]):
                buffer[slot_run] = rows[row_run, part]

    def copy(self, layer: int, source: torch.Tensor, slots: torch.Tensor) -> None:
        for source_run, slot_run in _runs(source, slots):
            for buffer in self._buffers[layer]:
                buffer[slot_run] = buffer[source_run]

    def _rows(self, raw: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
        width = self._buffers[0][0].shape[1]
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 2, width)


def _runs(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Runs along which both of two host tensors ascend; the tensors have equal length. Slots come
    in pages, mostly many pages in a row, so runs are long."""
    both = torch.stack([one, other]).numpy()
    starts = np.flatnonzero((np.diff(both, prepend=-2) != 1).any(0))
    lengths = np.diff(starts, append=len(one)).tolist()
    for (a, b), length in zip(both[:, starts].T.tolist(), lengths, strict=True):
        yield slice(a, a + length), slice(b, b + length)


def _bytes_of(buffer: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A KV buffer as `[slot, bytes of a row]`, sharing its memory."""
    return buffer.view(torch.uint8).view(buffer.shape[0], -1).numpy()


def page_locked(memory: memoryview) -> Callable[[], None]:
    """Page-lock host memory for the device. Returns a function that unlocks it.

    Blocks while the system allocates all its pages. Raises ConfigError.
    """
    cuda = torch.cuda.cudart()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    error = cuda.cudaHostRegister(address, memory.nbytes, 0)
    if int(error):
        raise ConfigError(
            f"{memory.nbytes} bytes of host memory cannot be page-locked (CUDA error "
            f"{int(error)}); lower host_gb or staging_gb"
        )

    def end() -> None:
        error = cuda.cudaHostUnregister(address)
        if int(error):
            log.warning("host memory stays page-locked: CUDA error %d", int(error))

    return end
