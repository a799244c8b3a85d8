"""Command `droidspeak distill`: train an adapter that shares its base's KV.

The adapter learns from a teacher model's answers, or from answers in the data.
"""

from __future__ import annotations

import argparse
from typing import Any

from cachetree.cli import complain, show
from profiles.cli import FAILED_GATE, is_missing, settings_of
from profiles.distill.settings import DistillSettings
from profiles.settings import add_flags


def add_command(commands: Any) -> None:
    """Add `distill` to the subparsers of `droidspeak`."""
    parser = commands.add_parser(
        "distill",
        help="make an adapter that shares its base's KV without loss",
        description="Train an activated LoRA (aLoRA) from a teacher's own answers to prompts, or "
        "from answers in the data. Judge it beside its teacher on held-out contexts. The adapter "
        "acts only from its invocation on. So the KV of the document before the invocation is the "
        "base's, bit for bit. PEFT and SGLang load the written folder. If a run was stopped, the "
        "same command continues it. Exit status 3 if the adapter loses more than the tolerance.",
        allow_abbrev=False,
    )
    add_flags(parser, "models", "data", "out", "training", of=DistillSettings)
    parser.set_defaults(run=_distill)


def _distill(args: argparse.Namespace) -> int:
    if is_missing(args, "distill", "base", "data", "out"):
        return 2
    from rich.console import Console

    from profiles.distill.distiller import Distiller
    from profiles.report.distilled import PAGE

    try:
        distilled = Distiller(settings_of(args, {}, DistillSettings), Console()).run()
    except KeyboardInterrupt:
        complain("droidspeak", "interrupted; the same command continues from here")
        return 130
    show(distilled.reason)
    show(f"wrote {args.out}; {PAGE} in it has all figures")
    return FAILED_GATE if distilled.passed is False else 0
