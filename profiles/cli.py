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

from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from profiles.evidence import MeasuredProfile, read_measured
from profiles.settings import Settings

if TYPE_CHECKING:
    from profiles.verification import Again, Verification

# Heavy imports (torch, transformers, matplotlib) wait until a command runs.

FAILED_GATE: Final = 3
"""Exit status: everything worked, and the verdict is that the pair may not be reused."""

_LOCAL: Final = re.compile(r"(^|[=:])/(?:[^/]*/)*(?=[^/])")
"""The folders of an absolute path, which say nothing on another machine."""

_MODELS: Final = (
    *("dtype", "device", "page_size", "sender_device", "max_memory_gb", "max_device_memory_gb"),
)
_CHOICE: Final = (
    *("held_out", "held_out_share", "tolerance", "group", "plans", "pruned", "e_correction"),
    *("fit_data", "timing_seconds", "seed"),
)
_VERDICT: Final = (
    *("passed", "reason", "recommended", "blocks", "first_difference", "metric"),
    *("full_prefill_quality", "full_reuse_quality"),
)
_TYPES: Final = {"int": int, "float": float, "str": str, "Path": Path}


def add_commands(commands: Any) -> None:
    """Add `profile` and `report` to the subparsers of `droidspeak`."""
    profile = commands.add_parser(
        "profile",
        help="measure which layers of a pair may be reused, at what quality and cost",
        description="Measure every block of layers of a pair on a data set, choose the smallest "
        "one that keeps the quality, judge it on held-out data, and write a profile for servers. "
        "The same command goes on where an earlier one was stopped. Exit status 3 where the pair "
        "did not pass. `droidspeak profile show FILE` prints a profile, `verify FILE ...` judges "
        "it on other data, and `calibrate FILE ...` measures what the drift guard allows it.",
        allow_abbrev=False,
    )
    _add_models(profile)
    _add_data(profile)
    profile.add_argument("--out", type=Path, metavar="FILE", help="the profile to write, JSON")
    profile.add_argument("--small", type=Path, metavar="PATH", help="smaller model to compare with")
    _add_flags(profile.add_argument_group("choice"), *_CHOICE)
    profile.set_defaults(run=_profile)

    actions = profile.add_subparsers(dest="action", metavar="show|verify|calibrate")
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
    verify.add_argument("--json", action="store_true", help="the result as one line of JSON")
    calibrate = actions.add_parser(
        "calibrate",
        help="measure what the drift guard allows a profile's plans",
        description="Measure how far answers by a profile's plans are from full prefill's, on the "
        "held-out data that it was judged on, and write that into it: for profiles of before the "
        "drift guard. The same command goes on where an earlier one was stopped.",
        allow_abbrev=False,
    )
    for parser, run in ((verify, _verify), (calibrate, _calibrate)):
        parser.add_argument("profile", type=Path, metavar="FILE")
        _add_models(parser)
        _add_data(parser)
        parser.set_defaults(run=run)

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
    _add_flags(models, *_MODELS)


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    _add_flags(data, "data", "data_dir")
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
    data.add_argument(
        "--metric", choices=[it.value for it in Metric], help="default: the data set's own"
    )
    data.add_argument("--max-new", type=int, metavar="N", help="longest answer in tokens")
    _add_flags(data, "max_prompt_tokens")


def _add_flags(parser: Any, *names: str) -> None:
    """Flags of settings; of those that are not given the arguments have None."""
    for name in names:
        it = Settings.__dataclass_fields__[name]
        how, kind = dict(it.metadata), it.type.removesuffix(" | None")
        option = how.pop("option", f"--{name.replace('_', '-')}")
        if kind == "bool":
            how = {"help": how["help"], "action": "store_const", "const": not it.default}
        elif kind == "tuple[str, ...]":
            how["action"] = "append"
        else:
            how["type"] = _TYPES[kind]
            if "default" not in how["help"] and it.default is not None:
                how["help"] += (
                    f"; default: {it.default:g}" if kind == "float" else f"; default: {it.default}"
                )
        parser.add_argument(option, dest=name, **how)


def _profile(args: argparse.Namespace) -> int:
    if _is_missing(args, "profile", "sender", "receiver", "data", "out"):
        return 2
    from rich.console import Console

    from profiles.profiler import profile_pair
    from profiles.report.terminal import table_of

    console = Console()
    try:
        profile = profile_pair(_settings(args, out=args.out, small=args.small), console)
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

    from profiles.report.terminal import table_of

    Console().print(table_of(profile))
    return 0


def _verdict_of(profile: MeasuredProfile) -> dict[str, object]:
    return {
        "sender": profile.sender.model_id,
        "receiver": profile.receiver.model_id,
        **{name: getattr(profile, name) for name in _VERDICT},
        "cost_model_error": profile.costs.error,
    }


def _verify(args: argparse.Namespace) -> int:
    if _is_missing(args, f"profile {args.action}", "sender", "receiver", "data"):
        return 2
    found = _again(args, is_json=args.json).verify()
    if args.json:
        _print(msgspec.json.encode(found).decode())
    else:
        _say(found)
    return 0 if found.holds else FAILED_GATE


def _calibrate(args: argparse.Namespace) -> int:
    if _is_missing(args, f"profile {args.action}", "sender", "receiver", "data"):
        return 2
    try:
        found = _again(args).calibrate()
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on from here")
        return 130
    for it in found.blocks:
        if it.tv_bound is not None:
            _print(f"[{it.start}, {it.stop}): within {it.tv_bound:.3f} of full prefill on average")
    return 0


def _again(args: argparse.Namespace, *, is_json: bool = False) -> Again:
    from rich.console import Console

    from cachetree.corrections import read_corrections
    from profiles.verification import Again

    profile = read_measured(args.profile)
    settings = _settings(args, out=args.profile, made_as=profile)
    corrections = read_corrections(profile, args.profile)
    return Again(profile, settings, Console(stderr=is_json), corrections)


def _is_missing(args: argparse.Namespace, command: str, *names: str) -> bool:
    """Whether an argument is, which is then said."""
    missing = [f"--{name}" for name in names if not getattr(args, name)]
    if missing:
        _complain(f"{command} needs {', '.join(missing)}")
    return bool(missing)


def _say(found: Verification) -> None:
    from profiles.stats.gate import finding

    split = found.split
    _print(f"{split.num_questions} questions about {split.num_contexts} contexts")
    _print(f"full prefill {split.full_prefill.mean:.3f}, full reuse {split.full_reuse.mean:.3f}")
    for plan in found.plans:
        _print(finding(plan, split))
    _print(f"{'passed' if found.passed else 'failed'}: {found.reason}")
    _print("the profile's verdict holds" if found.holds else "the profile's verdict does not hold")


def _report(args: argparse.Namespace) -> int:
    profile = read_measured(args.profile)
    from profiles.report.page import write_report

    for path in write_report(profile, args.out):
        _print(str(path))
    return 0


def _settings(
    args: argparse.Namespace,
    *,
    out: Path,
    small: Path | None = None,
    made_as: MeasuredProfile | None = None,
) -> Settings:
    """What the arguments say; where they are silent, as another profile was made."""
    from profiles.compute.models import ModelSource

    chosen = {
        name: tuple(value) if isinstance(value, list) else value
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
    if small is not None:
        chosen["small"] = ModelSource(path=small)
    command = shlex.join(["droidspeak", *(_LOCAL.sub(r"\1", it) for it in sys.argv[1:])])
    return Settings(**chosen | {"options": options, "out": out, "command": command})


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _complain(text: str) -> None:
    print(f"droidspeak: {text}", file=sys.stderr, flush=True)  # noqa: T201
