"""Command line of `droidspeak demo`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cachetree import read_yaml, settings_of
from cachetree.cli import complain
from sglang_droidspeak.cli.terminal import add_start_timeout

_PAIR: Final = ("sender", "receiver", "profile", "data")


def add_parser(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="start a sender and a receiver, and measure what reuse costs and saves",
        description="Start two SGLang servers. One reads documents, and the other answers "
        "questions about them: by full prefill, full reuse, the profile's block, and the block of "
        "all layers. If there is an activated LoRA of the same skill, it answers, too. Without a "
        "pair of your own, the demo takes the real pair that `make real` makes in a clone, or "
        "else the small pair. It then also times a randomly initialised pair of 12 layers × 768. "
        "Exit status 1 if a check fails.",
    )
    demo.set_defaults(run=_demo)
    pair = demo.add_argument_group(
        "your own pair (give sender, receiver, profile and data, or none of them)"
    )
    pair.add_argument("--sender", type=Path, metavar="PATH", help="checkpoint that reads first")
    pair.add_argument("--receiver", type=Path, metavar="PATH", help="checkpoint that answers")
    pair.add_argument(
        "--receiver-lora", type=Path, metavar="PATH", help="LoRA adapter on the receiver"
    )
    pair.add_argument(
        "--activated-lora",
        type=Path,
        metavar="PATH",
        help="activated LoRA of the same skill on the sender's weights, to compare with",
    )
    pair.add_argument("--profile", type=Path, metavar="FILE", help="pair profile, JSON")
    pair.add_argument(
        "--data", type=Path, metavar="FILE", help="questions about documents, JSONL as LongBench v1"
    )
    measure = demo.add_argument_group("measurement")
    measure.add_argument(
        "--num-questions", type=int, metavar="N", help="use only the first N questions"
    )
    measure.add_argument(
        "--num-documents", type=int, metavar="N", help="use only the first N documents"
    )
    measure.add_argument(
        "--no-correction",
        dest="correction",
        action="store_const",
        const=False,
        help="use the sender's E as it is, even if the profile corrects it",
    )
    measure.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="folder for the results; default: out/demo",
    )
    servers = demo.add_argument_group("servers")
    servers.add_argument(
        "--device",
        default="auto",
        help="device, as SGLang names it; default: an accelerator if there is one",
    )
    servers.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="number format of the servers; default: float32 on a CPU, else bfloat16",
    )
    servers.add_argument(
        "--host-gb",
        type=float,
        metavar="GIB",
        help="host memory for the sender's cache, and as much for the receiver's fetches; "
        "default: 4, or 1 for the pairs of the repository",
    )
    servers.add_argument(
        "--options", type=Path, metavar="FILE", help="YAML with SGLang's options for all servers"
    )
    servers.add_argument(
        "--servers",
        type=int,
        choices=(1, 2),
        help="number of servers; with 1, the same server reads as the base and answers as its "
        "adapters; default: 2",
    )
    add_start_timeout(servers)


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_droidspeak.demo import DemoConfig, run_demo

    given_names = [name for name in _PAIR if getattr(args, name) is not None]
    if given_names and len(given_names) < len(_PAIR):
        missing = " and ".join(f"--{name}" for name in _PAIR if name not in given_names)
        complain("droidspeak", f"--{given_names[0]} needs {missing} too")
        return 2
    beside = ("command", "run", "options")
    chosen = {name: it for name, it in vars(args).items() if it is not None and name not in beside}
    config = DemoConfig(**chosen) if given_names else replace(DemoConfig.shipped(), **chosen)
    if args.options is not None:
        loaded = read_yaml(args.options, "options")
        options = settings_of(loaded, dict[str, Any], f"options {args.options}")
        config = replace(config, options={**config.options, **options})
    run_demo(config, Console())
    return 0
