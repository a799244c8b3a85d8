"""A simulated CUDA device: it computes on the host, and finds faults that a real device would have.

Inside `VirtualCuda()`, tensors on `cuda:0` have values, streams and events exist, and three kinds
of faults are found:

    races    two accesses to the same bytes that no fence orders. Each stream has a vector clock,
             and so has each host thread: page-locked memory that the host touches while a copy of
             it may still run is a race. The detector is torch's own (`torch.cuda._sanitizer`).
    stalls   operations that make the host wait for the device, or copy pageable memory
    capture  a stall while a CUDA graph is captured raises `NotCapturable`

Stand-ins for SGLang's copy kernels move bytes between addresses. An address that is neither
page-locked nor on the device raises `IllegalAddress`. `peak_bytes` and `allocations` show use of
the device's memory.

A call of the product that orders streams, or waits for one, is a fence. Its line identifies it.
With `drop`, one fence does nothing, so that a test can show that it is needed.

Not modelled: memory that the allocator gives away once a tensor is freed, and kernels' own errors.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import linecache
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from accesses import INDEXING, accesses, aten, granules, is_view, keys_of
from sglang.srt.platforms import current_platform
from torch.cuda._sanitizer import EventHandler, SynchronizationError, TensorInfo
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from virtual_streams import Clock, Event, Graph, Lock, Stream

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("sglang_droidspeak", "cachetree")
_NOT_CALLERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_WAITING: Final = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
"""Operations for which the host waits, to know a value or a shape."""


_ALIGNED: Final = 16
"""Bytes that the copy kernels move at once."""


class IllegalAddress(RuntimeError):
    """A kernel got memory that the device cannot reach, or not at once."""


class NotCapturable(RuntimeError):
    """CUDA would end the capture of this graph with an error."""


@dataclass(frozen=True, order=True)
class Line:
    """A line of the product that orders streams, or waits for the device."""

    file: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.what}"


@dataclass(frozen=True)
class Stall:
    why: str
    operation: str
    line: Line | None
    """Line of the product; None if other code asked for the operation."""


class VirtualTensor(torch.Tensor):
    """A tensor on `cuda:0`; its values are those of `host`."""

    host: torch.Tensor
    cuda_: VirtualCuda
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, _cuda: VirtualCuda) -> VirtualTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="cuda:0",
        )

    def __init__(self, host: torch.Tensor, cuda: VirtualCuda) -> None:
        self.host = host
        self.cuda_ = cuda
        cuda.appears(self)

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"VirtualTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs))
        cuda = next(it for it in leaves if isinstance(it, VirtualTensor)).cuda_
        return cuda.run(func, args, kwargs or {})


class _OnDevice(TorchDispatchMode):
    def __init__(self, cuda: VirtualCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._cuda.run(func, args, kwargs or {})


@dataclass
class VirtualCuda:
    """One simulated device, used in a `with` statement. Threads that start inside the statement use
    this device, too."""

    drop: Line | None = None
    """Fence that does nothing, if any."""
    races: list[SynchronizationError] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    fences: set[Line] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    """Threads that have left a stream, once for each time. Torch then sets the device that the
    thread had before: for a new thread, the process's first."""
    is_capturing: bool = False
    kernels: list[str] = field(default_factory=list)
    """Copy kernels of SGLang that ran, by name."""
    allocations: list[Line] = field(default_factory=list)
    """Lines of the product that took memory of the device."""
    live_bytes: int = 0
    peak_bytes: int = 0
    _alive: dict[int, int] = field(default_factory=dict)
    """Number of tensors in each memory of the device, by address."""
    _sizes: dict[int, int] = field(default_factory=dict)
    _graph: Graph | None = None
    _detector: EventHandler = field(default_factory=EventHandler)
    _guard: Any = field(default_factory=_thread.RLock)
    _ids: Any = field(default_factory=lambda: count(1))
    _pinned: list[range] = field(default_factory=list)
    _kept: dict[int, object] = field(default_factory=dict)
    """Memory seen so far. It is kept alive, so that no address is used for another memory."""
    _local: threading.local = field(default_factory=threading.local)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> VirtualCuda:
        if not torch.cuda.is_available():
            torch._C._ensureCUDADeviceGuardSet()
        self.default_stream = Stream(self, 0)
        fakes = {
            "Stream": lambda *_, priority=0, **__: Stream(self, next(self._ids), priority),
            "Event": lambda *_, **__: Event(self),
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda *_: self.default_stream,
            "synchronize": lambda *_: self.fence("synchronize", self._wait_for_all),
            "is_current_stream_capturing": lambda: self.is_capturing,
            "current_device": lambda: 0,
            "cudart": lambda: self,
            "_lazy_init": lambda: None,
            "CUDAGraph": Graph,
            "graph": self.capturing,
        }
        enter = self._stack.enter_context
        for name, fake in fakes.items():
            enter(patch.object(torch.cuda, name, fake))
        run = threading.Thread.run

        def run_on_device(thread: threading.Thread) -> None:
            with _OnDevice(self):
                run(thread)

        enter(patch.object(threading.Thread, "run", run_on_device))
        # What one thread did before it released a lock is done for the next that takes it.
        enter(patch.object(threading, "Lock", lambda: Lock(self)))
        enter(patch.object(threading, "_allocate_lock", lambda: Lock(self)))
        enter(patch.object(threading, "RLock", threading._PyRLock))
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PRODUCT:
                for attribute, value in list(vars(module).items()):
                    if value is queue.SimpleQueue:
                        enter(patch.object(module, attribute, queue._PySimpleQueue))
        with contextlib.suppress(ImportError):  # SGLang need not be there.
            from sglang_droidspeak import engine

            enter(patch.object(engine, "transfer", Kernels(self), create=True))
        enter(patch.object(np, "copyto", self._watched(np.copyto)))
        enter(patch.object(torch, "tensor", _pinned_by_hand(torch.tensor)))
        pins = {"is_pin_memory_available": lambda device=None: "cuda" in str(device)}
        enter(patch.multiple(current_platform, **pins))
        # The detector keeps a stack of each operation, for which Python looks at all files anew.
        enter(patch.object(linecache, "checkcache", lambda *_: None))
        # A tensor made of Python's numbers goes to the device by a copy that the mode sees.
        lifts = torch._C._only_lift_cpu_tensors()
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        torch._C._set_only_lift_cpu_tensors(True)
        enter(_OnDevice(self))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    # What tests ask of it.

    @contextlib.contextmanager
    def capturing(self, graph: Graph | None = None) -> Iterator[None]:
        """Capture a graph, as `torch.cuda.graph` does on another stream; the operations also run at
        once."""
        self._wait_for_all()
        self.is_capturing = True
        self._graph = graph
        try:
            with self.stream(Stream(self, next(self._ids))):
                yield
        finally:
            self.is_capturing = False

    def page_locked(self, num_bytes: int) -> memoryview:
        """Return host memory that the device copies from and to without a wait of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        self._pinned.append(range(address, address + num_bytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._pinned = [it for it in self._pinned if it.start != address]
        return 0

    def on_host(self, reads: Any = (), writes: Any = ()) -> None:
        """Record that the calling thread reads and writes these buffers now."""
        keys = []
        for buffers in (reads, writes):
            of_buffers = [
                self._keys_at(it.ctypes.data, it.nbytes) for it in map(np.asarray, buffers)
            ]
            keys.append({key for of in of_buffers for key in of})
        self._access(self._host, *keys, "host")

    # Its memory.

    def appears(self, tensor: VirtualTensor) -> None:
        storage = tensor.host.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        with self._guard:
            if not self._alive.get(base):
                self._sizes[base] = size
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                if line := _caller("takes memory"):
                    self.allocations.append(line)
            self._alive[base] = self._alive.get(base, 0) + 1
        weakref.finalize(tensor, self._goes, base).atexit = False

    def _goes(self, base: int) -> None:
        with self._guard:
            self._alive[base] -= 1
            if not self._alive[base]:
                self.live_bytes -= self._sizes[base]

    def copy_rows(self, name: str, moves: Sequence[Move], size: int, reads: Any) -> None:
        """Run one kernel on the current stream. It also reads these tensors of the device."""
        stream = self.current_stream().id
        self.join(stream, self.host_clock())
        keys: tuple[set[int], set[int]] = (set(), set())
        for tensor in reads:
            keys[0].update(keys_of(tensor.host))
        for into, source in moves:
            for touched, (base, offsets) in zip(keys, (source, into), strict=True):
                memory = self._memory_of(base)
                for offset in offsets:
                    at = base - memory.start + offset
                    if not 0 <= at <= len(memory) - size:
                        raise IllegalAddress(f"{name}: {at} is beyond {len(memory)} bytes")
                    if (base + offset) % _ALIGNED:
                        raise IllegalAddress(f"{name}: {at} is no multiple of {_ALIGNED} bytes")
                    touched.update(granules(memory.start, at, size))
            for to, of in zip(into[1], source[1], strict=True):
                ctypes.memmove(into[0] + to, source[0] + of, size)
        self.kernels.append(name)
        self._access(stream, *keys, name)

    def _memory_of(self, address: int) -> range:
        with self._guard:  # Other threads' tensors appear meanwhile.
            ranges = [range(it, it + size) for it, size in self._sizes.items() if self._alive[it]]
        for memory in (*self._pinned, *ranges):
            if address in memory:
                return memory
        raise IllegalAddress(f"{address:#x} is neither page-locked nor on the device")

    # Streams.

    def current_stream(self, *_device: object) -> Stream:
        return getattr(self._local, "stream", self.default_stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before
            self.left.append(threading.current_thread().name)

    def fence(self, what: str, action: Callable[[], None]) -> None:
        line = _caller(what)
        if line is not None:
            self.fences.add(line)
        if line is None or line != self.drop:
            action()

    def new_stream(self, stream: int) -> Clock:
        with self._guard:
            self._detector.syncs.create_stream(stream)
            return self._clock(stream)

    def clock_of(self, stream: int) -> Clock:
        with self._guard:
            return dict(self._clock(stream))

    def join(self, stream: int, clock: Clock) -> None:
        with self._guard:
            self._detector.syncs._state_wait_for_other(self._clock(stream), clock)

    def host_waits(self, clock: Clock, what: str) -> None:
        self._stall(what, what)
        self.fence(what, lambda: self.join(self._host, clock))

    def host_clock(self) -> Clock:
        return self.clock_of(self._host)

    def host_joins(self, clock: Clock) -> None:
        self.join(self._host, clock)

    def _clock(self, stream: int) -> Clock:
        self._detector.syncs._ensure_stream_exists(stream)
        return self._detector.syncs.current_sync_states[stream]

    def _wait_for_all(self) -> None:
        for stream in list(self._detector.syncs.current_sync_states):
            if stream >= 0:
                self.join(self._host, self.clock_of(stream))

    @property
    def _host(self) -> int:
        """Number of the calling thread's clock. It is negative, unlike the numbers of streams."""
        if not hasattr(self._local, "host"):
            self._local.host = -next(self._ids)
        return self._local.host

    # Operations.

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with _OnDevice(self):
                return func.decompose(*args, **kwargs)
        operation = _Operation(func, args, kwargs)
        if func is aten.is_pinned.default:
            return not operation.there and self._is_pinned(operation.here[0].data_ptr())
        is_on_device = {id(tensor.host) for tensor in operation.there}

        def keys(tensor: torch.Tensor, elements: torch.Tensor | None = None) -> set[int]:
            if id(tensor) in is_on_device:
                return keys_of(tensor, elements)
            return self._keys_at(tensor.data_ptr(), tensor.nbytes)

        # What it reads is looked up before it runs: it may overwrite its own indices.
        reads, writes = accesses(func, operation.args, operation.kwargs, keys)
        made = operation.execute()
        if self.is_capturing and self._graph is not None:
            self._graph.operations.append((operation, made))
        for tensor in [*made, *operation.here]:
            self._kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        if operation.pins:
            self._pinned += [range(of.data_ptr(), of.data_ptr() + of.nbytes) for of in made]
        if operation.is_there and not is_view(func):
            writes = writes.union(*(keys_of(tensor) for tensor in made))
        if not (operation.there or operation.is_there):
            self._access(self._host, reads, writes, func.name())
        elif not is_view(func):
            stream = self.current_stream().id
            self.join(stream, self.host_clock())
            self._access(stream, reads, writes, func.name())
            self._have_host_wait(operation, made)
        return operation.result(self)

    def _have_host_wait(self, operation: _Operation, made: Sequence[torch.Tensor]) -> None:
        """Make the host wait for the current stream, as the operation would."""
        stream = self.current_stream().id
        why = operation.why_host_waits
        if operation.crosses:
            memory = (operation.here or made)[0]
            if not self._is_pinned(memory.data_ptr()):
                why = "pageable copy"
            elif not operation.is_async:
                self._stall("blocking copy", operation.func.name())
                self.fence("blocking copy", lambda: self.join(self._host, self.clock_of(stream)))
        if why:
            self._stall(why, operation.func.name())
            self.join(self._host, self.clock_of(stream))

    def _stall(self, why: str, operation: str) -> None:
        if self.is_capturing:
            raise NotCapturable(f"{operation}: {why}")
        self.stalls.append(Stall(why, operation, _caller(why)))

    def _access(self, stream: int, reads: set[int], writes: set[int], name: str) -> None:
        if not (reads or writes):
            return
        known = self._detector.tensors_accessed.accesses
        with self._guard:
            self._clock(stream)
            for key in reads | writes:
                if key not in known:
                    known[key] = TensorInfo(None)
            self.races += self._detector._handle_kernel_launch(
                stream, reads - writes, writes, set(), name, {key: [] for key in reads | writes}
            )

    def _keys_at(self, address: int, num_bytes: int) -> set[int]:
        for memory in self._pinned:
            if address in memory:
                return granules(memory.start, address - memory.start, num_bytes)
        return set()

    def _is_pinned(self, address: int) -> bool:
        return any(address in it for it in self._pinned)

    def _watched(self, copyto: Callable[..., None]) -> Callable[..., None]:
        def copy(into: np.ndarray, source: Any, *args: Any, **kwargs: Any) -> None:
            self.on_host(reads=[source], writes=[into])
            copyto(into, source, *args, **kwargs)

        return copy


