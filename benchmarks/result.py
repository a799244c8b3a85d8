"""What every benchmark has at its end: its tables, and one line of JSON with where that was."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profiles.environment import Environment, read_environment
from tools.tables import shown

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("sglang", "torch", "transformers", "flashinfer-python", "pyzmq", "sglang-droidspeak")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """With `--json`, and the first line of the script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where the line of JSON goes, too, in place of what is there",
    )
    return parser


def here() -> Environment:
    """Read it before the measurement, which loads the machine."""
    return read_environment(PACKAGES)


def with_others(
    rows: Sequence[Mapping[str, Any]], key: str, environment: Environment, file: Path | None
) -> list[dict[str, Any]]:
    """The rows with where they were measured, and those of the file whose `key` none of them has:
    of what is not installed here today, say."""
    where = msgspec.to_builtins(environment)
    new = [{**row, "environment": where} for row in rows]
    known = json.loads(file.read_bytes())["rows"] if file is not None and file.exists() else []
    return [*new, *(row for row in known if row[key] not in {it[key] for it in new})]


def write(
    name: str, found: Mapping[str, Any], environment: Environment, file: Path | None = None
) -> str:
    """On standard output the tables that are made of it, then the line, which is returned."""
    told = {"question": name, **found, "environment": msgspec.to_builtins(environment)}
    line = json.dumps(told) + "\n"
    sys.stdout.write("\n".join(shown(name, json.loads(line))) + line)
    if file is not None:
        file.write_text(line)
    return line
