"""Records of Debian packages without people, from apt's lists on this machine.

    apt-get update -o Acquire::Languages=en
    python -m tools.real.packages [--lists /var/lib/apt/lists] --out examples/real/packages.jsonl

A record has fields of `Packages` and the start of the long description of `Translation-en`. Left
out are packages whose text has a word of a maintainer's name, a mail address or a copyright, all
but one of a source, and those that are parts of others (`-dev`, `-data`, `oldlibs`, …). Every
record belongs to one part: what is trained on, chosen on, judged on and verified on share none.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Final

import msgspec

Paragraph = Mapping[str, str]

PARTS: Final = {"train": 1300, "choose": 420, "held_out": 420, "verify": 660}
"""Records of each part, before those whose text an earlier part has are left out."""
_APT_HELPER: Final = "/usr/lib/apt/apt-helper"
_NO_PROGRAMS: Final = re.compile(
    r"debug|oldlibs|metapackages|localization|translations|introspection|libdevel|doc|kernel"
)
_PARTS_OF_OTHERS: Final = ("-dev", "-data", "-doc", "-common", "-dbg", "-bin", "-perl")
_PEOPLE: Final = re.compile(
    r"@|copyright|author|\b(written|developed|created|maintained|designed|made) by\b"
    r"|\b(by|of|from|after|and|with) [A-Z][a-z]+ [A-Z]|\b[A-Z]\. ?[A-Z][a-z]|\b(Dr|Prof|Mr|Ms)\.",
)
_TEAM: Final = re.compile(r"team|group|maintainers|developers|packag|project|debian|list", re.I)
_WORDS: Final = range(12, 41)
"""Words that a description may have."""
_LEAST_SAID: Final = 0.6
_NEEDED_BY_MANY: Final = 60
"""A dependency of more packages than this says nothing about one."""


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


def paragraphs(list_file: Path) -> Iterator[Paragraph]:
    """The fields of every paragraph of a list of apt, compressed or not."""
    command = [_APT_HELPER, "cat-file", str(list_file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for block in text.split("\n\n"):
        fields = re.findall(r"^(\S+?):[ \t]*((?:.*)(?:\n[ \t].*)*)", block, re.M)
        if fields:
            yield dict(fields)


def names_of_people(packages: Iterable[Paragraph]) -> frozenset[str]:
    """Words of the names of maintainers who are no teams, in lower case."""
    names = (it.get("Maintainer", "").partition("<")[0] for it in packages)
    people = (name for name in names if not _TEAM.search(name))
    return frozenset(word.lower() for name in people for word in re.findall(r"[^\W\d_]{3,}", name))


def find_packages(lists: Path) -> list[Package]:
    """All records that can be asked about, one of each source, shuffled, with their parts."""
    (found,) = lists.glob("*_bookworm_main_binary-amd64_Packages*")
    (translated,) = lists.glob("*_bookworm_main_i18n_Translation-en*")
    long = {it["Description-md5"]: it["Description-en"] for it in paragraphs(translated)}
    listed = list(paragraphs(found))
    people = names_of_people(listed)
    use = Counter(name for it in listed for name in set(_dependencies(it)))
    by_source: dict[str, Package] = {}
    for it in sorted(listed, key=lambda it: (len(it["Package"]), it["Package"])):
        package = _package(it, long.get(it.get("Description-md5", ""), ""), use)
        source = it.get("Source", it["Package"]).split()[0]
        if package and source not in by_source and not mentions_people(package, people):
            by_source[source] = package
    chosen = sorted(by_source.values(), key=lambda it: it.name)
    Random("droidspeak packages 1").shuffle(chosen)
    parts = [part for part, count in PARTS.items() for _ in range(count)]
    part_of_text: dict[str, str] = {}
    return [
        msgspec.structs.replace(it, part=part)
        for it, part in zip(chosen, parts, strict=False)
        if part_of_text.setdefault(it.text, part) == part
    ]


def mentions_people(package: Package, people: frozenset[str]) -> bool:
    """Whether a text may name somebody; says yes too often rather than too seldom."""
    text = f"{package.summary}. {package.text}"
    words = re.findall(r"\b[A-Z][a-z]{2,}", text)
    return bool(_PEOPLE.search(text)) or any(word.lower() in people for word in words)


def share_said(summary: str, text: str) -> float:
    """The share of the summary's words that are in the text; 0 where it has none."""
    words = re.findall(r"[a-z]{3,}", summary.lower())
    return sum(word in text.lower() for word in words) / max(1, len(words))


def _dependencies(paragraph: Paragraph) -> list[str]:
    return re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]+)", paragraph.get("Depends", ""))


def _package(it: Paragraph, description: str, use: Counter[str]) -> Package | None:
    """The record of a paragraph, or None where it cannot be asked about."""
    summary, _, body = description.partition("\n")
    text = _opening(body)
    needs = next((name for name in _dependencies(it) if use[name] <= _NEEDED_BY_MANY), "")
    section = it.get("Section", "").rpartition("/")[2]
    version = re.sub(r"^\d+:|[-+~].*$", "", it["Version"])
    if not (
        re.fullmatch(r"[a-z][a-z0-9.+-]{2,17}", it["Package"])
        and not it["Package"].endswith(_PARTS_OF_OTHERS)
        and not _NO_PROGRAMS.search(section)
        and f"{text}{summary}{needs}{version}".isascii()
        and len(text.split()) in _WORDS
        and 3 <= len(summary.split()) <= 10
        and share_said(summary, text) >= _LEAST_SAID
        and '"' not in summary
        and 0 < len(version) <= 8
        and 0 < len(needs) <= 18
    ):
        return None
    return Package(
        part="",
        name=it["Package"],
        version=version,
        section=section,
        size=it.get("Installed-Size", "0"),
        needs=needs,
        summary=summary,
        text=text,
    )


def _opening(body: str) -> str:
    """Whole sentences from the start of a description's first paragraph; empty for a list."""
    lines = []
    for line in body.split("\n"):
        if line.strip() == ".":
            break
        if line.startswith("  "):
            return ""
        lines.append(line.strip())
    text = ""
    for sentence in re.split(r"(?<=[.!])\s+(?=[A-Z])", " ".join(lines)):
        if text and len(f"{text} {sentence}".split()) > _WORDS[-1]:
            break
        text = f"{text} {sentence}".strip()
    return text if text.endswith(".") else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.real.packages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lists", type=Path, default=Path("/var/lib/apt/lists"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    packages = find_packages(args.lists)
    args.out.write_bytes(b"".join(msgspec.json.encode(it) + b"\n" for it in packages))
    print(f"{len(packages)} packages, {Counter(it.part for it in packages)} in {args.out}")


if __name__ == "__main__":
    main()
