"""Where questions come from: files, directories and hubs, as `--data` names them.

data.jsonl            records in LongBench's fields
directory             of LongBench's files: hotpotqa.jsonl, …
longbench:hotpotqa    from the user's folder of data sets, or else from the Hugging Face hub
gsm8k, gsm8k:FILE     the same; lines with `question` and `answer`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree import ConfigError
from profiles.data.metrics import problem_with
from profiles.data.records import Line, Record, RecordError, read_lines
from profiles.data.tasks import TASKS, Task, TaskOptions

LONGBENCH: Final = "longbench"
GSM8K: Final = "gsm8k"
EXAMPLES_PER_CONTEXT: Final = 8
QUESTIONS_PER_CONTEXT: Final = 8

_LONGBENCH_ADDRESS: Final = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_GSM8K_ADDRESS: Final = "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedRecord:
    record: Record
    task: Task
    place: str
    """`file:line`, for messages."""
    name: str
    """The record's `_id`, or its place where it has none or shares it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file's records, or one data set's."""

    name: str
    """A file's name, or the data set as it was given: `longbench:hotpotqa`."""
    records: tuple[SourcedRecord, ...]


class MathProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GSM8K. The answer is a solution that ends in `#### number`."""

    question: str
    answer: str


def load_sources(
    specs: Sequence[str], options: TaskOptions, *, data_dir: Path | None = None
) -> list[Source]:
    """Everything that the specs name, in order; a directory is a source per file.

    `data_dir` is the user's folder of data sets. Raises ConfigError for a spec that names nothing
    or repeats another, and RecordError for data that cannot be used.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"data folder {data_dir} is no directory; name one, or none")
    loaded = [it for spec in specs for it in _load(spec, options, data_dir)]
    repeated = [it for it, count in Counter(key for key, _ in loaded).items() if count > 1]
    if repeated:
        raise ConfigError(f"data {repeated[0]} is given more than once; give it once")
    return _uniquely_named([source for _, source in loaded])


