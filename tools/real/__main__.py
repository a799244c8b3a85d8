"""The base model, the questions, and the adapters of real pairs.

    python -m tools.real                    the base, the data and whole checkpoints of the skills
    python -m tools.real train questions    train an adapter: 10 to 30 minutes on one core
    python -m tools.real distill questions --out DIR    make an aLoRA, which shares exactly
    python -m tools.real judge questions DIR            quality by length and kind of question
    python -m tools.real check questions    quality on documents that had no part in any choice
    python -m tools.real profile base questions         profile a pair

Existing files are not made again, and a stopped command continues.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tqdm import tqdm

from cachetree.checkpoint import read_invocation
from tools.merge import merge_folder
from tools.real.base import BaseError, base_model
from tools.real.check import MAX_NEW, METRICS, TEMPLATE, check
from tools.real.questions import SETS, SKILLS, write_sets
from tools.real.sharing import (
    FLAGS,
    LONG300,
    PACKAGES,
    SHIPPED,
    distill,
    judge,
    write_lessons,
)
from tools.real.train import RECIPES, train

BASE: Final = "base"
WEIGHTS: Final = "model.safetensors"


def main() -> int:
    args = arguments(sys.argv[1:])
    try:
        base = base_model(args.work)
        files = write_sets(PACKAGES, args.work / "data")
        tqdm.write(f"{len(files)} sets of questions are in {args.work / 'data'}")
        if args.command == "train":
            recipe, folder = RECIPES[args.skill], args.work / args.skill
            if args.steps is not None:
                recipe = replace(recipe, num_steps=args.steps)
                folder = folder.with_name(f"{args.skill}_{args.steps}")
            train(args.skill, recipe, base, PACKAGES, folder)
        elif args.command == "distill":
            return distill(args.skill, base, args.work / "data", args.out, *args.flags)
        elif args.command == "judge":
            judge(args.skill, base, args.adapter, args.work / "data")
        elif args.command == "check":
            if args.set == LONG300:
                write_lessons(PACKAGES, args.work / "data", args.skill)
            adapter = None if args.base else args.adapter or SHIPPED / args.skill
            check(args.skill, base, adapter, args.work / f"data/{args.skill}/{args.set}.jsonl")
        elif args.command == "profile":
            return profile(args.sender, args.receiver, args.work, *args.flags, loras=args.lora)
        else:
            merge_all(base, args.work / "merged")
    except BaseError as error:
        tqdm.write(f"real: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        tqdm.write("stopped; the same command continues", file=sys.stderr)
        return 130
    return 0


def merge_all(base: Path, folder: Path) -> None:
    """Merge each shipped adapter into a whole checkpoint, unless the checkpoint is newer.

    Skip aLoRAs: a checkpoint would change the KV of tokens before the invocation, too.
    """
    for adapter in sorted(SHIPPED.glob("*/adapter_model.safetensors")):
        if read_invocation(adapter.parent):
            continue
        out = folder / adapter.parent.name
        made, parts = out / WEIGHTS, (adapter, base / WEIGHTS)
        if made.exists() and made.stat().st_mtime > max(it.stat().st_mtime for it in parts):
            continue
        merge_folder(base, adapter.parent, out)
        tqdm.write(f"wrote {out}")


def profile(sender: str, receiver: str, work: Path, *flags: str, loras: bool) -> int:
    """Profile a pair by the product's own command: as whole checkpoints, or as adapters on one
    base. The task is the receiver's skill, or the sender's if the receiver is the base. `flags` are
    passed to the command."""
    skill = sender if receiver == BASE else receiver
    models = [*_model("sender", sender, work, loras), *_model("receiver", receiver, work, loras)]
    data = work / "data" / skill
    name = f"{sender}_to_{receiver}{'_lora' * loras}.json"
    asked = ["--chat", "--template", TEMPLATE, "--metric", METRICS[skill].value]
    command = [
        *("droidspeak", "profile", *models, "--dtype", "float32", "--timing-seconds", "10", *asked),
        "--e-correction",
        *("--max-new", str(MAX_NEW[skill]), "--data", str(data / "choose_mixed.jsonl")),
        *("--held-out", str(data / "held_out_mixed.jsonl"), "--out", str(SHIPPED / name), *flags),
    ]
    tqdm.write(shlex.join(command))
    return subprocess.run([sys.executable, "-m", "sglang_droidspeak.cli", *command[1:]]).returncode


def _model(role: str, name: str, work: Path, loras: bool) -> list[str]:
    """Return the flags that name a model to `droidspeak profile`."""
    if name == BASE:
        return [f"--{role}", str(work / BASE)]
    if loras:
        return [f"--{role}", str(work / BASE), f"--{role}-lora", str(SHIPPED / name)]
    return [f"--{role}", str(work / "merged" / name)]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words before `--`. Words behind it are flags of another command."""
    end = words.index("--") if "--" in words else len(words)
    made = parser()
    args = made.parse_args(words[:end])
    args.flags = words[end + 1 :]
    if args.flags and args.command not in ("distill", "profile"):
        made.error("only distill and profile take more flags after --")
    return args


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.real",
        description=__doc__,
        epilog="distill and profile pass what follows -- to the command of droidspeak",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, default=Path("build/real"), help="where all goes")
    commands = parser.add_subparsers(dest="command")
    of_training = commands.add_parser("train", help="train an adapter, or go on with it")
    of_training.add_argument("skill", choices=SKILLS)
    of_training.add_argument("--steps", type=int, help="train shorter or longer than the recipe")
    of_distilling = commands.add_parser("distill", help="make a skill share exactly")
    of_distilling.add_argument("skill", choices=FLAGS)
    of_distilling.add_argument("--out", type=Path, required=True, help="the adapter's folder")
    of_judging = commands.add_parser("judge", help="its quality by length and kind of question")
    of_judging.add_argument("skill", choices=FLAGS)
    of_judging.add_argument("adapter", type=Path, help="the adapter's folder")
    of_profile = commands.add_parser("profile", help="profile a pair, or go on with it")
    for role in ("sender", "receiver"):
        of_profile.add_argument(role, choices=[BASE, *SKILLS])
    of_profile.add_argument("--lora", action="store_true", help="as adapters in one server")
    of_check = commands.add_parser("check", help="judge an adapter, or the base alone")
    of_check.add_argument("skill", choices=SKILLS)
    of_check.add_argument("--set", choices=[*SETS, LONG300], default="verify")
    whose = of_check.add_mutually_exclusive_group()
    whose.add_argument("--adapter", type=Path, help=f"default: {SHIPPED}/SKILL")
    whose.add_argument("--base", action="store_true", help="no adapter")
    return parser


if __name__ == "__main__":
    sys.exit(main())
