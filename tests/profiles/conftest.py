"""The shipped pairs, loaded and swept once for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from shipped import SHIPPED, Shipped

from profiles.compute.journal import temporary_journal
from profiles.compute.models import Pair, load_pair
from profiles.compute.study import Bench
from profiles.compute.training import sweep
from profiles.data.documents import Document
from profiles.profiler import answerers
from profiles.stats.frontier import grid
from profiles.stats.measured import Swept
from tools.pairs.questions import DATA, read_documents

# Last, so that no module of theirs stands for another.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

# The models are tiny: more threads only wait for one another. `test_instruction_sets` asks for two.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


NUM_DOCUMENTS = 8


@dataclass(frozen=True)
class SweptPair:
    """A shipped pair, and every block of it measured on some training questions, in float32, which
    takes a CPU a fifth of the time."""

    shipped: Shipped
    pair: Pair
    documents: Sequence[Document]
    swept: Swept
    passes: list[int]
    """Prefix passes of each step that was made."""


@pytest.fixture(
    scope="session",
    params=[
        SHIPPED[0],
        # Its shipped profile is checked, and verified on unseen documents, without this.
        pytest.param(SHIPPED[1], marks=pytest.mark.slow),
    ],
    ids=lambda it: it.name,
)
def swept_pair(request) -> SweptPair:
    shipped: Shipped = request.param
    pair = load_pair(
        shipped.sender,
        shipped.receiver,
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache_dir=None,
    )
    documents = read_documents(DATA / "train.jsonl", pair.tokenizer)[:NUM_DOCUMENTS]
    sender, receiver = answerers(pair, documents, 2.0)
    passes: list[int] = []
    with temporary_journal() as journal:
        bench = Bench(
            sender=sender,
            receiver=receiver,
            journal=journal,
            tick=lambda entry, is_new: passes.append(entry.passes),
        )
        swept = sweep(bench, documents, grid(pair.num_layers, 1), pruned=False)
    return SweptPair(shipped, pair, documents, swept, passes)
