"""Read prompts from a server's request log, and group them into documents that several prompts
share.

    SGLang     --log-requests --log-requests-level 3 --log-requests-format json; only the event
               `request.received` is read: it has the text, or the tokens of an OpenAI request
    a JSONL    requests of the OpenAI API, with `messages` or `prompt`, bare or as a batch's `body`

Prompts that begin alike are one context. They are split further if most of them share clearly more
with another prompt than all of them share. So a system prompt before hundreds of documents is no
context. A few equal tokens at the start of two questions do not split a context.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cachetree import ConfigError
from profiles.data.datasets import Source, SourcedRecord
from profiles.data.documents import Document, Encoder, Question, Tokens, common_start, in_pages
from profiles.data.records import Record, RecordError
from profiles.data.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASE: Final = "base"
"""Name of the model in log lines that name none. It is the base of a server's adapters."""
_RECEIVED: Final = "request.received"
_CUT: Final = 2048
"""Characters or tokens of the longest prompt that SGLang logs in full at log level 2."""
_REMEDY: Final = "serve with --log-requests-level 3 --log-requests-format json"
_AS_TEXT: Final = "is logged in SGLang's text format"
_NO_TEXT: Final = "has no text at this --log-requests-level"
_IS_CUT: Final = "is cut in the middle at this --log-requests-level"
_NO_PROMPT: Final = "is no prompt of text alone"
SLACK: Final = 8
"""Two prompts of a context may share a few tokens behind it: a page, or the context's length over
this number if that is more. At least half of the prompts must share no more."""


class _Unusable(Exception):
    """Reason why a line of a log has no usable prompt."""


