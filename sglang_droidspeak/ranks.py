"""The tensor-parallel ranks of one server: what the first decides all do, and all or none can.

Decisions depend on clocks, measured speeds and what has arrived, which differ between ranks, and
every rank has to run the same forwards. So per round of scheduling with requests that wait:

    first rank   plans what is new ─► broadcast ─► each rank stages its own shard
    every rank   how far its staging is, and before a forward whether it landed ─► minimum ─► all
    every rank   whether the pool has what a plan is to read there              ─► minimum ─► all
    every rank   whether it has what one forward of a partial prefill takes     ─► minimum ─► all

Layers reduce over all ranks: a rank that fails has to say so before the others begin. One that
fails within a layer, or where E is put together, ends the server. The others wait for it in the
next sum over all ranks, and it cannot take part for form's sake: how many sums are left is known to
SGLang's layers alone, which join some of them to the kernel after, as sizes and devices have it. A
sum too many or too few would be taken for the next one's.

SGLang's radix trees, and what is kept per slot, are the same on all ranks without being told, as
long as all make the same uses of the trees: what one rank asks alone counts as none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class AnotherRankFailed(Exception):
    """What this rank did in vain, too."""


class RanksApart(Exception):
    """This rank has failed where others wait for it; only a restart brings them together."""


class Ranks:
    """One of them. Each makes the same calls in the same order, on its scheduler thread; a rank
    that is alone sends nothing.

    A call blocks until all ranks have made it.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """`group` carries host memory: the one over which SGLang's radix cache agrees."""
        self._group = group
        self._size = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if self._size == 1 else torch.distributed.get_rank(group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, value: T, kind: type[T]) -> T:
        """The first rank's `value`, of a type that msgspec knows; those of others are ignored."""
        if self._size == 1:
            return value
        message = bytearray(msgspec.msgpack.encode(value)) if self.is_first else bytearray()
        size = torch.tensor([len(message)])
        torch.distributed.broadcast(size, group_src=0, group=self._group)
        if not self.is_first:
            message = bytearray(int(size))
        torch.distributed.broadcast(
            torch.frombuffer(message, dtype=torch.uint8), group_src=0, group=self._group
        )
        return value if self.is_first else msgspec.msgpack.decode(message, type=kind)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave the body, or all raise: what went wrong there, or AnotherRankFailed.

        Whatever blocks until other ranks do it too comes right after `agree`.
        """
        try:
            yield
            self.agree()
        except (AnotherRankFailed, RanksApart):
            raise
        except BaseException:
            self.least([False])  # The others agree no more, at their next point.
            raise

    def agree(self) -> None:
        """Within `together`: go on, or raise AnotherRankFailed where another cannot."""
        if not all(self.least([True])):
            raise AnotherRankFailed("another rank failed")

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """In the body ranks meet without being asked; what goes wrong there becomes RanksApart,
        which nobody catches: SGLang ends the server. On a rank that is alone it stays what it is.
        """
        try:
            yield
        except Exception as exc:
            if self._size == 1:
                raise
            raise RanksApart(
                f"droidspeak: rank {self.rank} failed within a layer, where the other ranks wait "
                f"for it, so the server ends: {type(exc).__name__}: {exc}"
            ) from exc

    def whole(self, shard: torch.Tensor) -> torch.Tensor:
        """All ranks' columns side by side, of `[tokens, columns of this rank]`. Within `together`;
        on the current stream."""
        if self._size == 1:
            return shard
        from sglang_droidspeak.engine.names import tensor_model_parallel_all_gather

        self.agree()
        with self.apart():
            return tensor_model_parallel_all_gather(shard)

    def least(self, values: Sequence[int]) -> Sequence[int]:
        """The smallest of all ranks' values, one by one; each rank has as many."""
        if self._size == 1 or not values:
            return values
        reduced = torch.tensor(values)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return reduced.tolist()
