"""Command `droidspeak profile`: make, show, verify or calibrate a pair's profile."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cachetree.cli import complain, show, show_json
from profiles.distill.settings import DistillSettings
from profiles.evidence import MeasuredProfile, read_measured
from profiles.settings import Settings, add_flags

if TYPE_CHECKING:
    from profiles.verification import Again, Verification

# Heavy imports (torch, transformers, matplotlib) wait until a command runs.

FAILED_GATE: Final = 3
"""Exit status if the command worked, and the pair did not pass the gate."""
UNDECIDED: Final = 4
"""Exit status if the command worked, and there are too few data to show that a verdict holds."""

AnySettings = TypeVar("AnySettings", Settings, DistillSettings)

_LOCAL: Final = re.compile(r"(^|[=:])/(?:[^/]*/)*(?=[^/])")
"""Pattern of the folders in an absolute path. A profile shows its command without these folders,
because another machine does not have them."""

_VERDICT: Final = (
    *("passed", "reason", "controls", "recommended", "blocks", "first_difference", "metric"),
    *("full_prefill_quality", "full_reuse_quality"),
)


class _Actions(argparse._SubParsersAction):
    """Refuses flags before `show`, `verify` or `calibrate`: argparse would forget their values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any
    ) -> None:
        actions = reversed(parser._actions)  # If two flags set one value, name the first.
        flags = {it.dest: it.option_strings for it in actions if it.option_strings}
        stated = (name for name, it in vars(namespace).items() if it is not None)
        misplaced = [flags[it][0] for it in stated if it in flags]
        known = self.choices[values[0]]._option_string_actions if values[0] in self.choices else ()
        if unknown := [it for it in misplaced if known and it not in known]:
            parser.error(f"{values[0]} has no {', '.join(unknown)}; leave it out")
        if misplaced:
            parser.error(f"give {', '.join(misplaced)} after {values[0]}")
        super().__call__(parser, namespace, values)


def add_commands(commands: Any) -> None:
    """Add `profile` to the subparsers of `droidspeak`."""
    profile = commands.add_parser(
        "profile",
        help="measure which layers of a pair may be reused, at what quality and cost",
        description="Measure every block of layers of a pair on a data set, choose the smallest "
        "block that keeps the quality, judge it on held-out data, and write a profile for "
        "servers. If a run was stopped, the same command continues it. Exit status 3 if the "
        "pair did not pass. `droidspeak profile show FILE` prints a profile, `verify FILE "
        "...` judges it on other data, and `calibrate FILE ...` measures which distance the "
        "drift guard allows its plans.",
        allow_abbrev=False,
    )
    add_flags(profile, "models", "many", "data", "out", "choice")
    profile.set_defaults(run=_profile)

    actions = profile.add_subparsers(
        action=_Actions, dest="action", metavar="show|verify|calibrate"
    )
    show = actions.add_parser("show", help="print a profile, or draw it", allow_abbrev=False)
    _add_profile(show)
    show.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for pictures, and for a page with all of them",
    )
    show.add_argument(
        "--verify-verdict",
        action="store_true",
        help="compute the verdict again, from the held-out scores in the profile",
    )
    show.add_argument("--json", action="store_true", help="print the verdict as one line of JSON")
    show.set_defaults(run=_show)
    verify = actions.add_parser(
        "verify",
        help="judge a profile's plans again, on other data",
        description="Measure those plans of a passed profile that servers use, on data that the "
        "profile has not seen, and say whether the verdict holds. Exit status 3 if it does not "
        "hold, 4 if there are too few data to show that it holds.",
        allow_abbrev=False,
    )
    verify.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    calibrate = actions.add_parser(
        "calibrate",
        help="measure which distance the drift guard allows a profile's plans",
        description="Measure how far answers by a profile's plans are from full prefill's "
        "answers, and write this distance into the profile. Use it if a profile lacks the "
        "distance, or if more data can make it smaller. The data have to contain the held-out "
        "data on which the profile was judged. If a run was stopped, the same command continues "
        "it.",
        allow_abbrev=False,
    )
    for parser, run in ((verify, _verify), (calibrate, _calibrate)):
        _add_profile(parser)
        add_flags(parser, "models", "data")
        parser.set_defaults(run=run)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, metavar="FILE", help="profile of a pair, JSON")


def _profile(args: argparse.Namespace) -> int:
    if args.models or args.adapters:
        return _profile_many(args)
    models = () if args.line else ("sender", "receiver")
    if is_missing(args, "profile", *models, "data", "out"):
        return 2
    from rich.console import Console

    from profiles.profiler import profile_pair
    from profiles.report.terminal import table_of

    console = Console()
    try:
        profile = profile_pair(settings_of(args, {}, Settings), console)
    except KeyboardInterrupt:
        complain("droidspeak", "interrupted; the same command goes on from here")
        return 130
    console.print(table_of(profile))
    console.print(f"wrote {args.out}", highlight=False, soft_wrap=True)
    return 0 if profile.passed else FAILED_GATE


