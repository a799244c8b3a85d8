"""Load questions from files, directories and hubs, as `--data` names them.

data.jsonl            records in LongBench's fields
directory             of LongBench's files: hotpotqa.jsonl, …
longbench:hotpotqa    from the user's folder of data sets, or else from the Hugging Face hub
gsm8k, gsm8k:FILE     GSM8K, from the same two places, or from a file
log:FILE              a server's request log (`profiles.data.logs`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic

import msgspec

from cachetree import ConfigError
from profiles.data.metrics import Metric, problem_with
from profiles.data.records import Line, Record, RecordError, read_lines
from profiles.data.tasks import TASKS, Task, TaskOptions

LONGBENCH: Final = "longbench"
GSM8K: Final = "gsm8k"
EXAMPLES_PER_CONTEXT: Final = 8
QUESTIONS_PER_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedRecord:
    record: Record
    task: Task
    place: str
    """Place of the record for messages: `file:line`."""
    name: str
    """The record's `_id`. If it has no `_id`, or another record has the same one: its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Records of one file or of one data set."""

    name: str
    """Name of the file, or the data set as the user named it: `longbench:hotpotqa`."""
    records: tuple[SourcedRecord, ...]
    note: str = ""
    """Sentence about the source that a reader of the profile should know."""


class MathProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GSM8K. The answer is a solution that ends in `#### number`."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class _Form(Generic[Line]):
    """Schema of a data set's lines, and the data set's address on the hub."""

    schema: type[Line]
    what: str
    file_format: str
    address: str

    def read(self, path: Path) -> list[tuple[str, Line]]:
        return read_lines(path, self.schema, self.what)


_LONGBENCH: Final = _Form(
    Record,
    "LongBench record",
    "json",
    "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip",
)
_GSM8K: Final = _Form(
    MathProblem,
    "GSM8K problem",
    "parquet",
    "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet",
)


