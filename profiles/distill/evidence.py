"""Evidence about a distilled adapter: `distilled.json` in its folder."""

from __future__ import annotations

import msgspec

from profiles.evidence import Interval, TaskLoss


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of a held-out context after `step` training steps, one per question."""

    step: int
    place: int
    quality: tuple[float, ...]
    same: tuple[float, ...] = ()
    """Values by question: 1 if the student's answer equals the teacher's, else 0. Empty without a
    teacher."""
    kl: tuple[float, ...] = ()
    """KL divergence of the teacher's next tokens from the student's along the teacher's answer, in
    nats per token."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Mean scores of the first held-out contexts after `step` training steps."""

    step: int
    quality: float
    agreement: float | None
    kl: float | None


class JudgedTask(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the held-out contexts of one data set."""

    name: str
    metric: str
    num_contexts: int
    num_questions: int
    student: Interval
    teacher: Interval | None
    loss: TaskLoss | None
    """Quality that the student loses against the teacher. None without a teacher."""
    agreement: float | None
    kl: float | None


class Distilled(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, its recipe, and its verdict."""

    base: str
    """Model id of the base."""
    teacher: str | None
    learned_from: str
    invocation: str
    invocation_tokens: tuple[int, ...]
    num_contexts: int
    """Number of contexts that the adapter learned from."""
    num_questions: int
    steps: int
    rank: int
    tasks: tuple[JudgedTask, ...]
    num_shown: int
    """Number of held-out contexts behind each point of the curve."""
    curve: tuple[CurvePoint, ...]
    tolerance: float
    passed: bool | None
    """Whether the gate passed the adapter. None without a teacher to compare with."""
    reason: str
    command: str
    versions: dict[str, str]
    date: str
