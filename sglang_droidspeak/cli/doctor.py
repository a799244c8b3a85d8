"""`droidspeak doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_droidspeak.cli import checks, live
from sglang_droidspeak.cli.terminal import complain, show, tell


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check an installation, a configuration and running servers",
        description="Check this installation: versions, hooks, plugin and device. With --config "
        "also what a server would find at start: settings, profiles, memory, disk, peers and keys. "
        "With --url also running servers: backends, clock, memory, disk, keys, peers, profiles, "
        "and whether links are faster than break-even. A line each, with the remedy where "
        "something is wrong; then exit status 1. With --sglang, instead: compare what this "
        "package hooks, calls and reads of SGLang with the source of the installed one, or of one "
        "that was unpacked into a folder.",
    )
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="as `sglang.launch_server --config` takes it"
    )
    doctor.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="of a running SGLang server; may be given several times",
    )
    live.add_key(doctor)
    doctor.add_argument("--json", action="store_true", help="one line of JSON")
    doctor.add_argument(
        "--sglang",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="that holds the package `sglang`; default: the installed one",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    if args.sglang is not None:
        return _compare(args.sglang)
    found = [*checks.installation()]
    if args.config is not None:
        found += checks.configuration(args.config)
    for url in args.url:
        found += checks.running(url, args.api_key)
    tell(args, found, map(checks.line, found))
    return int(not all(it.ok for it in found))


def _compare(folder: str) -> int:
    from sglang_droidspeak.engine import probe, release

    root = Path(folder) if folder else probe.installed()
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