Move = tuple[tuple[int, Sequence[int]], tuple[int, Sequence[int]]]
"""Address and offsets in bytes, first of the written rows, then of the read rows."""


class Kernels:
    """Replace `sglang_droidspeak.engine.transfer`."""

    def __init__(self, cuda: VirtualCuda) -> None:
        self._cuda = cuda

    def can_use_hicache_jit_kernel(self, *, element_size: int) -> bool:
        return element_size % 128 == 0  # as SGLang's `_tiles_across_lanes`

    def transfer_hicache_one_layer(
        self,
        k_cache_dst: torch.Tensor,
        v_cache_dst: torch.Tensor,
        indices_dst: torch.Tensor,
        k_cache_src: torch.Tensor,
        v_cache_src: torch.Tensor,
        indices_src: torch.Tensor,
    ) -> None:
        pairs = ((k_cache_dst, k_cache_src), (v_cache_dst, v_cache_src))
        indices = (indices_dst, indices_src)
        assert len(indices_dst) == len(indices_src)
        assert indices_dst.dtype == indices_src.dtype
        assert all(it.dim() == 2 and it.stride(1) == 1 for pair in pairs for it in pair)
        assert len({(it.shape[1], it.dtype) for pair in pairs for it in pair}) == 1
        size = k_cache_dst[0].nbytes
        moves = [
            tuple(
                (it.data_ptr(), (at.host * it.stride(0) * it.element_size()).tolist())
                for it, at in zip(pair, indices, strict=True)
            )
            for pair in pairs
        ]
        self._cuda.copy_rows("transfer_hicache_one_layer", moves, size, indices)

    def transfer_hicache_all_layer(
        self,
        k_ptr_dst: torch.Tensor,
        v_ptr_dst: torch.Tensor,
        indices_dst: torch.Tensor,
        k_ptr_src: torch.Tensor,
        v_ptr_src: torch.Tensor,
        indices_src: torch.Tensor,
        *,
        kv_cache_src_stride_bytes: int,
        kv_cache_dst_stride_bytes: int,
        element_size: int,
    ) -> None:
        tables = (k_ptr_dst, v_ptr_dst, k_ptr_src, v_ptr_src)
        assert all(it.dtype == torch.uint64 and it.is_contiguous() for it in tables)
        to = (indices_dst.host * kv_cache_dst_stride_bytes).tolist()
        of = (indices_src.host * kv_cache_src_stride_bytes).tolist()
        moves = [
            ((into, to), (source, of))
            for pair in ((k_ptr_dst, k_ptr_src), (v_ptr_dst, v_ptr_src))
            for into, source in zip(*(it.host.tolist() for it in pair), strict=True)
        ]
        reads = (*tables, indices_dst, indices_src)
        self._cuda.copy_rows("transfer_hicache_all_layer", moves, element_size, reads)