class _Part(msgspec.Struct, frozen=True):
    text: str | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that decide its prompts. SGLang writes `...` for tokens that it cuts."""

    text: str | list[str] | None = None
    input_ids: list[int | str | list[int | str]] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    messages: list[_Message] | None = None
    model: str | None = None
    lora_path: str | list[str | None] | None = None
    rid: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    image_data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt of a log."""

    ids: Tokens
    model: str
    place: str
    """Place of the prompt: `file:line`. If the line has several prompts, also the prompt's
    number."""
    number: int = 0
    """Number of the prompt among all prompts of the logs. Prompts with smaller numbers were asked
    earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Prompts that were read from a log, and its lines that could not be used."""

    name: str
    asked: tuple[Asked, ...]
    unusable: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Prompts of a log that begin with the same tokens."""

    num_shared: int
    """Number of tokens that all prompts of the context begin with."""
    asked: tuple[Asked, ...]
    """Prompts sorted by their tokens. A prompt that a model was asked again occurs only once."""


def read_logs(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> list[Log]:
    """Read all prompts of request logs, given as files or as folders of files. Each file is a log,
    and an earlier one has earlier prompts. Raises RecordError if a file is given twice, or with the
    reason if a path has no usable prompt."""
    try:
        return _read_all(paths, tokenizer)
    except OSError as exc:
        raise RecordError(f"request log {exc.filename} cannot be read: {exc.strerror}") from exc


def _read_all(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> list[Log]:
    of_paths = [_files_in(it) for it in paths]
    files = [*chain(*of_paths)]
    for file, times in Counter(it.resolve() for it in files).items():
        if times > 1:
            raise RecordError(f"request log {file} is given more than once; give it once")
    names, numbers, logs = Counter(it.name for it in files), count(), list[Log]()
    for path, of_path in zip(paths, of_paths, strict=True):
        read = [_read(it, it.name if names[it.name] == 1 else str(it), tokenizer) for it in of_path]
        if not any(it.asked for it in read):
            unusable = sum((it.unusable for it in read), Counter[str]())
            why = max(unusable, key=unusable.__getitem__, default="")
            what = f"each request {why}" if why else "no line is a request"
            raise RecordError(f"request log {path} has no prompt, as {what}; {_REMEDY}")
        logs += read
    return [
        replace(log, asked=tuple(replace(it, number=next(numbers)) for it in log.asked))
        for log in logs
    ]


def _files_in(path: Path) -> list[Path]:
    """Return the files of a folder by name. SGLang adds the hour to the names of older files, so
    the newest one is still `NAME.log`, and is last."""
    files = filter(Path.is_file, path.iterdir()) if path.is_dir() else [path]
    return sorted(files, key=lambda it: (it.suffix == ".log", it.name))


def _read(path: Path, name: str, tokenizer: PreTrainedTokenizerBase) -> Log:
    prompts, unusable = list[Asked](), Counter[str]()
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                prompts += [*_asked_in(line, f"{name}:{number}", tokenizer)]
            except _Unusable as exc:
                unusable[str(exc)] += 1
    return Log(name=name, asked=tuple(prompts), unusable=unusable)


def contexts_of(asked: Iterable[Asked], page_size: int) -> list[Context]:
    """Group prompts that begin alike, sorted by their tokens. Left out are prompts that share less
    than a page with every other prompt, and repeated prompts of one model."""
    first = {(it.ids, it.model): it for it in reversed([*asked])}
    ordered = [first[it] for it in sorted(first)]
    shares = [0, *(_num_shared(*pair) for pair in pairwise(ordered)), 0]
    contexts, rest = list[Context](), [(0, len(ordered))]
    while rest:
        start, stop = rest.pop()
        if stop - start < 2:
            continue
        inside = shares[start + 1 : stop]
        shared = min(inside)
        near = shared + max(page_size, shared // SLACK)
        most = [max(pair) for pair in pairwise([0, *inside, 0])]
        if shared >= page_size and 2 * sum(it <= near for it in most) >= stop - start:
            contexts.append(Context(num_shared=shared, asked=tuple(ordered[start:stop])))
        else:
            cuts = [start, *(it for it in range(start + 1, stop) if shares[it] == shared), stop]
            rest += reversed([*pairwise(cuts)])
    return contexts


def _num_shared(one: Asked, other: Asked) -> int:
    """Number of equal tokens at the start of both prompts. The last token of each prompt does not
    count, because a request has to compute at least one token."""
    return min(len(common_start([one.ids, other.ids])), len(one.ids) - 1, len(other.ids) - 1)


def documents_of(
    logs: Sequence[Log],
    task: Task,
    asked_of: str | None,
    tokenizer: PreTrainedTokenizerBase,
    page_size: int,
    max_prompt_tokens: int | None,
) -> tuple[list[Source], list[Document]]:
    """Make documents of the contexts of all logs together, from the prompts of one model or of all.
    Return them behind the source of each log. Raises RecordError."""
    contexts = contexts_of((it for log in logs for it in log.asked), page_size)
    opening = len(common_start(it.asked[0].ids[: it.num_shared] for it in contexts))
    encode = Encoder(tokenizer, chat=True)
    records, documents = dict[int, SourcedRecord](), list[Document]()
    starts = [starts_of(it, page_size) for it in contexts]
    has_start = Counter(it for of_context in starts for it in of_context)
    for group, near in zip(contexts, starts, strict=True):
        chosen = {of.ids: of for of in group.asked if asked_of in (None, of.model)}
        if not chosen:
            continue
        first = group.asked[0]
        shared = first.ids[: group.num_shared]
        least = shorter(group.num_shared, page_size)
        first_near = shorter(least, page_size) // page_size - 1
        own = (it for it in near[least // page_size - 1 :] if has_start[it] == 1)
        questions = tuple(
            Question(suffix=ids, draft=(), answers=(), name=of.place) for ids, of in chosen.items()
        )
        whole = Document(
            context=next(own, near[-1]),
            prefix=(),
            questions=questions,
            task=task,
            opening=opening if len(contexts) > 1 else 0,
            tail=group.num_shared,
            near=tuple(near[first_near:]),
        )
        documents.append(in_pages(whole, page_size, max_prompt_tokens, first.place))
        context = encode.text_of(shared)
        records |= {
            of.number: SourcedRecord(
                record=Record(context=context, input=encode.text_of(of.ids[group.num_shared :])),
                task=task,
                place=of.place,
                name=of.place,
            )
            for of in chosen.values()
        }
    note = said_of(logs, contexts, documents)
    sources = []
    for log in logs:
        of_log = tuple(records[it.number] for it in log.asked if it.number in records)
        sources.append(Source(name=log.name, records=of_log, note=note))
    if len(documents) < 2:
        raise RecordError(f"{note}: too few contexts to choose on one and judge on another")
    return sources, documents


def shorter(num_shared: int, page_size: int) -> int:
    """Return the number of tokens that a context of `num_shared` tokens has at least in another
    log. All questions of a log may begin alike, and so count to its context. At least a page."""
    return max(page_size, num_shared - max(page_size, num_shared // SLACK))


def starts_of(context: Context, page_size: int) -> list[str]:
    """Return the digests of a context's starts in whole pages, shortest first.

    A document's `context` is the first start of at least `shorter` tokens that begins no other
    context. Its `near` are the starts that other logs may choose. Let two logs know n and m tokens
    of a context, and n ≤ m. All tokens but a few behind them are equal, and `shorter(m)` ≤ n. So

        shorter(m)   is at least shorter(n), and at most n
        shorter(n)   is at least shorter(shorter(m)), and at most m
    """
    shared, digest, starts = context.asked[0].ids[: context.num_shared], hashlib.sha256(), []
    for stop in range(page_size, context.num_shared + 1, page_size):
        digest.update(msgspec.json.encode(shared[stop - page_size : stop]))
        starts.append(digest.hexdigest()[:16])
    return starts


def said_of(logs: Sequence[Log], contexts: Sequence[Context], documents: Sequence[Document]) -> str:
    """Say in a sentence how many prompts of the logs share a context."""
    num_sharing = sum(len(it.asked) for it in contexts)
    num_asked = sum(len(it.asked) for it in logs)
    name = logs[0].name if len(logs) == 1 else f"{len(logs)} logs"
    said = [f"{name}: {num_asked} prompts"]
    if documents:
        sizes = sorted(len(it.questions) for it in documents)
        lengths = sorted(len(it.prefix) + it.tail for it in documents)
        said.append(
            f"{len(documents)} contexts of {lengths[0]} to {lengths[-1]} tokens "
            f"({round(median(lengths))} in the median) with {_range(sizes)} each"
        )
    else:
        said.append("no context that is shared by two different ones")
    if alone := num_asked - num_sharing:
        said.append(f"left out, as they repeat another or share less than a page: {alone}")
    unusable = sum((it.unusable for it in logs), Counter[str]())
    said += [f"{number} of which each {why}" for why, number in unusable.items()]
    return "; ".join(said)


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]} prompts" if sizes[0] < sizes[-1] else f"{sizes[0]} prompts"


def _asked_in(line: str, place: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Asked]:
    if "Receive: obj=" in line:
        raise _Unusable(_AS_TEXT)
    try:
        event = msgspec.json.decode(line[max(0, line.find("{")) :].strip())
        if isinstance(event, dict) and event.get("event", _RECEIVED) == _RECEIVED:
            request = event.get("obj" if "event" in event else "body", event)
            yield from _asked_of(msgspec.convert(request, _Request), place, tokenizer)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _Unusable(f"is no request: {re.sub(r'[0-9]+', '…', str(exc))}") from exc
    except msgspec.DecodeError:
        return  # The line is no JSON.


def _asked_of(request: _Request, place: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Asked]:
    forms = request.text, request.input_ids, request.prompt, request.messages
    prompts: Sequence[Any] | None = next(filter(None, forms), None)
    if prompts is None:
        if request.rid is not None:
            raise _Unusable(_NO_TEXT)
        return
    if request.tools or request.chat_template_kwargs or request.image_data:
        raise _Unusable(_NO_PROMPT)
    if isinstance(prompts, str) or isinstance(prompts[0], int | _Message):
        prompts = [prompts]
    adapters = request.lora_path
    if not isinstance(adapters, list):
        adapters = [adapters] * len(prompts)
    if len(adapters) != len(prompts):
        raise _Unusable("names adapters for another number of prompts")
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        yield Asked(
            ids=_ids_of(prompt, tokenizer),
            model=adapter or (request.model or BASE).rpartition(":")[2],
            place=place if number == 0 else f"{place}:{number + 1}",
        )


def _ids_of(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    if isinstance(prompt, str):
        if len(prompt) == _CUT + 3 and prompt[_CUT // 2 :].startswith("..."):
            raise _Unusable(_IS_CUT)
        return Encoder(tokenizer, chat=False).ids(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise _Unusable(_NO_PROMPT)
    if isinstance(prompt[0], _Message):
        encode = Encoder(tokenizer, chat=True)
        try:
            return encode.ids(encode.of_chat(_messages_of(prompt)))
        except ConfigError as exc:
            raise _Unusable(f"is a chat without a prompt: {exc}") from exc
    if "..." in prompt:
        raise _Unusable(_IS_CUT)
    if {*map(type, prompt)} != {int}:
        raise _Unusable(_NO_PROMPT)
    for token in min(prompt), max(prompt):
        if not 0 <= token < len(tokenizer):
            raise _Unusable(f"has the token {token}, which the receiver's tokenizer lacks")
    return tuple(prompt)


def _messages_of(messages: Iterable[_Message]) -> list[dict[str, str]]:
    """Join the text parts of each message as SGLang does."""
    texts = []
    for message in messages:
        content = message.content
        parts = [content] if isinstance(content, str) else [of.text for of in content or ()]
        if not parts or None in parts or message.tool_calls:
            raise _Unusable(_NO_PROMPT)
        texts.append({"role": message.role, "content": " ".join(parts)})
    return texts
