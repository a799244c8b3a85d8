"""Records of Debian packages without people: examples/real/packages.jsonl.

A record has fields of `Packages` and the start of the long description of `Translation-en`. Left
out are packages whose text has a word of a maintainer's name, a mail address or a copyright, all
but one of a source, and those that are parts of others (`-dev`, `-data`, `oldlibs`, …). Every
record belongs to one part: what is trained on, chosen on, judged on and verified on share none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

PARTS: Final = {"train": 1300, "choose": 420, "held_out": 420, "verify": 660}
"""Records of each part, before those whose text an earlier part has are left out."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """One package. `summary` is its description in a line, which documents leave out."""

    part: str
    name: str
    version: str
    section: str
    size: str
    """Installed, in kB."""
    needs: str
    """The first package that it depends on and few others do."""
    summary: str
    text: str


def read_packages(path: Path, part: str) -> list[Package]:
    """The records of a part, in the file's order."""
    lines = path.read_bytes().splitlines()
    packages = (msgspec.json.decode(line, type=Package) for line in lines)
    return [it for it in packages if it.part == part]


def share_said(summary: str, text: str) -> float:
    """The share of the summary's words that are in the text; 0 where it has none."""
    words = re.findall(r"[a-z]{3,}", summary.lower())
    return sum(word in text.lower() for word in words) / max(1, len(words))