class _Operation:
    """One call of an operator. It runs on plain tensors that have the values of the device's
    tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        self.there = [it for it in tensors if isinstance(it, VirtualTensor)]
        self.here = [it for it in tensors if not isinstance(it, VirtualTensor)]
        self.is_there = bool(self.there)
        """True if the result is on the device."""
        self.args, self.kwargs = pytree.tree_map(_plain, (args, dict(kwargs)))
        self.pins = self.kwargs.pop("pin_memory", False) or func is aten._pin_memory.default
        if self.kwargs.get("device") is not None:
            self.is_there = torch.device(self.kwargs["device"]).type == "cuda"
            self.kwargs["device"] = "cpu"
        if func is aten._to_copy.default and self.there and not self.is_there and self.is_async:
            self.pins = True  # as torch does for what comes to the host without waiting
        placed = [(tuple(it.shape), str(it.device)) for it in tensors]
        is_copy = func in (aten._to_copy.default, aten.copy_.default)
        self.crosses = is_copy and bool(self.there and (self.here or not self.is_there))
        self.crosses = self.crosses or (is_copy and bool(self.here) and self.is_there)
        if self.there and not is_copy and func not in INDEXING and any(x.dim() for x in self.here):
            raise RuntimeError(f"{func.name()}: tensors on different devices: {placed}")

    @property
    def is_async(self) -> bool:
        return self.kwargs.get("non_blocking", False) or any(it is True for it in self.args[2:])

    @property
    def why_host_waits(self) -> str:
        """Return why the host waits, for other reasons than a copy; empty if it does not."""
        if self.func in INDEXING and self.there:
            if self.here:
                return "copy of a CPU scalar or index"
            return "the host reads a mask" if _has_mask(self.args[1]) else ""
        has_size = self.kwargs.get("output_size") is not None
        return "the host reads a result" if self.func in _WAITING and not has_size else ""

    def execute(self) -> list[torch.Tensor]:
        """Run the operation. Return the new tensors."""
        is_pinning = self.func is aten._pin_memory.default
        self.out = self.args[0].clone() if is_pinning else self.func(*self.args, **self.kwargs)
        known = {id(it) for it in (*self.here, *(it.host for it in self.there))}
        outs = pytree.tree_leaves(self.out)
        return [it for it in outs if isinstance(it, torch.Tensor) and id(it) not in known]

    def result(self, cuda: VirtualCuda) -> Any:
        wrappers = {id(it.host): it for it in self.there}

        def wrapped(value: Any) -> Any:
            if not (self.is_there and isinstance(value, torch.Tensor)):
                return value
            return wrappers[id(value)] if id(value) in wrappers else VirtualTensor(value, cuda)

        with torch.inference_mode(False):
            return pytree.tree_map(wrapped, self.out)


def _pinned_by_hand(tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Pin memory for `torch.tensor`, which pins without any mode seeing it."""

    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = tensor(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    return make


def _plain(value: Any) -> Any:
    return value.host if isinstance(value, VirtualTensor) else value


def _has_mask(indices: Any) -> bool:
    if isinstance(indices, torch.Tensor) or not isinstance(indices, (list, tuple)):
        return False
    return any(it is not None and it.dtype == torch.bool for it in indices)


def _caller(what: str) -> Line | None:
    """Return the line that made the call, if it is a line of the product."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PRODUCT:
        return None
    return Line(str(path.relative_to(ROOT)), frame.f_lineno, what)