def few_shot(problems: Sequence[tuple[str, MathProblem]]) -> list[tuple[str, Record]]:
    """GSM8K as contexts of worked examples, taken from the first problems, and questions.

    There are as many contexts as leave each of them `QUESTIONS_PER_CONTEXT` of the other problems
    or more, because contexts are what is split and resampled. No question is an example.
    """
    num_problems = len(problems)
    num_contexts = max(1, num_problems // (EXAMPLES_PER_CONTEXT + QUESTIONS_PER_CONTEXT))
    num_examples = num_contexts * EXAMPLES_PER_CONTEXT
    if num_problems <= num_examples:
        raise RecordError(
            f"{problems[-1][0]}: {num_problems} problems are too few; the first "
            f"{EXAMPLES_PER_CONTEXT} are examples, so give more"
        )
    contexts = [
        "".join(f"Question: {it.question}\nAnswer: {it.answer}\n\n" for _, it in problems[i:j])
        for i, j in _runs(num_examples, num_contexts)
    ]
    questions = problems[num_examples:]
    return [
        (place, _as_record(problem, context))
        for context, (i, j) in zip(contexts, _runs(len(questions), num_contexts), strict=True)
        for place, problem in questions[i:j]
    ]


def read_hub(file_format: str, address: str, schema: type[Line], spec: str) -> list[Line]:
    """Rows of one file through `datasets`, which caches it.

    Raises RecordError naming the spec: where the hub has no such file or cannot be reached, and for
    a row that does not fit.
    """
    # Imported late: seconds, and only needed where there is no local file.
    import datasets
    import httpx

    try:
        rows = datasets.load_dataset(file_format, data_files=address, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError, httpx.HTTPError) as exc:
        raise RecordError(
            f"{spec} cannot be had from the hub ({exc}); download the file and give its path, or "
            "put it into a folder and name that by --data-dir"
        ) from exc
    return [_as_struct(row, schema, f"{spec}:{i}") for i, row in enumerate(rows, start=1)]


def _load(spec: str, options: TaskOptions, data_dir: Path | None) -> list[tuple[str, Source]]:
    """Sources, each with what is the same for two specs of the same data."""
    kind, colon, rest = spec.partition(":")
    if spec == GSM8K:
        return [(spec, _source(spec, _gsm8k(data_dir), options))]
    if colon and kind == GSM8K:
        return [_gsm8k_file(Path(rest), options)]
    if colon and kind == LONGBENCH:
        return [(spec, _source(spec, _longbench(rest, options, data_dir), options))]
    path = Path(spec)
    if path.is_dir():
        return [_file(it, options) for it in _files_in(path, options)]
    if path.is_file():
        return [_file(path, options)]
    raise ConfigError(
        f"data {spec!r} is no file and no directory; beside those there are longbench:NAME, gsm8k "
        "and gsm8k:FILE"
    )


def _file(path: Path, options: TaskOptions) -> tuple[str, Source]:
    records = read_lines(path, Record, "LongBench record")
    return str(path.resolve()), _source(path.name, records, options)


def _gsm8k_file(path: Path, options: TaskOptions) -> tuple[str, Source]:
    problems = few_shot(read_lines(path, MathProblem, "GSM8K problem"))
    return str(path.resolve()), _source(path.name, problems, options)


def _files_in(folder: Path, options: TaskOptions) -> list[Path]:
    """Files of the known data sets; all JSONL files where the user says how any is asked."""
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


def _longbench(name: str, options: TaskOptions, data_dir: Path | None) -> list[tuple[str, Record]]:
    options.task_for(name)  # Before anything is downloaded.
    path = _local(f"{name}.jsonl", data_dir)
    if path is not None:
        return read_lines(path, Record, "LongBench record")
    spec = f"{LONGBENCH}:{name}"
    rows = read_hub("json", _LONGBENCH_ADDRESS.format(name=name), Record, spec)
    return _placed(rows, spec)


def _gsm8k(data_dir: Path | None) -> list[tuple[str, Record]]:
    path = _local(f"{GSM8K}.jsonl", data_dir)
    if path is not None:
        return few_shot(read_lines(path, MathProblem, "GSM8K problem"))
    return few_shot(_placed(read_hub("parquet", _GSM8K_ADDRESS, MathProblem, GSM8K), GSM8K))


def _local(name: str, data_dir: Path | None) -> Path | None:
    path = None if data_dir is None else data_dir / name
    return path if path is not None and path.is_file() else None


def _placed(rows: Sequence[Line], spec: str) -> list[tuple[str, Line]]:
    return [(f"{spec}:{i}", row) for i, row in enumerate(rows, start=1)]


def _source(name: str, lines: Sequence[tuple[str, Record]], options: TaskOptions) -> Source:
    return Source(name=name, records=tuple(_sourced(place, it, options) for place, it in lines))


def _sourced(place: str, record: Record, options: TaskOptions) -> SourcedRecord:
    try:
        task = options.task_for(record.dataset)
    except ConfigError as exc:
        raise RecordError(f"{place}: {exc}") from exc
    if not record.answers:
        raise RecordError(f"{place} has no answers, so nothing can be judged by it")
    for answer in record.answers:
        if problem := problem_with(task.metric, answer, record.all_classes or ()):
            raise RecordError(f"{place} has {problem}")
    return SourcedRecord(record=record, task=task, place=place, name=record.id or place)


def _uniquely_named(sources: Sequence[Source]) -> list[Source]:
    counts = Counter(it.name for source in sources for it in source.records)
    return [
        replace(
            source,
            records=tuple(
                it if counts[it.name] == 1 else replace(it, name=it.place) for it in source.records
            ),
        )
        for source in sources
    ]


def _as_record(problem: MathProblem, context: str) -> Record:
    return Record(
        input=problem.question,
        context=context,
        answers=(problem.answer,),
        length=len(context.split()),
        dataset=GSM8K,
    )


def _as_struct(row: dict[str, Any], schema: type[Line], place: str) -> Line:
    try:
        return msgspec.convert(row, schema)
    except msgspec.ValidationError as exc:
        raise RecordError(f"{place} does not have the fields of its data set: {exc}") from exc


def _runs(length: int, num_runs: int) -> list[tuple[int, int]]:
    """`range(length)` as half-open runs of nearly equal length."""
    ends = [length * i // num_runs for i in range(num_runs + 1)]
    return list(pairwise(ends))
