"""`droidspeak profile` and `droidspeak report`: from a pair and data to a profile, and pictures."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from profiles.evidence import MeasuredProfile, read_measured

if TYPE_CHECKING:
    from profiles.settings import Settings
    from profiles.verification import Verification

# Heavy imports (torch, transformers, matplotlib) wait until a command runs.

FAILED_GATE: Final = 3
"""Exit status: everything worked, and the verdict is that the pair may not be reused."""

_LOCAL: Final = re.compile(r"(^|[=:])/(?:[^/]*/)*(?=[^/])")
"""The folders of an absolute path, which say nothing on another machine."""

METRICS: Final = (
    *("f1", "rouge_l", "edit_similarity", "exact_number"),
    *("classification", "count", "retrieval"),
)
"""Values of `profiles.data.Metric`."""

_PAIR: Final = ("sender", "receiver", "data", "out")


def add_commands(commands: Any) -> None:
    """Add `profile` and `report` to the subparsers of `droidspeak`."""
    profile = commands.add_parser(
        "profile",
        help="measure which layers of a pair may be reused, at what quality and cost",
        description="Measure every block of layers of a pair on a data set, choose the smallest "
        "one that keeps the quality, judge it on held-out data, and write a profile for servers. "
        "The same command goes on where an earlier one was stopped. Exit status 3 where the pair "
        "did not pass. `droidspeak profile show FILE` prints a profile, `droidspeak profile verify "
        "FILE ...` measures it on other data.",
        allow_abbrev=False,
    )
    _add_models(profile)
    _add_data(profile)
    profile.add_argument("--out", type=Path, metavar="FILE", help="the profile to write, JSON")
    profile.add_argument("--small", type=Path, metavar="PATH", help="smaller model to compare with")
    choice = profile.add_argument_group("choice")
    choice.add_argument(
        "--held-out",
        action="append",
        default=[],
        metavar="DATA",
        help="data to judge on; default: a share of --data, by context",
    )
    choice.add_argument("--held-out-share", type=float, metavar="X", help="default: 0.5")
    choice.add_argument(
        "--tolerance", type=float, metavar="X", help="largest relative loss; default: 0.05"
    )
    choice.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="grid of the blocks in layers; default: 1 up to 16 layers, 2 up to 32, …",
    )
    choice.add_argument(
        "--plans",
        type=int,
        metavar="N",
        help="blocks that are decoded and tried by the gate at most; default: 12",
    )
    choice.add_argument(
        "--no-prune",
        dest="pruned",
        action="store_const",
        const=False,
        help="decode the answers of all blocks, not only of those on the frontier of KL",
    )
    choice.add_argument(
        "--e-correction",
        action="store_const",
        const=True,
        help="also try plans that correct the sender's E by a map, fitted on the contexts that "
        "choose; it is kept beside the profile, for servers",
    )
    choice.add_argument(
        "--fit-data",
        action="append",
        default=[],
        metavar="DATA",
        help="contexts that these maps are fitted on instead, as in --data; their questions are "
        "not asked",
    )
    choice.add_argument(
        "--timing-seconds",
        type=float,
        metavar="X",
        help="when to stop timing the cost model's parts; default: 60",
    )
    choice.add_argument("--seed", type=int, metavar="N", help="of the split; default: 0")
    profile.set_defaults(run=_profile)

    actions = profile.add_subparsers(dest="action", metavar="show|verify")
    show = actions.add_parser("show", help="print a profile", allow_abbrev=False)
    show.add_argument("profile", type=Path, metavar="FILE")
    show.add_argument("--json", action="store_true", help="the verdict as one line of JSON")
    show.set_defaults(run=_show)
    verify = actions.add_parser(
        "verify",
        help="measure a profile's blocks on other data",
        description="Measure the frontier of a profile on data that it has not seen, and say "
        "whether the verdict holds. Exit status 3 where it does not.",
        allow_abbrev=False,
    )
    verify.add_argument("profile", type=Path, metavar="FILE")
    _add_models(verify)
    _add_data(verify)
    verify.add_argument("--json", action="store_true", help="the result as one line of JSON")
    verify.set_defaults(run=_verify)

    report = commands.add_parser(
        "report",
        help="pictures of a profile, and one page with all of them",
        allow_abbrev=False,
    )
    report.add_argument("profile", type=Path, metavar="FILE")
    report.add_argument("--out", type=Path, required=True, metavar="DIR")
    report.set_defaults(run=_report)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    for role, what in (("sender", "whose cache is read"), ("receiver", "that answers")):
        models.add_argument(f"--{role}", type=Path, metavar="PATH", help=f"checkpoint {what}")
        models.add_argument(
            f"--{role}-lora", type=Path, metavar="PATH", help=f"PEFT adapter on the {role}"
        )
    models.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="as the servers': rounding is part of the quality; default: bfloat16",
    )
    models.add_argument("--device", metavar="DEVICE", help="default: a GPU where there is one")
    models.add_argument(
        "--page-size", type=int, metavar="N", help="as the servers'; default: 16 tokens"
    )
    models.add_argument(
        "--sender-device",
        metavar="DEVICE",
        help="default: the receiver's; another where one device cannot hold both models",
    )
    for which, of in (("", "the host's memory"), ("device-", "each device's memory")):
        models.add_argument(
            f"--max-{which}memory-gb",
            type=float,
            metavar="GIB",
            help=f"of {of}, beside the models' weights; default: most of what is free",
        )


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DATA",
        help="JSONL as LongBench v1, a folder of it, longbench:NAME, gsm8k or gsm8k:FILE; may be "
        "given several times",
    )
    data.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where longbench:NAME is looked for first"
    )
    data.add_argument(
        "--template",
        metavar="TEXT",
        help="prompt with {context}, then {input}; default: the data set's own",
    )
    data.add_argument(
        "--chat",
        action="store_true",
        help="ask as the OpenAI chat endpoint does: each prompt is a user's message in the "
        "tokenizer's own chat template",
    )
    data.add_argument("--metric", choices=METRICS, help="default: the data set's own")
    data.add_argument("--max-new", type=int, metavar="N", help="longest answer in tokens")
    data.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="longer prompts lose the middle of their context; default: what the model takes",
    )


def _profile(args: argparse.Namespace) -> int:
    missing = [f"--{name}" for name in _PAIR if not getattr(args, name)]
    if missing:
        _complain(f"profile needs {', '.join(missing)}; or `profile show`, `profile verify`")
        return 2
    from rich.console import Console
    from transformers.utils import logging

    from profiles.costs import Repeats
    from profiles.profiler import profile_pair
    from profiles.report import table_of

    logging.disable_progress_bar()
    console = Console()
    settings = _settings(args, out=args.out, small=args.small)
    if args.timing_seconds is not None:
        settings = replace(settings, timing=Repeats(budget_s=args.timing_seconds))
    try:
        profile = profile_pair(settings, console)
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on from here")
        return 130
    console.print(table_of(profile))
    console.print(f"wrote {args.out}", highlight=False, soft_wrap=True)
    return 0 if profile.passed else FAILED_GATE


def _show(args: argparse.Namespace) -> int:
    profile = read_measured(args.profile)
    if args.json:
        _print(msgspec.json.encode(_verdict_of(profile)).decode())
        return 0
    from rich.console import Console

    from profiles.report import table_of

    Console().print(table_of(profile))
    return 0


def _verdict_of(profile: MeasuredProfile) -> dict[str, object]:
    return {
        "sender": profile.sender.model_id,
        "receiver": profile.receiver.model_id,
        "passed": profile.passed,
        "reason": profile.reason,
        "recommended": profile.recommended,
        "blocks": profile.blocks,
        "first_difference": profile.first_difference,
        "metric": profile.metric,
        "full_prefill_quality": profile.full_prefill_quality,
        "full_reuse_quality": profile.full_reuse_quality,
        "cost_model_error": profile.costs.error,
    }


def _verify(args: argparse.Namespace) -> int:
    missing = [f"--{name}" for name in _PAIR[:3] if not getattr(args, name)]
    if missing:
        _complain(f"profile verify needs {', '.join(missing)}")
        return 2
    profile = read_measured(args.profile)
    from rich.console import Console
    from transformers.utils import logging

    from cachetree.corrections import read_corrections
    from profiles.verification import verify_profile

    logging.disable_progress_bar()
    console = Console(stderr=args.json)
    corrections = read_corrections(profile, args.profile)
    found = verify_profile(profile, _settings(args, made_as=profile), console, corrections)
    if args.json:
        _print(msgspec.json.encode(found).decode())
    else:
        _say(found)
    return 0 if found.holds else FAILED_GATE


def _say(found: Verification) -> None:
    from profiles.stats import finding

    split = found.split
    _print(f"{split.num_questions} questions about {split.num_contexts} contexts")
    _print(f"full prefill {split.full_prefill.mean:.3f}, full reuse {split.full_reuse.mean:.3f}")
    for plan in found.plans:
        _print(finding(plan, split))
    _print(f"{'passed' if found.passed else 'failed'}: {found.reason}")
    _print("the profile's verdict holds" if found.holds else "the profile's verdict does not hold")


def _report(args: argparse.Namespace) -> int:
    profile = read_measured(args.profile)
    from profiles.report import write_report

    for path in write_report(profile, args.out):
        _print(str(path))
    return 0


def _settings(
    args: argparse.Namespace,
    *,
    out: Path = Path("profile.json"),
    small: Path | None = None,
    made_as: MeasuredProfile | None = None,
) -> Settings:
    """What the arguments say; where they are silent, as another profile was made."""
    from profiles.compute import ModelSource
    from profiles.data import Metric, TaskOptions
    from profiles.settings import Settings

    chosen = {
        name: value
        for name, value in vars(args).items()
        if name in Settings.__dataclass_fields__ and value is not None
    }
    options = TaskOptions(
        template=args.template,
        metric=None if args.metric is None else Metric(args.metric),
        max_new=args.max_new,
        chat=args.chat,
    )
    if made_as is not None:
        made = made_as.made
        options = replace(options, chat=args.chat or made.chat)
        chosen = {"dtype": made.dtype, "page_size": made.page_size, **chosen}
        if made.template and args.template is None:
            options = replace(
                options,
                template=made.template,
                metric=options.metric or Metric(made_as.metric),
                max_new=options.max_new or made.max_new or None,
            )
    for role in ("sender", "receiver"):
        adapter = getattr(args, f"{role}_lora")
        chosen[role] = ModelSource(path=getattr(args, role), adapter=adapter)
    return Settings(
        **{
            **chosen,
            "data": tuple(args.data),
            "held_out": tuple(getattr(args, "held_out", ())),
            "fit_data": tuple(getattr(args, "fit_data", ())),
            "options": options,
            "out": out,
            "small": None if small is None else ModelSource(path=small),
            "command": shlex.join(["droidspeak", *(_LOCAL.sub(r"\1", it) for it in sys.argv[1:])]),
        }
    )


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _complain(text: str) -> None:
    print(f"droidspeak: {text}", file=sys.stderr, flush=True)  # noqa: T201
