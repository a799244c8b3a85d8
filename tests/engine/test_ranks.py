"""Two processes that agree through gloo, as the ranks of a server do on the CPU and with CUDA."""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed

from cachetree.ids import Location, ModelId, Span
from cachetree.planning.plan import Plan
from sglang_droidspeak.ranks import AnotherRankFailed, Ranks, RanksApart

NUM_RANKS = 2
OTHER = "another rank failed"


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Stands for the decision of the waiting requests. The real class would import SGLang in each
    process."""

    rid: str
    plan: Plan | None
    is_optional: bool


PLAN = Plan(
    sender=ModelId("s"),
    receiver=ModelId("r"),
    location=Location("tcp://127.0.0.1:7001"),
    pages=Span(1, 40),
    block=Span(2, 5),
    num_layers=12,
)
DECISIONS = [
    Decision("a", PLAN, True),
    Decision("b", None, False),
    Decision("c" * 100_000, PLAN, False),
]


def act(rank: int, store: str, results: Any) -> None:
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, NUM_RANKS),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    ranks = Ranks(distributed.group.WORLD)
    decisions = [ranks.share(DECISIONS if rank == 0 else [], list[Decision]) for _ in range(2)]
    nothing = ranks.share([] if rank == 0 else DECISIONS, list[Decision])
    # The second has nothing to agree on, and no rank waits for another.
    least = [ranks.least([3, rank, 2 - rank]), ranks.least([]), ranks.least([True, rank == 0])]
    raised = [raised_by(ranks, *broken) for broken in ((), (1,), (0, 1))]
    # One that fails between two points holds up nobody at the second.
    raised.append(raised_by(ranks, 0, num_points=2))
    sys.modules["sglang_droidspeak.engine.names"] = GATHERING  # SGLang's own brings all of it.
    wholes = [whole_of(ranks, *broken) for broken in ((), (1,), (0,))]
    # Without the other one, which does not wait for it here as it would in a layer.
    raised.append(lost_by(ranks) if rank else "")
    results.put(
        (rank, ranks.is_first, decisions == [DECISIONS] * 2, nothing, least, raised, wholes)
    )
    results.close()
    results.join_thread()
    distributed.destroy_process_group()


def raised_by(ranks: Ranks, *broken: int, num_points: int = 0) -> str:
    try:
        with ranks.together():
            for point in range(num_points):
                if not point or ranks.rank not in broken:
                    ranks.agree()
            if ranks.rank in broken:
                raise MemoryError(f"on rank {ranks.rank}")
    except (MemoryError, AnotherRankFailed) as exc:
        return str(exc)
    return ""


def gather(shard: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(shard) for _ in range(NUM_RANKS)]
    distributed.all_gather(parts, shard)
    return torch.cat(parts, -1)


GATHERING: Any = SimpleNamespace(tensor_model_parallel_all_gather=gather)


def whole_of(ranks: Ranks, *broken: int) -> list[list[int]] | str:
    """Return E of two tokens, joined from one column of each rank; broken ranks have no column."""
    try:
        with ranks.together():
            if ranks.rank in broken:
                raise MemoryError(f"on rank {ranks.rank}")
            return ranks.whole(torch.tensor([[ranks.rank], [10 + ranks.rank]])).tolist()
    except (MemoryError, AnotherRankFailed) as exc:
        return str(exc)


def lost_by(ranks: Ranks) -> str:
    try:
        with ranks.together(), ranks.apart():
            raise MemoryError("in a layer")
    except RanksApart as exc:
        return str(exc)


@pytest.mark.long
def test_all_do_as_the_first_and_as_much_as_the_least(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=act, args=(rank, str(tmp_path / "store"), results))
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    try:
        answers = sorted(results.get(timeout=100) for _ in processes)
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    least = [[3, 0, 1], [], [1, 0]]
    lost = (
        "droidspeak: rank 1 failed within a layer, where the other ranks wait for it, "
        "so the server ends: MemoryError: in a layer"
    )
    assert answers == [
        (
            *(0, True, True, [], least),
            ["", OTHER, "on rank 0", "on rank 0", ""],
            [[[0, 1], [10, 11]], OTHER, "on rank 0"],
        ),
        (
            *(1, False, True, [], least),
            ["", "on rank 1", "on rank 1", OTHER, lost],
            [[[0, 1], [10, 11]], "on rank 1", OTHER],
        ),
    ]


def test_one_rank_asks_nobody(monkeypatch):
    for call in ("broadcast", "all_reduce"):
        monkeypatch.delattr(torch.distributed, call)
    ranks = Ranks(None)
    plans = [Decision("a", PLAN, True)]
    assert ranks.is_first
    assert ranks.share(plans, list[Decision]) is plans
    assert ranks.least(plans) is plans
    shard = torch.zeros(2, 3)
    assert ranks.whole(shard) is shard
    with pytest.raises(MemoryError), ranks.together(), ranks.apart():
        raise MemoryError("nobody waits for it")