def load_sources(
    specs: Sequence[str], options: TaskOptions, *, data_dir: Path | None = None
) -> list[Source]:
    """Load all data that `specs`, the values of `--data`, name. A directory has one source per
    file.

    `data_dir` is the user's folder of data sets. Raises ConfigError for a spec that names nothing
    or repeats another, and RecordError for data that cannot be used.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"data folder {data_dir} is no directory; name one, or none")
    loaded = [it for spec in specs for it in _load(spec, options, data_dir)]
    repeated = [it for it, count in Counter(key for key, _ in loaded).items() if count > 1]
    if repeated:
        raise ConfigError(f"data {repeated[0]} is given more than once; give it once")
    names = Counter(it.name for _, source in loaded for it in source.records)

    def named(sourced: SourcedRecord) -> SourcedRecord:
        return sourced if names[sourced.name] == 1 else replace(sourced, name=sourced.place)

    return [replace(source, records=tuple(map(named, source.records))) for _, source in loaded]


def few_shot(problems: Sequence[tuple[str, MathProblem]]) -> list[tuple[str, Record]]:
    """Turn GSM8K into contexts and questions. The first problems become the worked examples of
    contexts. All other problems become questions.

    There are as many contexts as possible, because statistics are over contexts. Each context gets
    at least `QUESTIONS_PER_CONTEXT` of the questions.
    """
    num_problems, num_examples = len(problems), EXAMPLES_PER_CONTEXT
    num_contexts = max(1, num_problems // (num_examples + QUESTIONS_PER_CONTEXT))
    questions = problems[num_contexts * num_examples :]
    if not questions:
        raise RecordError(
            f"{problems[-1][0]}: {num_problems} problems are too few; the first "
            f"{num_examples} are examples, so give more"
        )
    records = []
    for index in range(num_contexts):
        examples = problems[index * num_examples : (index + 1) * num_examples]
        context = "".join(f"Question: {it.question}\nAnswer: {it.answer}\n\n" for _, it in examples)
        first, stop = (len(questions) * it // num_contexts for it in (index, index + 1))
        about = {"context": context, "length": len(context.split()), "dataset": GSM8K}
        records += [
            (place, Record(input=it.question, answers=(it.answer,), **about))
            for place, it in questions[first:stop]
        ]
    return records


def read_hub(file_format: str, address: str, schema: type[Line], spec: str) -> list[Line]:
    """Read the rows of one file of the hub through the package `datasets`, which caches the file.

    Raises RecordError naming the spec if the hub has no such file or cannot be reached, or if a row
    does not fit the schema.
    """
    # Imported late: the import takes seconds, and only a file from the hub needs it.
    import datasets
    import httpx

    try:
        rows = datasets.load_dataset(file_format, data_files=address, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError, httpx.HTTPError) as exc:
        raise RecordError(
            f"{spec} cannot be had from the hub ({exc}); download the file and give its path, or "
            "put it into a folder and name that by --data-dir"
        ) from exc
    lines = []
    for i, row in enumerate(rows, start=1):
        try:
            lines.append(msgspec.convert(row, schema))
        except msgspec.ValidationError as exc:
            raise RecordError(
                f"{spec}:{i} does not have the fields of its data set: {exc}"
            ) from exc
    return lines


def _load(spec: str, options: TaskOptions, data_dir: Path | None) -> list[tuple[str, Source]]:
    """Load the sources that `spec` names. Return each behind the key of its data: `spec`, or the
    path of its file. Sources of the same data have equal keys."""
    kind, colon, rest = spec.partition(":")
    if spec == GSM8K:
        problems = _lines(spec, GSM8K, data_dir, _GSM8K)
        return [(spec, _source(spec, few_shot(problems), options))]
    if colon and kind == GSM8K:
        return [_file(Path(rest), few_shot(_GSM8K.read(Path(rest))), options)]
    if colon and kind == LONGBENCH:
        options.task_for(rest)  # Unknown sets are refused before any download.
        return [(spec, _source(spec, _lines(spec, rest, data_dir, _LONGBENCH), options))]
    path = Path(spec)
    if not path.exists():
        raise ConfigError(
            f"data {spec!r} is no file and no directory; beside those there are longbench:NAME, "
            "gsm8k and gsm8k:FILE"
        )
    paths = _files_in(path, options) if path.is_dir() else [path]
    return [_file(it, _LONGBENCH.read(it), options) for it in paths]


def _file(
    path: Path, lines: Sequence[tuple[str, Record]], options: TaskOptions
) -> tuple[str, Source]:
    return str(path.resolve()), _source(path.name, lines, options)


def _lines(
    spec: str, name: str, data_dir: Path | None, form: _Form[Line]
) -> list[tuple[str, Line]]:
    """Read a data set's lines, with their places, from the user's folder, or else from the hub."""
    if data_dir is not None and (path := data_dir / f"{name}.jsonl").is_file():
        return form.read(path)
    rows = read_hub(form.file_format, form.address.format(name=name), form.schema, spec)
    return [(f"{spec}:{i}", row) for i, row in enumerate(rows, start=1)]


def _files_in(folder: Path, options: TaskOptions) -> list[Path]:
    """Find the files of known data sets in a folder. If the user states template and metric, find
    all JSONL files."""
    if options.template is not None and options.metric is not None:
        paths = sorted(folder.glob("*.jsonl"))
        expected = "*.jsonl"
    else:
        names = [f"{name}.jsonl" for name in TASKS if name != GSM8K]
        paths = [folder / name for name in names if (folder / name).is_file()]
        expected = " or ".join(names)
    if not paths:
        raise ConfigError(f"data directory {folder} has no {expected}")
    return paths


def _source(name: str, lines: Sequence[tuple[str, Record]], options: TaskOptions) -> Source:
    template = options.template
    if template and "{input}" not in template and all(it.input for _, it in lines):
        raise ConfigError(
            f"template {template!r} has no {{input}}, and every record of {name} has one; add "
            "{input} where the question goes"
        )
    return Source(name=name, records=tuple(_sourced(place, it, options) for place, it in lines))


def _sourced(place: str, record: Record, options: TaskOptions) -> SourcedRecord:
    try:
        task = options.task_for(record.dataset)
    except ConfigError as exc:
        raise RecordError(f"{place}: {exc}") from exc
    if not record.answers and task.metric is not Metric.SAME:
        raise RecordError(
            f"{place} has no answers, so nothing can be judged by it; give some, or compare with "
            "full prefill's own by --metric same"
        )
    for answer in record.answers:
        if problem := problem_with(task.metric, answer, record.all_classes or ()):
            raise RecordError(f"{place} has {problem}")
    return SourcedRecord(record=record, task=task, place=place, name=record.id or place)
