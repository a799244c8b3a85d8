# ruff: noqa: RUF009  # The calls there make fields.
"""Goal and recipe of a distillation: the flags of `droidspeak distill`, by these names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachetree import ConfigError
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from profiles.settings import flag, require, same

if TYPE_CHECKING:
    from profiles.compute.models import ModelSource

LABELS: Final = ("only", "both")
_models, _data, _training = (partial(flag, it) for it in ("models", "data", "training"))
_AT_LEAST_ONE: Final = ("steps", "rank", "questions")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """Goal and recipe of a distillation. Raises ConfigError for impossible settings."""

    base: Path | None = _models(
        None, "checkpoint that the adapter is made for, and shares KV with", "PATH"
    )
    adapter: Path | None = _models(None, "teacher: a PEFT LoRA on the base", "PATH")
    teacher: Path | None = _models(None, "teacher: a checkpoint, such as a fine-tune", "PATH")
    dtype: str = same("dtype", "models")
    device: str = same("device", "models")

    data: tuple[str, ...] = _data(
        (),
        "JSONL; each line has context and input, and answers if there are any; may be given "
        "several times",
        "FILE",
    )
    held_out: tuple[str, ...] = _data(
        (), "data of the same form to judge on; default: a share of the contexts of --data", "FILE"
    )
    held_out_share: float = _data(0.2, "share of the contexts of --data to judge on", "X")
    template: str | None = same("template", "data")
    chat: bool = same("chat", "data")
    metric: str | None = _data(
        None,
        "metric of quality; default: the data set's own, or f1",
        choices=[it.value for it in Metric],
    )
    max_new: int | None = same("max_new", "data")
    max_prompt_tokens: int | None = same("max_prompt_tokens", "data")
    invocation: str | None = _data(
        None,
        "text from which on the adapter acts: `answer` (the text between input and answer), "
        "`question` (the text between context and input), another text of the template, or "
        "token ids with commas; default: answer with --chat, else question",
        "TEXT",
    )

    out: Path | None = flag("out", None, "folder of the adapter", "FOLDER")
    command: str = ""

    labels: str | None = _training(
        None,
        "learn from the data's answers only, or with `both` also from the teacher's "
        "distributions at these answers; default: learn from the teacher's own answers",
        choices=LABELS,
        nargs="?",
        const="only",
    )
    steps: int = _training(200, "number of training steps; each step is one document", "N")
    questions: int = _training(8, "most questions about a document in one step", "N")
    rank: int = _training(32, "rank of the adapter; its alpha is the same", "N")
    rate: float | None = _training(
        None, "peak of the learning rate; default: 5e-4 from a teacher, 1e-3 from labels only", "X"
    )
    seed: int = _training(
        0, "seed of the split, of the order, and of the adapter's first weights", "N"
    )
    max_disk_gb: float = _training(
        8, "most disk space for the documents' KV, which is kept until the end", "GIB"
    )
    tolerance: float = same("tolerance", "training")

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.max_disk_gb >= 0, "max-disk-gb", self.max_disk_gb, "at least 0")
        require(self.rate is None or self.rate > 0, "rate", self.rate, "more than 0")
        for name in ("tolerance", "held_out_share"):
            value = getattr(self, name)
            require(0.0 < value < 1.0, name.replace("_", "-"), value, "between 0 and 1")
        if self.adapter is not None and self.teacher is not None:
            raise ConfigError("--adapter and --teacher are both given; there is one teacher")
        if self.source_of_teacher is None and self.labels != "only":
            raise ConfigError(
                "no teacher is given; name one by --adapter or --teacher, or learn from the data's "
                "answers alone by --labels"
            )

    @property
    def source_of_teacher(self) -> ModelSource | None:
        from profiles.compute.models import ModelSource

        if self.adapter is not None:
            return ModelSource(path=self.base, adapter=self.adapter)
        return None if self.teacher is None else ModelSource(path=self.teacher)

    @property
    def peak_rate(self) -> float:
        return self.rate or (1e-3 if self.labels == "only" else 5e-4)

    @property
    def options(self) -> TaskOptions:
        """Choices for the data. If the user gives a template and no metric, F1 compares answers."""
        metric = self.metric or (None if self.template is None else Metric.F1)
        stated = None if metric is None else Metric(metric)
        return TaskOptions(
            template=self.template, metric=stated, max_new=self.max_new, chat=self.chat
        )
