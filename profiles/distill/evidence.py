"""What is known of an adapter that was distilled: `distilled.json` in its folder."""

from __future__ import annotations

import msgspec

from profiles.evidence import Interval, TaskLoss


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out context after so many steps, by question."""

    step: int
    place: int
    quality: tuple[float, ...]
    same: tuple[float, ...] = ()
    """1 if the answer is the teacher's, else 0; none without a teacher."""
    kl: tuple[float, ...] = ()
    """KL divergence of the teacher's next tokens from the student's along the teacher's answer,
    nats per token."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the first held-out contexts after so many steps."""

    step: int
    quality: float
    agreement: float | None
    kl: float | None


class JudgedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One data set of the held-out contexts."""

    name: str
    metric: str
    num_contexts: int
    num_questions: int
    student: Interval
    teacher: Interval | None
    loss: TaskLoss | None
    """What the student loses of the teacher's quality; None without a teacher."""
    agreement: float | None
    kl: float | None


class Distilled(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, how it was made, and how it is judged."""

    base: str
    """Model id."""
    teacher: str | None
    learned_from: str
    invocation: str
    invocation_tokens: tuple[int, ...]
    num_contexts: int
    """That it learned from."""
    num_questions: int
    steps: int
    rank: int
    tasks: tuple[JudgedTask, ...]
    num_shown: int
    """Held-out contexts of the curve."""
    curve: tuple[CurvePoint, ...]
    tolerance: float
    passed: bool | None
    """None without a teacher: there is nothing to compare with."""
    reason: str
    command: str
    versions: dict[str, str]
    date: str
