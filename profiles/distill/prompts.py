"""Load prompts for a distillation, and cut each at its invocation, from which on the adapter acts.

    document                        the same for all questions about it   ┐ the base's KV,
    question up to the invocation   none if the invocation precedes it    ┘ without gradient
    invocation, rest of the prompt  the adapter acts

A server and PEFT look for the invocation's tokens in the whole prompt, and take the last match. So
in every prompt the last match must be where the template has the invocation, in text and in tokens.
Any other prompt is refused, with its line in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachetree import ConfigError
from profiles.data.datasets import Source, SourcedRecord
from profiles.data.documents import Document, Encoder, Tokens, make_documents
from profiles.data.metrics import problem_with
from profiles.data.records import Record, RecordError, read_lines
from profiles.data.tasks import Task, TaskOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT, _INPUT = "\ue000", "\ue001"
"""Placeholders of a record's `context` and `input` in a prompt. No text has these characters."""
ANSWER: Final = "answer"
QUESTION: Final = "question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A document and its questions, with the beginning of each question's invocation."""

    document: Document
    num_invoked: tuple[int, ...]
    """Number of tokens of each question's suffix from the start of the invocation to the end."""

    def before(self, question: int) -> Tokens:
        """Tokens between the document and the invocation."""
        return self.document.questions[question].suffix[: -self.num_invoked[question]]

    def after(self, question: int) -> Tokens:
        """Tokens from the start of the invocation to the end of the prompt."""
        return self.document.questions[question].suffix[-self.num_invoked[question] :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    text: str
    ids: Tokens
    follows_input: bool
    """True if the invocation is after the question (the record's `input`), False if before it."""


def load_prompts(paths: Sequence[str], options: TaskOptions) -> list[Source]:
    """Load records with or without answers. Raises RecordError and ConfigError."""
    sources = []
    for path in map(Path, paths):
        records = []
        for place, record in read_lines(path, Record, "prompt with context and input"):
            task = options.task_for(record.dataset)
            for answer in record.answers:
                if problem := problem_with(task.metric, answer, record.all_classes or ()):
                    raise RecordError(f"{place} has {problem}")
            records.append(SourcedRecord(record=record, task=task, place=place, name=place))
        sources.append(Source(name=path.name, records=tuple(records)))
    return sources


def lessons_of(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    invocation: Invocation,
    max_prompt_tokens: int,
) -> list[Lesson]:
    """Make a lesson for every context: its questions, with the token from which the adapter acts.
    Raises RecordError for a prompt in which a server might find another token."""
    records = {it.name: it for source in sources for it in source.records}
    documents = make_documents(sources, tokenizer, page_size=1, max_prompt_tokens=max_prompt_tokens)
    lessons = []
    for document in documents:
        encode = Encoder(tokenizer, document.task.chat)
        around = _around(document.task, encode)
        num_invoked = []
        for question in document.questions:
            record = records[question.name]
            invoked = _invoked(record, encode, invocation, around)
            ids = *document.prefix, *question.suffix
            begin = last_match(ids, invocation.ids)
            if begin < len(document.prefix) or not _is_text(encode.text_of(ids[begin:]), invoked):
                raise RecordError(_joined(record, invocation))
            num_invoked.append(len(ids) - begin)
        lessons.append(Lesson(document=document, num_invoked=tuple(num_invoked)))
    return lessons


def find_invocation(
    stated: str | None, first: SourcedRecord, tokenizer: PreTrainedTokenizerBase
) -> Invocation:
    """Find the stated invocation, or the default one, and its tokens in the first prompt.

    Raises ConfigError if the invocation is empty, its ids are not in the vocabulary, or the
    template does not have it after the context.
    """
    task, encode = first.task, Encoder(tokenizer, first.task.chat)
    between, behind = _around(task, encode)
    wanted = stated or (ANSWER if task.chat else QUESTION)
    if wanted == ANSWER:
        header = _header(encode) if task.chat else behind
        texts = ("", header)
    elif wanted == QUESTION:
        texts = (between, "")
    else:
        text = _text_of(wanted, tokenizer)
        texts = (text if text in between else "", text if text in behind else "")
        if not any(texts):
            raise ConfigError(
                f"--invocation {wanted!r} is not in the template after the context; give a part of "
                f"{between!r} or {behind!r}"
            )
    text = texts[1] or texts[0]
    if not text:
        raise ConfigError(
            f"the invocation has no tokens, because the template has no text before the {wanted}; "
            "write one into --template, or name another place by --invocation"
        )
    invocation = Invocation(text=text, ids=(), follows_input=bool(texts[1]))
    prompt = encode.text(task.prompt(first.record.context, first.record.input))
    rest = _invoked(first, encode, invocation, (between, behind)).removeprefix(text)
    # A tokenizer may look ahead: two new lines before a word are two tokens, and one at the end.
    ids, alone = encode.ids(prompt), encode.ids(text, begins=False)
    stop = len(ids) - len(encode.ids(rest, begins=False))
    begins = range(max(0, stop - 4 * len(text)), stop)
    for form in (str, str.strip):
        for begin in begins:
            if form(text) and form(encode.text_of(ids[begin:stop])) == form(text):
                return replace(invocation, ids=ids[begin:stop])
    return replace(invocation, ids=alone)


def ending_in_space(sources: Iterable[Source]) -> list[str]:
    """Places of the records with white space at the end of their context."""
    records = (it for source in sources for it in source.records)
    return [it.place for it in records if it.record.context[-1:].isspace()]


def last_match(ids: Sequence[int], of: Sequence[int]) -> int:
    """Return the index at which the last match of `of` in `ids` begins; -1 without a match."""
    wanted = list(of)
    for start in range(len(ids) - len(wanted), -1, -1):
        if ids[start] == wanted[0] and list(ids[start : start + len(wanted)]) == wanted:
            return start
    return -1


def _is_text(decoded: str, text: str) -> bool:
    """True if decoded tokens are this text, apart from white space at the ends."""
    return decoded == text or (bool(text.strip()) and decoded.strip() == text.strip())


def _invoked(
    sourced: SourcedRecord, encode: Encoder, invocation: Invocation, around: tuple[str, str]
) -> str:
    """Return a prompt's text from its invocation on. Raises RecordError if the invocation's last
    match is not where the template has it."""
    prompt = encode.text(sourced.task.prompt(sourced.record.context, sourced.record.input))
    between, behind = around
    start = len(prompt) - len(behind)
    if invocation.follows_input:
        start += behind.rindex(invocation.text)
    else:
        start += between.rindex(invocation.text) - len(sourced.record.input) - len(between)
    if not prompt.startswith(invocation.text, start):
        raise RecordError(
            f"{sourced.place}: the prompt does not have the invocation {invocation.text!r} where "
            "the template has it; strip white space at the ends of context and input"
        )
    if prompt.rfind(invocation.text) != start:
        raise RecordError(
            f"{sourced.place}: the invocation {invocation.text!r} is in the prompt again after its "
            "place, and the adapter acts from the last one; take it out of the input, or give "
            "another --invocation"
        )
    return prompt[start:]


def _around(task: Task, encode: Encoder) -> tuple[str, str]:
    """Return the template's text between the context and the question (the record's `input`), and
    its text behind the question."""
    _, _, rest = encode.text(task.prompt(_CONTEXT, _INPUT)).partition(_CONTEXT)
    between, match, behind = rest.partition(_INPUT)
    if not match or _INPUT in behind:
        raise ConfigError(f"template {task.template!r} has no {{input}} or has it twice")
    return between, behind


def _header(encode: Encoder) -> str:
    """Text that a chat template adds before the answer."""
    message = [{"role": "user", "content": _INPUT}]
    return encode.text(_INPUT).removeprefix(
        encode.tokenizer.apply_chat_template(message, tokenize=False)
    )


def _text_of(stated: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the invocation's text, which the user states as text or as token ids with commas."""
    if not all(it.strip().isdecimal() for it in stated.split(",")):
        return stated
    ids = [int(it) for it in stated.split(",")]
    if outside := [it for it in ids if it >= len(tokenizer)]:
        raise ConfigError(
            f"--invocation has the id {outside[0]}, and the base's vocabulary has "
            f"{len(tokenizer)} tokens; give ids below that"
        )
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _joined(sourced: SourcedRecord, invocation: Invocation) -> str:
    ends = sourced.record.context[-1:].isspace()
    why = "its context ends in white space, which joins" if ends else "the text before it joins"
    return (
        f"{sourced.place}: {why} the tokens of the invocation {invocation.text!r}, so that the "
        "adapter would not act there; "
        f"{'strip the context' if ends else 'give another --invocation'}"
    )
