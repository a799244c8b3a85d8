"""Prompts as tokens: a reused prefix, a new suffix for each question, and the answers.

    template's text before the context    ┐
    context, its whole pages              ┘ prefix: reused
    context, its last incomplete page     ┐
    rest of the template, with the        │ suffix: new for every question
    question (the record's `input`)       ┘

Prompts are tokenised as a server tokenises text, special tokens included. Prompts of a chat are
tokenised as the OpenAI endpoint tokenises one message of a user. A tokenizer may join the end of
the context with the start of the question, so the shared prefix is found in tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec
from tqdm import tqdm

from cachetree import ConfigError
from profiles.data.datasets import Source, SourcedRecord
from profiles.data.records import RecordError, context_digest, records_sha256
from profiles.data.tasks import Task
from profiles.evidence import DataFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]

_BAR_DELAY_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    suffix: Tokens
    """Tokens after the reused prefix, up to the answer. There is at least one."""
    draft: Tokens
    """Guess of the answer: the first accepted answer and EOS, as far as they exist, at most the
    task's `max_new` tokens. A model decodes all right tokens of the guess in one pass."""
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    """Classes that an answer may name, if the data set has classes."""
    name: str
    """Name of the question's record: its `_id`. If it has none, or another record has the same one:
    its place, `file:line`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A context and all questions about it."""

    context: str
    """Digest of the context's text. For a context of a log: digest of its start, in tokens."""
    prefix: Tokens
    """Tokens that all prompts begin with, in whole pages. Never empty."""
    questions: tuple[Question, ...]
    task: Task
    opening: int = 0
    """Number of tokens of the prefix that precede the context."""
    tail: int = 0
    """Number of tokens of the context at the start of every suffix."""
    near: tuple[str, ...] = ()
    """Digests that another log may give the same context. Empty for a context of text records."""

    @property
    def names(self) -> frozenset[str]:
        """Return all digests that the context can have."""
        return frozenset((self.context, *self.near))


def common_contexts(documents: Iterable[Document], others: Iterable[Document]) -> set[str]:
    """Return the digests, in `others`, of contexts that `documents` have, too."""
    ours, theirs = [*documents], [*others]
    exact = {it.context for it in ours}
    near = exact.union(*(it.near for it in ours))
    return {it.context for it in theirs if it.context in near or exact & it.names}


def key_of(document: Document) -> str:
    """Digest of a document and its questions. Journals use it as the document's name."""
    return hashlib.sha256(msgspec.json.encode(document)).hexdigest()[:16]


