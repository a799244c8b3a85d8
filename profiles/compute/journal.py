"""Keep the results of measured steps on disk, so that the same command continues a stopped run.

The file has one JSON line per step, written when the step is done. A line that a kill cut short is
dropped.
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
    """Results of one step. A step is a measurement on one document of one split."""

    split: str
    document: str
    """Key of the document, made by `profiles.data.documents`."""
    step: str
    passes: int
    """Number of passes over the document's prefix that the step took. Passes repeated after an
    interruption count too."""
    seconds: float
    answers: tuple[Tokens, ...] = ()
    """The receiver's answers by full prefill, if the step made them."""
    own: tuple[float, ...] = ()
    """Quality of the receiver's answers by full prefill."""
    sender: tuple[float, ...] = ()
    """Quality of the sender's answers, if the step made them."""
    scores: tuple[tuple[Score, ...], ...] = ()
    """Scores of each mixture of KV, in the step's order, for each question."""


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag="costs"):
    """The timed cost model of a run, as the first entry of its journal."""

    costs: CostModel


class Journal:
    """Entries of one run of the profiler, kept in a file. Keys are split, document and step. Raises
    ConfigError if another run owns the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self.costs: CostModel | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)  # The file has answers to a user's prompts.
        self._file = path.open("ab")
        claim(self._file, "this measurement")
        self._read()

    @classmethod
    def beside(cls, out: Path, *decisive: object) -> Journal:
        """Open the journal of a run that will write the file `out`. `decisive` are all values that
        the measurements depend on.

        The file's name has their digest, so a run with other values has another journal.
        """
        named = decisive, Score.__struct_fields__
        digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:12]
        return cls(out.with_name(f".{out.name}.{digest}.jsonl"))

    def _read(self) -> None:
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                entry = msgspec.json.decode(line, type=Entry | Timed)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n"):
                break
            self._know(entry)
            whole += len(line)
        with self._path.open("r+b") as file:
            file.truncate(whole)

    def get(self, split: str, document: str, step: str) -> Entry | None:
        return self._entries.get((split, document, step))

    def documents(self, split: str) -> list[str]:
        """Keys of the split's documents with entries, in the order in which they were measured."""
        return [*dict.fromkeys(of for named, of, _ in self._entries if named == split)]

    def put(self, entry: Entry | Timed) -> None:
        """Store an entry. It is on disk when this method returns."""
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        self._know(entry)

    def _know(self, entry: Entry | Timed) -> None:
        if isinstance(entry, Entry):
            self._entries[entry.split, entry.document, entry.step] = entry
        else:
            self.costs = entry.costs

    @property
    def num_passes(self) -> int:
        return sum(entry.passes for entry in self._entries.values())

    @property
    def seconds(self) -> float:
        return sum(entry.seconds for entry in self._entries.values())

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the file: the run is complete, and nothing needs the journal any more."""
        self.close()
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_journal() -> Iterator[Journal]:
    """Yield a journal that is deleted at the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="droidspeak-profile-") as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        try:
            yield journal
        finally:
            journal.close()
