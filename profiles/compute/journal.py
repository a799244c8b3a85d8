"""What a run has measured so far, on disk, so that the same command goes on from there.

One JSON line per step, written when the step is done. A line that a kill cut short is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cachetree import claim
from profiles.data.documents import Tokens
from profiles.evidence import CostModel
from profiles.stats.measured import Score


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step: of one document of one split, something that needs prefix passes."""

    split: str
    document: str
    """Its key (`profiles.data.documents`)."""
    step: str
    passes: int
    """Prefix passes that it took, those that an interruption made necessary again included."""
    seconds: float
    answers: tuple[Tokens, ...] = ()
    """The receiver's own, where the step made them."""
    own: tuple[float, ...] = ()
    """Their quality."""
    sender: tuple[float, ...] = ()
    """Quality of the sender's answers, likewise."""
    scores: tuple[tuple[Score, ...], ...] = ()
    """By mixture in the step's order, then by question."""


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag="costs"):
    """The cost model, which a run begins with."""

    costs: CostModel


class Journal:
    """Entries by key, kept in a file that one run has alone. Raises ConfigError if another has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self.costs: CostModel | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)  # It has answers to a user's prompts.
        self._file = path.open("ab")
        claim(self._file, "this measurement")
        self._read()

    @classmethod
    def beside(cls, out: Path, *decisive: object) -> Journal:
        """Of what will be written to `out`, for a run of which those values decide everything.

        Scores are read by their place: where these are others, it is another journal.
        """
        named = decisive, Score.__struct_fields__
        digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:12]
        return cls(out.with_name(f".{out.name}.{digest}.jsonl"))

    def _read(self) -> None:
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                found = msgspec.json.decode(line, type=Entry | Timed)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n"):
                break
            self._know(found)
            whole += len(line)
        with self._path.open("r+b") as file:
            file.truncate(whole)

    def get(self, split: str, document: str, step: str) -> Entry | None:
        return self._entries.get((split, document, step))

    def documents(self, split: str) -> list[str]:
        """Keys of those of which it has something, in the order in which they were measured."""
        return [*dict.fromkeys(of for named, of, _ in self._entries if named == split)]

    def put(self, found: Entry | Timed) -> None:
        """Keep it; it is on disk when this returns."""
        self._file.write(msgspec.json.encode(found) + b"\n")
        self._file.flush()
        self._know(found)

    def _know(self, found: Entry | Timed) -> None:
        if isinstance(found, Entry):
            self._entries[found.split, found.document, found.step] = found
        else:
            self.costs = found.costs

    @property
    def num_passes(self) -> int:
        return sum(entry.passes for entry in self._entries.values())

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self._entries.values())

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """The run is complete: nothing of the journal is needed any more."""
        self.close()
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_journal() -> Iterator[Journal]:
    """For what is over soon: gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="droidspeak-profile-") as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        try:
            yield journal
        finally:
            journal.close()