def make_documents(
    sources: Iterable[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    page_size: int,
    max_prompt_tokens: int | None,
) -> list[Document]:
    """Make one document per context and task, in the order of their first records. Contexts that
    differ only in white space count as one, with the text of the first.

    If a prompt is longer than `max_prompt_tokens` (without the answer), its middle is cut out as
    LongBench does it: as many tokens stay at the start as at the end. The cut is in tokens, is
    inside the context, and is the same for all questions about the context.

    Raises RecordError naming a record, if its context is shorter than a page, or its prompt does
    not fit without any context. Raises ConfigError for a chat without a usable template.
    """
    groups: dict[tuple[Task, str], list[SourcedRecord]] = {}
    for source in sources:
        for sourced in source.records:
            groups.setdefault((sourced.task, context_digest(sourced.record.context)), []).append(
                sourced
            )
    bar = tqdm(groups.items(), desc="tokenizing", unit="context", delay=_BAR_DELAY_S, leave=False)
    return [
        _document(records, Encoder(tokenizer, task.chat), page_size, max_prompt_tokens)
        for (task, _), records in bar
    ]


def split_documents(
    documents: Sequence[Document], *, held_out_share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into those that choose plans and those that judge plans. Order is kept.

    No context is in both halves. `held_out_share` of each task's contexts judge. Tasks may have
    contexts in common, so the smallest task draws first. Equal arguments give equal splits. Raises
    ConfigError if no context could judge.
    """
    tasks = by_task(documents)
    is_held_out: dict[str, bool] = {}
    for task, indices in sorted(tasks.items(), key=lambda it: len(it[1])):
        contexts = list(dict.fromkeys(documents[it].context for it in indices))
        wanted = min(max(round(held_out_share * len(contexts)), 1), len(contexts) - 1)
        wanted -= sum(is_held_out.get(it, False) for it in contexts)
        new = [it for it in contexts if it not in is_held_out]
        num_held_out = min(max(wanted, 0), len(new))
        chosen = set(Random(f"{seed} {task.name}").sample(new, num_held_out))
        is_held_out |= {it: it in chosen for it in new}
    if not any(is_held_out.values()):
        raise ConfigError(
            f"{len(documents)} contexts of {len(tasks)} tasks cannot be split, because no task "
            "has two; give more data, or held-out data of its own"
        )
    return (
        [it for it in documents if not is_held_out[it.context]],
        [it for it in documents if is_held_out[it.context]],
    )


def in_drawn_order(documents: Sequence[Document], seed: int) -> list[Document]:
    """Return documents in a random order that depends on the seed: if a file is sorted by length,
    its first documents are all short. If documents are added or removed, the order of the others
    stays."""

    def drawn(document: Document) -> bytes:
        return hashlib.sha256(f"{seed} {document.context}".encode()).digest()

    return sorted(documents, key=drawn)


def by_task(documents: Sequence[Document]) -> dict[Task, list[int]]:
    """Group the documents by task: for each task, the indices of its documents."""
    places: dict[Task, list[int]] = {}
    for place, document in enumerate(documents):
        places.setdefault(document.task, []).append(place)
    return places


def mean_lengths(documents: Sequence[Document]) -> tuple[float, float]:
    """Mean number of tokens of the prefixes, and of the questions' suffixes, to a hundredth."""
    suffixes = [len(question.suffix) for it in documents for question in it.questions]
    return round(fmean(len(it.prefix) for it in documents), 2), round(fmean(suffixes), 2)


def first_of_each_task(documents: Sequence[Document], most: int) -> list[int]:
    """Indices of the first `most` documents of each task, ascending."""
    return sorted(place for places in by_task(documents).values() for place in places[:most])


def data_files(sources: Iterable[Source], documents: Iterable[Document]) -> tuple[DataFile, ...]:
    """Describe the files that these documents were made from: names, digests and numbers of
    questions."""
    used = {question.name for document in documents for question in document.questions}
    used_of = [(it.name, [at.record for at in it.records if at.name in used]) for it in sources]
    return tuple(
        DataFile(name=name, sha256=records_sha256(records), num_questions=len(records))
        for name, records in used_of
        if records
    )


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns prompts into text, and text into tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: bool

    def text(self, prompt: str) -> str:
        """Text of a prompt as a server tokenises it. Raises ConfigError."""
        return self.of_chat([{"role": "user", "content": prompt}]) if self.chat else prompt

    def of_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Text that the chat endpoint makes from messages. Raises ConfigError."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as exc:  # A template is a program and may raise anything.
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} cannot be used: {exc}"
            ) from exc

    def shared(self, sourced: SourcedRecord) -> tuple[str, str]:
        """Return two starts of a prompt: up to its context, and up to the context's end. In a chat
        white space at their ends is left out, because a template may strip it."""
        task, context = sourced.task, sourced.record.context
        if not self.chat:
            return task.opening, task.shared(context)
        said = task.shared(context).strip()
        before, match, _ = self.text(task.prompt(context, sourced.record.input)).partition(said)
        if not match:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path} changes the text of messages "
                f"({sourced.place}); --chat cannot be used with it"
            )
        return before + said.removesuffix(context.strip()), before + said

    def ids(self, text: str, *, begins: bool = True) -> Tokens:
        """Tokenise a text. If it begins a prompt, add the tokenizer's special tokens, unless a chat
        template has written them already."""
        is_special = begins and not self.chat
        return tuple(self.tokenizer(text, add_special_tokens=is_special, verbose=False).input_ids)

    def text_of(self, ids: Tokens) -> str:
        """Decode tokens to text, special tokens included."""
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _document(
    records: Sequence[SourcedRecord],
    encode: Encoder,
    page_size: int,
    max_prompt_tokens: int | None,
) -> Document:
    first, task, context = records[0], records[0].task, records[0].record.context
    texts = [encode.text(task.prompt(context, it.record.input)) for it in records]
    opening, shared = map(encode.ids, encode.shared(first))
    prompts = [encode.ids(it) for it in texts]
    questions = tuple(
        Question(
            suffix=prompt,
            draft=_draft(it, text, encode),
            answers=it.record.answers,
            classes=it.record.all_classes or (),
            name=it.name,
        )
        for it, text, prompt in zip(records, texts, prompts, strict=True)
    )
    whole = Document(
        context=context_digest(context),
        prefix=(),
        questions=questions,
        task=task,
        opening=len(common_start([opening, shared])),
        tail=len(common_start([shared, *prompts])),
    )
    return in_pages(whole, page_size, max_prompt_tokens, first.place)