def _profile_many(args: argparse.Namespace) -> int:
    if is_missing(args, "profile", "out"):
        return 2
    from rich.console import Console

    from profiles.many import PAGE, Many
    from profiles.pairs import read_entries

    settings = settings_of(args, {}, Settings)
    try:
        outcomes = Many(settings, read_entries(settings), Console()).run()
    except KeyboardInterrupt:
        complain("droidspeak", "interrupted; the same command goes on from here")
        return 130
    show(f"wrote {args.out}; {PAGE} in it has the tables")
    failed = any(it.profile is None or not it.profile.passed for it in outcomes)
    return FAILED_GATE if failed else 0


def _show(args: argparse.Namespace) -> int:
    profile = read_measured(args.profile)
    if args.verify_verdict:
        return _verify_verdict(profile)
    if args.json:
        show_json(_verdict_of(profile))
        return 0
    if args.out:
        from profiles.report.page import write_report

        for path in write_report(profile, args.out):
            show(str(path))
        return 0
    from rich.console import Console

    from profiles.report.terminal import table_of

    Console().print(table_of(profile))
    return 0


def _verify_verdict(profile: MeasuredProfile) -> int:
    from profiles.stats.artifact import contradiction

    if profile.judged is None:
        show("the profile keeps no scores, as it is from before; make it again")
        return UNDECIDED
    if (wrong := contradiction(profile, profile.judged)) is not None:
        show(f"the verdict does not follow from the scores: {wrong}")
        return FAILED_GATE
    show(f"the verdict follows from the scores of {len(profile.judged.tasks)} contexts")
    return 0


def _verdict_of(profile: MeasuredProfile) -> dict[str, object]:
    return {
        "sender": profile.sender.model_id,
        "receiver": profile.receiver.model_id,
        **{name: getattr(profile, name) for name in _VERDICT},
        "cost_model_error": profile.costs.error,
    }


def _verify(args: argparse.Namespace) -> int:
    if is_missing(args, f"profile {args.action}", "sender", "receiver", "data"):
        return 2
    result = _again(args, is_json=args.json).verify()
    if args.json:
        show_json(result)
    else:
        _say(result)
    return {True: 0, False: FAILED_GATE, None: UNDECIDED}[result.holds]


def _calibrate(args: argparse.Namespace) -> int:
    if is_missing(args, f"profile {args.action}", "sender", "receiver", "data"):
        return 2
    try:
        calibrated = _again(args).calibrate()
    except KeyboardInterrupt:
        complain("droidspeak", "interrupted; the same command goes on from here")
        return 130
    for block in calibrated.blocks:
        if block.tv_bound is not None:
            show(
                f"[{block.start}, {block.stop}): within {block.tv_bound:.3f} of full prefill "
                "on average"
            )
    return 0


def _again(args: argparse.Namespace, *, is_json: bool = False) -> Again:
    from rich.console import Console

    from cachetree.corrections import read_corrections
    from profiles.verification import Again

    profile = read_measured(args.profile)
    settings = replace(settings_of(args, _made_as(profile, args), Settings), out=args.profile)
    corrections = read_corrections(profile, args.profile)
    return Again(profile, settings, Console(stderr=is_json), corrections)


def is_missing(args: argparse.Namespace, command: str, *names: str) -> bool:
    """Report the required arguments that are missing. Return whether any is missing."""
    missing = [f"--{name}" for name in names if not getattr(args, name)]
    if missing:
        complain("droidspeak", f"{command} needs {', '.join(missing)}")
    return bool(missing)


def _say(verification: Verification) -> None:
    from profiles.stats.gate import finding

    split = verification.split
    show(f"{split.num_questions} questions about {split.num_contexts} contexts")
    show(f"full prefill {split.full_prefill.mean:.3f}, full reuse {split.full_reuse.mean:.3f}")
    for plan in verification.plans:
        show(finding(plan, split))
    show(verification.reason)
    if verification.holds is None:
        show("these data cannot show whether the profile's verdict holds")
    else:
        show(f"the profile's verdict {'holds' if verification.holds else 'does not hold'}")


def settings_of(
    args: argparse.Namespace, defaults: Mapping[str, Any], of: type[AnySettings]
) -> AnySettings:
    """Make settings of class `of` from the arguments. An argument that the user omits takes its
    value from `defaults`."""
    stated = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in of.__dataclass_fields__ and value is not None
    }
    command = shlex.join(["droidspeak", *(_LOCAL.sub(r"\1", it) for it in sys.argv[1:])])
    return of(**{**defaults, **stated, "command": command})


def _made_as(profile: MeasuredProfile, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that made a profile. If the arguments name another template, leave out
    the settings that belong to the profile's template."""
    made = profile.made
    names = "dtype", "page_size", "chat", "max_prompt_tokens"
    settings: dict[str, Any] = {it: getattr(made, it) for it in names}
    return settings | asdict(made.options) if args.template is None else settings
