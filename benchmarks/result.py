"""Write a benchmark's result: its tables, and one line of JSON with its environment."""

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
    """Make a parser with `--json`, described by the first line of the script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where the line of JSON goes, too, in place of what is there",
    )
    return parser


def here() -> Environment:
    """Read the machine, its load and versions. Do it before the measurement, which adds load."""
    return read_environment(PACKAGES)


def with_others(
    rows: Sequence[Mapping[str, Any]], key: str, environment: Environment, file: Path | None
) -> list[dict[str, Any]]:
    """Add the environment to the new rows. Keep the file's rows with other values of `key`, such as
    those of a contender that is not installed today."""
    where = msgspec.to_builtins(environment)
    new = [{**row, "environment": where} for row in rows]
    known = json.loads(file.read_bytes())["rows"] if file is not None and file.exists() else []
    return [*new, *(row for row in known if row[key] not in {it[key] for it in new})]


def write(
    name: str, results: Mapping[str, Any], environment: Environment, file: Path | None = None
) -> str:
    """Print the tables of the result, then its line of JSON; return the line."""
    line = save(name, results, environment, file)
    sys.stdout.write("\n".join(shown(name, json.loads(line))) + line)
    return line


def save(name: str, results: Mapping[str, Any], environment: Environment, file: Path | None) -> str:
    """Replace the file by the result's line of JSON, and return the line. If the process is stopped
    meanwhile, the old file stays."""
    record = {"question": name, **results, "environment": msgspec.to_builtins(environment)}
    line = json.dumps(record) + "\n"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        part.write_text(line)
        part.replace(file)
    return line
