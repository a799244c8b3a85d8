"""`droidspeak doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_droidspeak.cli.terminal import complain, show


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what moved in another SGLang",
        description="Compare what this package hooks, calls and reads of SGLang with the source of "
        "the installed one, or of one that was unpacked into a folder, without running it. Exit "
        "status 1 where something moved.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "--sglang",
        nargs="?",
        const="",
        required=True,
        metavar="FOLDER",
        help="that holds the package `sglang`; default: the installed one",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from sglang_droidspeak.engine import probe, release

    root = Path(args.sglang) if args.sglang else probe.installed()
    if not (root / "sglang").is_dir():
        complain(f"{root} has no folder `sglang`; give the folder that a wheel was unpacked into")
        return 1
    lacking, changed = list(probe.lacking(root)), list(probe.changed(root))
    for line in (*lacking, *changed):
        show(line)
    show(
        f"{len(lacking)} missing, {len(changed)} changed since SGLang {release.VERSION}, of "
        f"{len(release.USED)} functions and classes, and the fields of {len(release.FIELDS)}"
    )
    return int(bool(lacking or changed))
