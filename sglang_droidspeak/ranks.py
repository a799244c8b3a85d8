"""Keep the tensor-parallel ranks of one server in step: all decide the same, or all fail.

Decisions depend on clocks, measured speeds and arrived bytes. These differ between ranks, but every
rank has to run the same forwards. So in each round of scheduling with waiting requests:

    first rank   plans new requests ─► broadcast ─► each rank stages its own shard
    every rank   progress of its fetch; before a forward, whether it is there  ─► minimum ─► all
    every rank   whether the pool has the pages that a plan reads there        ─► minimum ─► all
    every rank   whether it can run one forward of a partial prefill           ─► minimum ─► all

Layers sum over all ranks. So a rank that fails has to say so before the others begin a layer. A
rank that fails within a layer, or while E is gathered, ends the server: the others already wait for
it in the next sum. It cannot join the remaining sums with dummy values, because only SGLang's
layers know how many remain: depending on sizes and device, layers fuse some sums with the next
kernel. After one sum too many or too few, ranks would add values of different sums.

SGLang's radix trees and the data per slot are equal on all ranks without messages. The condition is
that all ranks use the trees in the same order. A lookup that changes nothing may run on one rank.
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
    """Another rank failed at this point, so this rank has to drop its own work, too."""


class RanksApart(Exception):
    """This rank has failed while other ranks wait for it. Only a restart helps."""


class Ranks:
    """Messages between the ranks of a server, as one rank sends them. Each rank makes the same
    calls in the same order, on its scheduler thread.

    A call blocks until all ranks have made it. A server of one rank sends nothing.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """`group`: the process group of SGLang's radix caches, which sends CPU tensors. None if the
        server has one rank."""
        self._group = group
        self._size = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if self._size == 1 else torch.distributed.get_rank(group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, value: T, kind: type[T]) -> T:
        """Return the first rank's `value` on all ranks. msgspec encodes it as type `kind`."""
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
        """Context in which all ranks succeed, or all raise. The failed rank raises its own error,
        the others raise AnotherRankFailed.

        In the body, call `agree` right before each operation that waits for other ranks.
        """
        try:
            yield
            self.agree()
        except (AnotherRankFailed, RanksApart):
            raise
        except BaseException:
            self.least([False])  # The next `agree` of the other ranks raises.
            raise

    def agree(self) -> None:
        """Wait for all ranks. Raises AnotherRankFailed if one has failed. Use inside `together`."""
        if not all(self.least([True])):
            raise AnotherRankFailed("another rank failed")

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Turn an error of the body into RanksApart, which ends the server. Use it around sums over
        all ranks, in which the other ranks wait for this one. On a server of one rank, the error
        stays as it is.
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
        """Gather a tensor that is split by columns. `shard` is `[tokens, columns of this rank]`.
        Runs on the current stream. Call it inside `together`."""
        if self._size == 1:
            return shard
        from sglang_droidspeak.engine.names import tensor_model_parallel_all_gather

        self.agree()
        with self.apart():
            return tensor_model_parallel_all_gather(shard)

    def least(self, values: Sequence[int]) -> Sequence[int]:
        """Return the minimum over all ranks at each position of `values`. All have equally many."""
        if self._size == 1 or not values:
            return values
        reduced = torch.tensor(values)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return reduced.tolist()
