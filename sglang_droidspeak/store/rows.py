"""Convert rows of KV and E between the KV pool's layout and the bytes that cachetree stores.

stored, per layer   KV  [token, (K, V), head, head_dim]     E  [token, column]
pool, per layer     K   [slot, head, head_dim]   V  the same

If the family has a codec, every stored vector of `head_dim` values is encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from cachetree import ConfigError, Kind, Span, Step
from cachetree.checkpoint import Codec, vector_bytes
from cachetree.checkpoint.codecs import DEVICE_BYTES, decode, encode, prepare
from cachetree.memory import cut
from sglang_droidspeak.store.e_pool import EPool, correction_bytes

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import MHATokenToKVPool
    from sglang_droidspeak.start.this_server import ThisServer

log = logging.getLogger(__name__)

_PIECE_TOKENS: Final = 1024
"""Number of tokens that `ServerPool.store` gathers on the device at a time: 4 MiB of KV per layer
for a Llama-3-8B."""
_LOADED_TOKENS: Final = 4096
"""Number of tokens that `ServerPool.load` decodes on the device at a time. Their encoded KV takes
16 MiB, and the decoding takes several times as much."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Encode tensors by the family's codec, for storage, and decode them, on any device."""

    codec: Codec
    length: int
    """Number of values in one vector."""

    def store(self, values: torch.Tensor, target: memoryview) -> None:
        """Encode `values`, one or more whole vectors, into `target`. On CUDA this runs on the
        current stream, without waiting for it."""
        encoded = encode(self.codec, values.reshape(-1, self.length))
        _raw(target).view(encoded.shape).copy_(encoded, non_blocking=True)

    def load(self, raw: memoryview, like: torch.Tensor) -> torch.Tensor:
        """Decode bytes into rows of the dtype and width of `like`, on its device. On CUDA this runs
        on the current stream, without waiting for it."""
        encoded = _raw(raw).to(like.device, non_blocking=True)
        if self.codec is not Codec.NONE:  # Without a codec a token's E may not fill whole vectors.
            size = vector_bytes(self.codec, self.length, like.dtype.itemsize)
            encoded = encoded.view(-1, size)
        return decode(self.codec, encoded, like.dtype).view(-1, like.shape[-1])

    def fill(self, rows: torch.Tensor, runs: Sequence[memoryview]) -> None:
        """Decode one or several runs of bytes into `rows`, `[tokens, values]`, like `load`. Without
        a codec this allocates no memory."""
        for raw, part in _parts(runs, len(rows), _LOADED_TOKENS):
            into = rows[part]
            if self.codec is Codec.NONE:
                into.view(torch.uint8).view(-1).copy_(_raw(raw), non_blocking=True)
            else:
                into.copy_(self.load(raw, into))


@dataclass(frozen=True, slots=True)
class ServerPool:
    """Access to this server's KV and E by slot, with their form in storage."""

    rows: DeviceRows | HostRows
    e_pool: EPool
    coding: Coding
    page_size: int

    def store(self, targets: Mapping[Step, Sequence[memoryview]], slots: torch.Tensor) -> None:
        """Copy KV of all layers, and E of the layers in `targets`, from these slots to host memory.
        Each transfer step has one or several runs of memory. Blocks until all bytes are written."""
        kv = [runs for step, runs in targets.items() if step.kind is Kind.KV]
        for step, runs in targets.items():
            if step.kind is Kind.E:
                for target, part in _parts(runs, len(slots), _PIECE_TOKENS):
                    self.coding.store(self.e_pool.e[step.layer][slots[part]], target)
        self.rows.read(slots, kv)
        written = torch.get_device_module(slots.device).Event()
        written.record()
        written.synchronize()

    def load(self, layer: int, slots: torch.Tensor, sources: Sequence[memoryview]) -> int:
        """Copy one layer's KV from one or several runs of host memory into these slots. On CUDA the
        copy runs on the current stream, without waiting. Return the number of bytes."""
        for source, part in _parts(sources, len(slots), self.rows.most_tokens):
            self.rows.write_from(layer, slots[part], source)
        return sum(source.nbytes for source in sources)