def in_pages(
    whole: Document, page_size: int, max_prompt_tokens: int | None, place: str
) -> Document:
    """Move all whole pages of the context into the prefix. In `whole` the prefix is empty: each
    suffix is a whole prompt, and `tail` says how many tokens all prompts share."""
    prompts, num_shared = [it.suffix for it in whole.questions], whole.tail
    if max_prompt_tokens is not None:
        movable = range(whole.opening, num_shared)
        cut = _cut(max(map(len, prompts)), movable, max_prompt_tokens, place)
        prompts = [ids[: cut.start] + ids[cut.stop :] for ids in prompts]
        num_shared -= len(cut)
    num_reused = min(num_shared, min(map(len, prompts)) - 1) // page_size * page_size
    if num_reused <= 0:
        raise RecordError(
            f"{place}: the context and what precedes it are {num_shared} tokens, less than a "
            f"page of {page_size}, so nothing can be reused; leave the record out or take smaller "
            "pages"
        )
    pairs = zip(whole.questions, prompts, strict=True)
    return replace(
        whole,
        prefix=prompts[0][:num_reused],
        questions=tuple(replace(it, suffix=ids[num_reused:]) for it, ids in pairs),
        opening=min(whole.opening, num_reused),
        tail=num_shared - num_reused,
    )


def _cut(longest: int, movable: range, max_prompt_tokens: int, place: str) -> range:
    """Find the tokens to cut from every prompt, so that the longest has `max_prompt_tokens`.

    # [0, half)                  kept   half of max_prompt_tokens; more if the opening is long
    # [half, half + excess)      cut    inside `movable`: shared tokens behind the opening
    # [half + excess, longest)   kept   the other half; more if the question is long
    """
    excess = longest - max_prompt_tokens
    if excess <= 0:
        return range(0)
    if excess > len(movable):
        raise RecordError(
            f"{place}: the prompt has {longest - len(movable)} tokens beside the context's, more "
            f"than max_prompt_tokens {max_prompt_tokens}; raise it or leave the record out"
        )
    start = min(max(max_prompt_tokens // 2, movable.start), movable.stop - excess)
    return range(start, start + excess)


def _draft(sourced: SourcedRecord, prompt: str, encode: Encoder) -> Tokens:
    answer = next(iter(sourced.record.answers), "")
    if answer and not prompt[-1:].isspace() and not answer[:1].isspace():
        answer = f" {answer}"
    ids, eos = encode.ids(answer, begins=False), encode.tokenizer.eos_token_id
    return (*ids, *([] if eos is None else [eos]))[: sourced.task.max_new]


def common_start(prompts: Iterable[Tokens]) -> Tokens:
    """Return the tokens that all prompts begin with."""
    columns = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
    return tuple(ids[0] for ids in columns)
