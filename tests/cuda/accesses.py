"""Bytes that an operation reads and writes, distinguished finely enough for slots of one pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

aten: Final = torch.ops.aten

GRANULE: Final = 256
"""Bytes of a payload that count as one, from the start of its memory: at most one row of a pool.
Marks and indices count byte by byte."""
_ONE_BY_ONE: Final = (torch.bool, torch.int16, torch.int32, torch.int64)

_GATHERS: Final = {
    aten.index.Tensor: lambda at, args: aten.index.Tensor(at, args[1]),
    aten.index_select.default: lambda at, args: aten.index_select.default(at, *args[1:3]),
    aten.index_select.out: lambda at, args: aten.index_select.default(at, *args[1:3]),
    aten.gather.default: lambda at, args: aten.gather.default(at, *args[1:3]),
}
_SCATTERS: Final = {
    aten.index_put_.default: lambda at, args: aten.index.Tensor(at, args[1]),
    aten._index_put_impl_.default: lambda at, args: aten.index.Tensor(at, args[1]),
    aten.index_fill_.int_Scalar: lambda at, args: aten.index_select.default(at, *args[1:3]),
    aten.index_copy_.default: lambda at, args: aten.index_select.default(at, *args[1:3]),
}
INDEXING: Final = _GATHERS.keys() | _SCATTERS.keys()

Keys = Callable[[torch.Tensor, torch.Tensor | None], set[int]]


def keys_of(tensor: torch.Tensor, elements: torch.Tensor | None = None) -> set[int]:
    """The granules of memory under a host tensor, or under some elements of its storage."""
    if tensor.numel() == 0:
        return set()
    size = tensor.dtype.itemsize
    grain = size if tensor.dtype in _ONE_BY_ONE else GRANULE
    base = tensor.untyped_storage().data_ptr()
    if elements is None and tensor.is_contiguous():
        return granules(base, tensor.storage_offset() * size, tensor.nbytes, grain)
    if elements is None:
        elements = elements_of(tensor)
    at = np.unique(elements.numpy().reshape(-1).astype(np.int64) * size // grain)
    return set(((base + at * grain) * 1024 + grain).tolist())


def granules(base: int, offset: int, num_bytes: int, grain: int = GRANULE) -> set[int]:
    stop = -(-(offset + num_bytes) // grain)
    return {(base + at * grain) * 1024 + grain for at in range(offset // grain, stop)}


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the place of each element of a host tensor in its storage, in the tensor's shape."""
    at = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + torch.arange(size) * stride
    return at


def accesses(func: Any, args: Any, kwargs: Any, keys: Keys) -> tuple[set[int], set[int]]:
    """Return the bytes that the operation reads and the bytes that it writes, by its arguments. All
    are host tensors. Parameters of a model are left out, because no operation writes them."""
    reads: set[int] = set()
    writes: set[int] = set()
    named = {it.name: it for it in func._schema.arguments}
    pairs = zip(func._schema.arguments, args, strict=False)
    for declared, value in [*pairs, *((named[name], it) for name, it in kwargs.items())]:
        is_written = declared.alias_info is not None and declared.alias_info.is_write
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or getattr(tensor, "is_constant", False):
                continue
            rule = (_SCATTERS if is_written else _GATHERS).get(func)
            some = None
            if rule is not None and declared is func._schema.arguments[0]:
                some = rule(elements_of(tensor), args)
            (writes if is_written else reads).update(keys(tensor, some))
    return reads, writes


def is_view(func: Any) -> bool:
    aliases = [it.alias_info for it in func._schema.returns]
    is_alias = any(it is not None and not it.is_write for it in aliases)
    return is_alias or func is aten._unsafe_view.default
