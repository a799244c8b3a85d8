"""Records of Debian packages without people's data: examples/real/packages.jsonl.

A record has fields of the index `Packages`, and the start of the long description. We left out
packages with a maintainer's name, a mail address or a copyright in their text. We also left out
packages that belong to others (`-dev`, `-data`, `oldlibs`, …). Each source package has at most one
record. Four parts, for training, choosing, judging and verifying, share no record.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

PARTS: Final = {"train": 1300, "choose": 420, "held_out": 420, "verify": 660}
"""Parts of the data, and how many packages were drawn for each. Then we dropped packages with
the same text as a package of an earlier part."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """One package. `summary` describes it in one line, which documents leave out."""

    part: str
    name: str
    version: str
    section: str
    size: str
    """Installed size in kB."""
    needs: str
    """First dependency that only few other packages have."""
    summary: str
    text: str


def read_packages(path: Path, part: str) -> list[Package]:
    """Read the Debian packages of one of `PARTS` of the data, in the file's order."""
    lines = path.read_bytes().splitlines()
    packages = (msgspec.json.decode(line, type=Package) for line in lines)
    return [it for it in packages if it.part == part]


def share_said(summary: str, text: str) -> float:
    """Share of the summary's words that are also in the text. 0 if the summary has no words."""
    words = re.findall(r"[a-z]{3,}", summary.lower())
    return sum(word in text.lower() for word in words) / max(1, len(words))
