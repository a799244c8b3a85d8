"""Load the documents that the settings name: for choosing plans, for fitting maps of E, for judging
plans, and for the smaller model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cachetree import ConfigError, ProfileError
from profiles.compute.fitting import NUM_FITTED
from profiles.compute.models import ModelSource, load_tokenizer, look_at, look_at_pair
from profiles.data.datasets import Source, load_sources
from profiles.data.documents import (
    Document,
    by_task,
    common_contexts,
    data_files,
    first_of_each_task,
    in_drawn_order,
    make_documents,
    split_documents,
)
from profiles.data.logs import documents_of, read_logs
from profiles.data.metrics import Metric
from profiles.data.tasks import Task, TaskOptions
from profiles.evidence import read_measured
from profiles.settings import LOG, Settings
from profiles.stats.artifact import Data
from profiles.stats.gate import contexts_needed


def load_splits(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, positions: int
) -> tuple[Data, Data]:
    """Load training documents, which choose plans, and held-out documents, which judge plans.

    Raises ConfigError if a context is in both, or a task has no held-out context.
    """
    sources, train = load_documents(settings, settings.data, tokenizer, positions)
    judged_sources, notes = sources, {it.note for it in sources}
    if settings.held_out:
        judged_sources, held_out = load_documents(settings, settings.held_out, tokenizer, positions)
    else:
        train, held_out = split_as_before(train, settings) or split_documents(
            train, held_out_share=settings.held_out_share, seed=settings.seed
        )
    train, held_out = (in_drawn_order(it, settings.seed) for it in (train, held_out))
    _require_apart(train, held_out, "in --data and in --held-out")
    if unjudged := {it.task.name for it in train} - {it.task.name for it in held_out}:
        raise ConfigError(
            f"no held-out context is of {', '.join(sorted(unjudged))}; give some of each task"
        )
    notes |= {it.note for it in judged_sources}
    return (
        Data(files=data_files(sources, train), documents=train, notes=sorted(notes - {""})),
        Data(files=data_files(judged_sources, held_out), documents=held_out),
    )


def split_as_before(
    documents: Sequence[Document], settings: Settings
) -> tuple[list[Document], list[Document]] | None:
    """Split documents so that contexts which chose the plans of the profile at `settings.out` do so
    again, and all others judge. If data were split anew when some are added, contexts that have
    chosen plans would judge them.

    Return None if the file has no profile of these models, seed and held-out share, or the
    documents lack one of its contexts or have no others.
    """
    if settings.out is None or not settings.out.is_file():
        return None
    try:
        earlier = read_measured(settings.out)
    except ProfileError:
        return None
    made, models = earlier.made, tuple(it.identity for it in look_at_pair(*settings.pair))
    chose = {*earlier.train.contexts}
    train = [it for it in documents if it.names & chose]
    is_same = (earlier.sender, earlier.receiver) == models
    is_same &= (made.seed, made.held_out_share) == (settings.seed, settings.held_out_share)
    if not is_same or len(train) == len(documents) or chose.difference(*(it.names for it in train)):
        return None
    return train, [it for it in documents if not it.names & chose]


def load_fitted_on(
    settings: Settings,
    train: Data,
    held_out: Data,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
) -> Sequence[Document]:
    """Load documents on which to fit the maps that correct E: at most `NUM_FITTED` of each task, of
    `--fit-data` or else of the training data. Raises ConfigError if `--fit-data` has a held-out
    context."""
    documents = train.documents
    if settings.fit_data:
        _, documents = load_documents(settings, settings.fit_data, tokenizer, positions)
        documents = in_drawn_order(documents, settings.seed)
        _require_apart(documents, held_out.documents, "in --fit-data and among those that judge")
    return [documents[it] for it in first_of_each_task(documents, NUM_FITTED)]


def load_held_out_of_small(settings: Settings, held_out: Data) -> list[Document]:
    """Load held-out questions in the smaller model's tokens; empty without a smaller model."""
    if settings.small is None:
        return []
    model = look_at(ModelSource(path=settings.small))
    tokenizer, positions = load_tokenizer(model.source), model.config.max_position_embeddings
    names = {question.name for it in held_out.documents for question in it.questions}
    specs = settings.held_out or settings.data
    _, documents = load_documents(settings, specs, tokenizer, positions)
    return [it for it in documents if it.questions[0].name in names]


def with_answers_of(judged: Sequence[Document], documents: Sequence[Document]) -> list[Document]:
    """Return the documents with the accepted answers of `judged`: the same questions, in the tokens
    of another model."""
    answers = {question.name: question.answers for it in judged for question in it.questions}
    return [
        replace(it, questions=tuple(replace(of, answers=answers[of.name]) for of in it.questions))
        for it in documents
    ]


def hardly_enough(held_out: Data, tolerance: float) -> Iterator[str]:
    """Yield a warning for each task that has too few contexts to prove a plan without any loss."""
    needed = contexts_needed([[1.0]], [[1.0]], tolerance) or 0
    for task, places in by_task(held_out.documents).items():
        if len(places) < needed:
            yield (
                f"{len(places)} held-out contexts of {task.name or 'the data'} are hardly enough "
                f"to pass: a plan that loses nothing needs about {needed}, divided by full "
                "prefill's quality; give more data"
            )


def load_documents(
    settings: Settings, specs: Sequence[str], tokenizer: PreTrainedTokenizerBase, positions: int
) -> tuple[list[Source], list[Document]]:
    """Load the sources that the values `specs` of `--data` name, and make documents of them. Cut
    prompts to the settings' limit, and to the model's number of positions."""
    logs = logs_in(specs)
    others = [it for it in specs if not it.startswith(LOG)]
    sources = load_sources(others, settings.options, data_dir=settings.data_dir)
    tasks = {it.task for source in sources for it in source.records}
    if logs:
        tasks.add(asked := _task_of_log(settings.options))
    longest = max(it.max_new for it in tasks)
    if longest >= positions:
        raise ConfigError(
            f"answers of {longest} tokens leave no room for prompts in the model's {positions} "
            "positions; give a smaller --max-new"
        )
    most = min(settings.max_prompt_tokens or positions, positions - longest)
    cut = {"page_size": settings.page_size, "max_prompt_tokens": most}
    documents = make_documents(sources, tokenizer, **cut)
    if logs:
        read = read_logs(logs, tokenizer)
        of_logs, loaded = documents_of(read, asked, settings.asked_of, tokenizer, **cut)
        sources, documents = [*sources, *of_logs], [*documents, *loaded]
    return sources, documents


def logs_in(specs: Iterable[str]) -> list[Path]:
    """Return the paths of the request logs among values of `--data`."""
    return [Path(it.removeprefix(LOG)) for it in specs if it.startswith(LOG)]


def _task_of_log(options: TaskOptions) -> Task:
    """Return the task for a log's prompts, which need no template and have no right answers."""
    if options.metric not in (None, Metric.SAME) or options.template or options.chat:
        raise ConfigError(
            "a request log has whole prompts without gold answers; leave out --template, --chat "
            "and any --metric but same"
        )
    return replace(options, template="{context}{input}", metric=Metric.SAME).task_for("")


def _require_apart(documents: Sequence[Document], judging: Sequence[Document], where: str) -> None:
    if shared := common_contexts(documents, judging):
        raise ConfigError(
            f"{len(shared)} contexts are both {where}; plans have to be judged on others than they "
            "were chosen and fitted on"
        )
