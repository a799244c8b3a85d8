"""Template, metric and length of the answer for each data set.

`tasks.json` has the known data sets. Prompts, metrics and lengths of the LongBench sets are those
that LongBench v1 publishes (`dataset2prompt.json`, `dataset2maxlen.json`, `eval.py`). The context
of GSM8K is worked examples (`datasets.few_shot`), each of which ends in a blank line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from string import Formatter
from typing import Final

import msgspec

from cachetree import ConfigError
from profiles.data.metrics import Metric, quality

DEFAULT_MAX_NEW: Final = 64
"""Length of an answer in tokens, for a data set without a task of its own."""
NEVER_CHAT: Final = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
"""Data sets of few-shot examples and code. LongBench's `pred.py` never puts them into a chat
template."""

_CODE_MARKS: Final = ("`", "#", "//")


class AnswerPart(StrEnum):
    """Part of a model's answer that is judged."""

    WHOLE = "whole"
    CODE_LINE = "code_line"
    """First line that is neither a comment nor a code fence, as in LongBench's `code_sim_score`.
    Empty if there is none."""
    FIRST_LINE = "first_line"
    """First line that is not empty. After few-shot examples, a model often writes further examples
    behind its answer."""
    BEFORE_NEXT_QUESTION = "before_next_question"
    """Text before the first further question that the model writes, as it often does after few-shot
    examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompt, metric and answer length of a data set. Raises ConfigError if the template is
    unusable or `max_new` is below 1."""

    name: str
    template: str
    """Text with `{context}` and then `{input}`. Prompts share it up to the end of `{context}`."""
    metric: Metric
    max_new: int
    """Longest answer in tokens."""
    chat: bool = False
    """True if a prompt is a user's message in the tokenizer's chat template."""
    answer_part: AnswerPart = AnswerPart.WHOLE

    def __post_init__(self) -> None:
        _parse(self.template)
        if self.max_new < 1:
            raise ConfigError(f"max_new is {self.max_new}; an answer needs at least 1 token")

    @property
    def opening(self) -> str:
        """Text of the template before the context."""
        return _parse(self.template)[0]

    def shared(self, context: str) -> str:
        """Text that all prompts about a context begin with: the template to the end of
        `{context}`."""
        return self.opening + context

    def prompt(self, context: str, question: str) -> str:
        _, rest = _parse(self.template)
        return self.shared(context) + question.join(rest)


def score(task: Task, text: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Quality of a model's answer, 0 to 1. `classes` are the classes of the data set."""
    return quality(task.metric, judged_part(task, text), answers, classes)


def judged_part(task: Task, text: str) -> str:
    return _PARTS[task.answer_part](text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The user's choices for all data sets. A field that is None leaves the choice to the data
    set."""

    template: str | None = None
    metric: Metric | None = None
    max_new: int | None = None
    chat: bool = False

    def task_for(self, dataset: str) -> Task:
        """Find the task of a data set. A set of LongBench-E (`hotpotqa_e`) has the task of the set
        without the suffix.

        Raises ConfigError if the data set is unknown and the user's choices do not complete a task.
        """
        known = TASKS.get(dataset.removesuffix("_e"))
        if known is None:
            if self.template is None or self.metric is None:
                raise ConfigError(
                    f"data set {dataset!r} is none of {', '.join(TASKS)}; say how it is asked and "
                    "judged by --template and --metric"
                )
            known = Task(
                name=dataset,
                template=self.template,
                metric=self.metric,
                max_new=DEFAULT_MAX_NEW,
            )
        stated = {"template": self.template, "metric": self.metric, "max_new": self.max_new}
        changes = {name: it for name, it in stated.items() if it is not None}
        is_bare = self.template is None and known.name in NEVER_CHAT
        return replace(known, **changes, chat=self.chat and not is_bare)


def _parse(template: str) -> tuple[str, list[str]]:
    """Split a template into three texts: before the context, between context and question, and
    behind the question."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as exc:
        raise _template_error(template, f"is malformed ({exc}); write {{{{ for a brace") from exc
    texts, fields = [""], list[str]()
    for literal, field, spec, conversion in pieces:
        texts[-1] += literal
        if field is not None:
            named = f"!{conversion}" if conversion else ""
            fields.append(field + named + (f":{spec}" if spec else ""))
            texts.append("")
    unknown = next((it for it in fields if it not in ("context", "input")), None)
    if unknown is not None:
        problem = f"has {{{unknown}}}; use {{context}} and {{input}}, and {{{{ for a brace"
    elif not fields:
        problem = "has no {context}; write where it goes, as in '<bos> {context} {input}'"
    elif fields[0] == "input":
        problem = (
            "has {input} before {context}; questions share only what precedes them, so put "
            "{context} first"
        )
    elif "context" in fields[1:]:
        problem = "has {context} twice; write it once"
    else:
        opening, *rest = texts
        return opening, rest
    raise _template_error(template, problem)


def _template_error(template: str, problem: str) -> ConfigError:
    return ConfigError(f"template {template!r} {problem}")


def _code_line(text: str) -> str:
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _CODE_MARKS)), "")


_PARTS: Final[Mapping[AnswerPart, Callable[[str], str]]] = {
    AnswerPart.WHOLE: lambda text: text,
    AnswerPart.CODE_LINE: _code_line,
    AnswerPart.FIRST_LINE: lambda text: text.lstrip("\n").partition("\n")[0],
    AnswerPart.BEFORE_NEXT_QUESTION: lambda text: text.partition("Question:")[0],
}

_ALL: Final = msgspec.json.decode(
    files(__package__).joinpath("tasks.json").read_bytes(), type=tuple[Task, ...]
)
TASKS: Final[Mapping[str, Task]] = {task.name: task for task in _ALL}
