"""Profile the adapters of the recipe on one another and on their base.

    python -m tools.pairs.adapter_profiles [--out build/pairs/profiles]

The receiver's task decides what is asked. There are 24 documents to choose on and 96 to judge on,
more than are shipped: the gate needs 72 that lose nothing. About five minutes a pair. One that did
not pass has a profile, too: it teaches a server to refuse.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from transformers.utils import logging

from profiles.compute import ModelSource
from profiles.costs import Repeats
from profiles.data import write_records
from profiles.profiler import profile_pair
from profiles.settings import Settings
from tools.pairs.questions import OPTIONS, PAGE_SIZE, SEEDS, SHIPPED, make_records
from tools.pairs.stages import FOUNDATION

WEIGHTS: Final = SHIPPED / "weights"
NUM_DOCUMENTS: Final = {"train": 24, "held_out": 96}
PAIRS: Final = (
    (FOUNDATION, "tables_lora", "tables"),
    (FOUNDATION, "receiver_lora", "biographies"),
)
"""Sender, receiver, and the receiver's task."""


def profile_name(sender: str, receiver: str) -> str:
    return f"{sender}_to_{receiver}.json"


def source_of(name: str) -> ModelSource:
    base = WEIGHTS / FOUNDATION
    return ModelSource(path=base, adapter=None if name == FOUNDATION else WEIGHTS / name)


def write_documents(task: str, folder: Path) -> tuple[str, str]:
    """What a task's profiles are made with; the paths of both sets."""
    (folder / task).mkdir(parents=True, exist_ok=True)
    for name, seed in SEEDS.items():
        records = make_records(name, seed, NUM_DOCUMENTS[name], task)
        write_records(records, folder / task / f"{name}.jsonl")
    train, held_out = (str(folder / task / f"{name}.jsonl") for name in SEEDS)
    return train, held_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pairs.adapter_profiles")
    parser.add_argument("--out", type=Path, default=Path("build/pairs/profiles"))
    folder = parser.parse_args().out
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    console = Console()
    for sender, receiver, task in PAIRS:
        out = folder / profile_name(sender, receiver)
        console.print(f"{sender} to {receiver}, {task}", highlight=False)
        train, held_out = write_documents(task, folder / "data")
        settings = Settings(
            sender=source_of(sender),
            receiver=source_of(receiver),
            data=(train,),
            held_out=(held_out,),
            options=OPTIONS,
            page_size=PAGE_SIZE,
            out=out,
            command="python -m tools.pairs.adapter_profiles",
            timing=Repeats(budget_s=10.0),
        )
        profile = profile_pair(settings, console)
        verdict = "passed" if profile.passed else "failed"
        console.print(f"{verdict}: {profile.reason}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
