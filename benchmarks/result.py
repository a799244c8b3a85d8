"""The last line of every benchmark: what was found, and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from profiles.environment import Environment, read_environment

PACKAGES = ("sglang", "torch", "transformers", "flashinfer-python", "pyzmq", "sglang-droidspeak")


def here() -> Environment:
    """Read it before the measurement, which loads the machine."""
    return read_environment(PACKAGES)


def write(
    question: str, found: Mapping[str, Any], environment: Environment, file: Path | None = None
) -> None:
    """One line of JSON on standard output, appended to `file` too."""
    line = json.dumps(
        {"question": question, **found, "environment": msgspec.to_builtins(environment)}
    )
    sys.stdout.write(line + "\n")
    if file is not None:
        with file.open("a") as lines:
            lines.write(line + "\n")