def _parts(
    runs: Sequence[memoryview], num_rows: int, most: int
) -> Iterator[tuple[memoryview, slice]]:
    """Cut the runs into pieces of at most `most` rows. Yield each piece and the rows it fills."""
    row_bytes, at = sum(run.nbytes for run in runs) // num_rows, 0
    for run in runs:
        for start in range(0, run.nbytes, most * row_bytes):
            piece = run[start : start + most * row_bytes]
            yield piece, slice(at, at := at + piece.nbytes // row_bytes)


def rows_of(pool: MHATokenToKVPool, coding: Coding) -> DeviceRows | HostRows:
    """Return the reader and writer of KV rows that fits this pool and device."""
    first = pool.k_buffer[0]
    if coding.codec is Codec.NONE and first.device.type == "cpu":
        return HostRows(pool)
    if coding.codec is Codec.NONE and first.device.type == "cuda":
        from sglang_droidspeak.engine import transfer

        if transfer.can_use_hicache_jit_kernel(element_size=first[0].nbytes):
            return KernelRows(pool, coding)
    return DeviceRows(pool, coding)


def working_bytes(server: ThisServer, dtype: torch.dtype, step_tokens: int) -> int:
    """Return the device bytes that recomputes, loads and offloads take on each rank beside the
    pools: for maps that correct E, buffers of E, and buffers for encoding and decoding."""
    identity = server.identity
    heads = max(1, identity.num_kv_heads * server.e_width // identity.hidden_size)
    buffered = server.e_width if server.has_blocks else 0
    buffered += identity.hidden_size if server.corrections else 0
    temporary = temporary_bytes(
        server.settings.codec, dtype, 2 * heads * identity.head_dim, server.e_width
    )
    return correction_bytes(server, dtype) + step_tokens * buffered * dtype.itemsize + temporary


def temporary_bytes(codec: Codec, dtype: torch.dtype, kv_values: int, e_values: int) -> int:
    """Return the most device bytes that a load of KV, a load of E and an offload take together,
    beside the pools. `kv_values` and `e_values` count the values of one token and layer."""
    encoding, decoding = DEVICE_BYTES[codec]
    loaded = (kv_values + e_values) * (dtype.itemsize + decoding)
    # Offloads gather K and V, and put them together.
    stored = max(kv_values, e_values) * (2 * dtype.itemsize + encoding)
    return int(_LOADED_TOKENS * loaded + _PIECE_TOKENS * stored)


class DeviceRows:
    """Rows of a pool on an accelerator, which gathers, encodes, decodes and scatters them."""

    most_tokens = _LOADED_TOKENS
    """Largest number of tokens in one call of `write_from`."""

    def __init__(self, pool: MHATokenToKVPool, coding: Coding) -> None:
        self._pool = pool
        self._coding = coding
        prepare(coding.codec, coding.length, pool.k_buffer[0].device)

    def read(self, slots: torch.Tensor, targets: Sequence[Sequence[memoryview]]) -> None:
        """Copy the KV of `slots` to host memory: for each layer one or several runs. On CUDA this
        runs on the current stream, without waiting for it."""
        for layer, runs in enumerate(targets):
            for target, part in _parts(runs, len(slots), _PIECE_TOKENS):
                rows = [buffer[slots[part]] for buffer in self._buffers(layer)]
                self._coding.store(torch.stack(rows, dim=1), target)

    def write_from(self, layer: int, slots: torch.Tensor, source: memoryview) -> None:
        """Copy host memory into `slots`. On CUDA the current stream runs it, and we do not wait."""
        buffers = self._buffers(layer)
        rows = self._coding.load(source, buffers[0]).view(-1, 2, *buffers[0].shape[1:])
        for part, buffer in enumerate(buffers):
            buffer[slots] = rows[:, part]

    def copy(self, layer: int, source: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the KV of the slots `source` to equally many other slots. On CUDA the copy runs as
        in `write_from`."""
        for buffer in self._buffers(layer):
            buffer[slots] = buffer[source]

    def _buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.k_buffer[layer], self._pool.v_buffer[layer]


class KernelRows(DeviceRows):
    """Rows of a pool on CUDA without a codec: SGLang's kernels move them between slots and
    page-locked memory in one pass. Other host memory is copied as in `DeviceRows`."""

    most_tokens = 1 << 16

    def __init__(self, pool: MHATokenToKVPool, coding: Coding) -> None:
        from sglang_droidspeak.engine import transfer

        super().__init__(pool, coding)
        self._kernels = transfer
        self._flat = [
            [it.view(len(it), -1).view(torch.uint8) for it in each]
            for each in (pool.k_buffer, pool.v_buffer)
        ]
        device = self._flat[0][0].device
        addresses = [[it.data_ptr() for it in each] for each in self._flat]
        self._layers = torch.tensor(addresses, dtype=torch.uint64).to(device)
        self._row_bytes = self._flat[0][0].shape[1]
        self._places = torch.arange(self.most_tokens, device=device)

    def read(self, slots: torch.Tensor, targets: Sequence[Sequence[memoryview]]) -> None:
        """Copy like `DeviceRows.read`, with one kernel for all layers. If fragmented memory gives
        layers different runs, each part that is contiguous in all layers gets a kernel."""
        if not (targets and _raw(targets[0][0]).is_pinned()):
            super().read(slots, targets)
            return
        size = 2 * self._row_bytes
        edges = {edge // size for runs in targets for edge in accumulate(it.nbytes for it in runs)}
        edges.update(range(0, len(slots), self.most_tokens))
        for start, stop in pairwise(sorted(edges)):
            span = Span(start * size, stop * size)
            keys = [_raw(cut(runs, span)[0]).data_ptr() for runs in targets]
            addresses = [keys, [key + self._row_bytes for key in keys]]
            table = torch.tensor(addresses, dtype=torch.uint64, pin_memory=True)
            self._kernels.transfer_hicache_all_layer(
                *table.to(slots.device, non_blocking=True),
                self._places[: stop - start],
                *self._layers,
                slots[start:stop],
                kv_cache_src_stride_bytes=self._row_bytes,
                kv_cache_dst_stride_bytes=size,
                element_size=self._row_bytes,
            )

    def write_from(self, layer: int, slots: torch.Tensor, source: memoryview) -> None:
        raw = _raw(source)
        if not raw.is_pinned():
            super().write_from(layer, slots, source)
            return
        rows = raw.view(len(slots), 2, self._row_bytes)
        keys, values = self._flat
        self._kernels.transfer_hicache_one_layer(
            keys[layer], values[layer], slots, rows[:, 0], rows[:, 1], self._places[: len(slots)]
        )


def _raw(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


class HostRows:
    """Rows of a pool in host memory. Only the calling thread copies.

    torch would copy with many threads, which would compete with the threads that compute.
    """

    most_tokens = 1 << 13

    def __init__(self, pool: MHATokenToKVPool) -> None:
        self._buffers = [
            (_bytes_of(key), _bytes_of(value))
            for key, value in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]

    def read(self, slots: torch.Tensor, targets: Sequence[Sequence[memoryview]]) -> None:
        for layer, runs in enumerate(targets):
            for target, at in _parts(runs, len(slots), self.most_tokens):
                rows = self._rows(target)
                for row_run, slot_run in _runs(torch.arange(len(rows)), slots[at]):
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
    """Yield the longest slices in which two slot tensors of equal length both count up by 1. Slots
    come in pages, mostly many pages in a row, so slices are long."""
    both = torch.stack([one, other]).numpy()
    starts = np.flatnonzero((np.diff(both, prepend=-2) != 1).any(0))
    lengths = np.diff(starts, append=len(one)).tolist()
    for (a, b), length in zip(both[:, starts].T.tolist(), lengths, strict=True):
        yield slice(a, a + length), slice(b, b + length)


def _bytes_of(buffer: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a view of a KV buffer as bytes, `[slot, bytes of a row]`."""
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
