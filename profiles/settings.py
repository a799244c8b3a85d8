# ruff: noqa: RUF009  # These calls make fields.
"""Settings: what to profile, and how. Most are flags of `droidspeak profile` with the same names.

This module imports torch only when it chooses a device, and transformers only for a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachetree import ConfigError
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from profiles.stats.choice import MOST_TRIED
from profiles.stats.gate import MOST_CONTEXTS

if TYPE_CHECKING:
    import argparse

    import torch

    from profiles.compute.models import ModelSource

DTYPES: Final = ("bfloat16", "float16", "float32")
"""Names of torch's dtypes."""
LOG: Final = "log:"
"""Prefix of a value of `data` that names a request log of a server."""
_TYPES: Final = {"int": int, "float": float, "str": str, "Path": Path}


def flag(group: str, default: Any, text: str, metavar: str | None = None, **rest: Any) -> Any:
    """Return a field that is also a flag. `text` is its help; other keywords go to argparse."""
    return field(
        default=default, metadata={"group": group, "help": text, "metavar": metavar, **rest}
    )


_models, _many, _data, _out, _choice = (
    partial(flag, it) for it in ("models", "many", "data", "out", "choice")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of `droidspeak profile`. Most fields are flags. Raises ConfigError for impossible
    values."""

    sender: Path | None = _models(
        None, "checkpoint of the model that reads first, and shares its cache", "PATH"
    )
    sender_lora: Path | None = _models(None, "PEFT adapter on the sender", "PATH")
    receiver: Path | None = _models(None, "checkpoint of the model that answers", "PATH")
    receiver_lora: Path | None = _models(None, "PEFT adapter on the receiver", "PATH")
    names: tuple[str, str] | None = None
    """Names of sender and receiver, if a run over several models has named them; no flag."""
    dtype: str = _models(
        "bfloat16",
        "number format, the same as in the servers, because rounding is part of the quality",
        choices=DTYPES,
    )
    device: str = _models("auto", "device; default: a GPU if there is one", "DEVICE")
    page_size: int = _models(
        16, "page size in tokens, the same as in the servers; only whole pages are reused", "N"
    )
    sender_device: str | None = _models(
        None,
        "device of the sender, if one device cannot hold both models; default: the receiver's",
        "DEVICE",
    )
    """Device of the sender. With two devices, KV and E move between them through the host's
    memory."""
    max_memory_gb: float | None = _models(
        None,
        "most host memory to use in addition to the models' weights; default: most of the "
        "free memory",
        "GIB",
    )
    max_device_memory_gb: float | None = _models(
        None,
        "most memory of each device to use in addition to the models' weights; default: "
        "most of the free memory",
        "GIB",
    )

    models: Path | None = _many(
        None,
        "YAML with NAME: {model: PATH, adapter: PATH, data: [FILE]} for each model; all "
        "pairs of these models that can matter are profiled, and --out is the folder for "
        "the profiles",
        "FILE",
    )
    adapters: Path | None = _many(
        None,
        "folder of PEFT adapters; NAME.jsonl in it has questions to adapter NAME, or to the base",
        "DIR",
    )
    base: Path | None = _many(None, "checkpoint that is the base of --adapters", "PATH")

    line: tuple[str, ...] = _many(
        (),
        "three or more checkpoints, each made from the one before; one plan is chosen for "
        "all consecutive pairs, and judged on each pair",
        "PATH",
        nargs="+",
    )

    data: tuple[str, ...] = _data(
        (),
        "questions about documents: JSONL as LongBench v1, a folder of such files, "
        "longbench:NAME, gsm8k, gsm8k:FILE or log:FILE; may be given several times",
        "DATA",
    )
    from_log: tuple[str, ...] = _data(
        (),
        "the same as --data log:FILE: prompts of a server's request log; answers are "
        "compared with full prefill's own (--metric same)",
        "FILE",
        dest="data",
        type=f"{LOG}{{}}".format,
    )
    """Always empty: the values of `--from-log` go to `data`, each as `log:FILE`."""
    asked_of: str | None = _data(
        None,
        "use only prompts of a log that this model was asked; NAME is the model's name in the log",
        "NAME",
    )
    data_dir: Path | None = _data(None, "folder that is searched first for longbench:NAME", "DIR")
    template: str | None = _data(
        None, "prompt with {context}, then {input}; default: the data set's own", "TEXT"
    )
    chat: bool = _data(
        False,
        "ask as the OpenAI chat endpoint does: each prompt is a user's message in the tokenizer's "
        "own chat template",
    )
    metric: str | None = _data(
        None, "metric of quality; default: the data set's own", choices=[it.value for it in Metric]
    )
    max_new: int | None = _data(None, "longest answer, in tokens", "N")
    max_prompt_tokens: int | None = _data(
        None,
        "most tokens of a prompt; longer prompts lose the middle of their context; default: "
        "as many as the model takes",
        "N",
    )

    out: Path | None = _out(None, "profile to write, JSON", "FILE")
    small: Path | None = _out(None, "smaller model to compare with", "PATH")
    command: str = ""
    held_out: tuple[str, ...] = _choice(
        (), "data on which plans are judged; default: a share of the contexts of --data", "DATA"
    )
    held_out_share: float = _choice(
        0.5, "share of the contexts of --data on which plans are judged", "X"
    )
    tolerance: float = _choice(0.05, "largest accepted loss, as a share of the quality", "X")
    group: int | None = _choice(
        None,
        "step between the starts and ends of blocks, in layers; default: 1 up to 16 layers, "
        "2 up to 32, …",
        "N",
    )
    plans: int = _choice(MOST_TRIED, "most blocks that are decoded, and that the gate tries", "N")
    """Largest number of plans that are decoded and tried at first. Up to half as many further plans
    are tried if they may still save work."""
    most_contexts: int = _choice(
        MOST_CONTEXTS,
        "most held-out contexts of each task that judge; a plan ends earlier once it is proven",
        "N",
    )
    pruned: bool = _choice(
        True,
        "decode the answers of all blocks, not only of blocks on the frontier of KL",
        option="--no-prune",
    )
    e_correction: bool = _choice(
        False,
        "also try plans that correct the sender's E by a map; the map is fitted on the "
        "training contexts, and stored beside the profile for servers",
    )
    fit_data: tuple[str, ...] = _choice(
        (),
        "contexts on which these maps are fitted instead, as in --data; their questions are "
        "not asked",
        "DATA",
    )
    timing_seconds: float = _choice(
        60, "seconds after which no more parts of the cost model are timed; 0 accepts any fit", "X"
    )
    seed: int = _choice(
        0, "seed of the split, and of the choice of contexts for some measurements", "N"
    )

    def __post_init__(self) -> None:
        require(0.0 < self.tolerance < 1.0, "tolerance", self.tolerance, "between 0 and 1")
        share = self.held_out_share
        require(0.0 < share < 1.0, "held-out-share", share, "between 0 and 1")
        require(self.group is None or self.group >= 1, "group", self.group, "at least 1 layer")
        require(self.plans >= 2, "plans", self.plans, "at least 2")
        require(self.most_contexts >= 1, "most-contexts", self.most_contexts, "at least 1")
        for flag, most in ("max-new", self.max_new), ("max-prompt-tokens", self.max_prompt_tokens):
            require(most is None or most >= 1, flag, most, "at least 1 token")
        require(self.page_size >= 1, "page-size", self.page_size, "at least 1 token")
        budget_s = self.timing_seconds
        require(budget_s >= 0, "timing-seconds", budget_s, "at least 0")
        host, device = self.memory_gb
        for flag, bound in (("max-memory-gb", host), ("max-device-memory-gb", device)):
            require(bound is None or bound > 0, flag, bound, "more than 0")
        if self.fit_data and not self.e_correction:
            raise ConfigError("--fit-data is given without --e-correction, which fits; give both")
        require(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))
        if self.line:
            self._check_line()

    def _check_line(self) -> None:
        if len(self.line) < 3:
            raise ConfigError(
                f"--line names {' and '.join(self.line)} only; name three models or more, each "
                "made from the one before, so that there are two pairs"
            )
        others = "sender_lora", "receiver_lora", "sender_device", "base", "small", "e_correction"
        for name in ("sender", "receiver", *others):
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is given with --line; leave it out")

    @property
    def memory_gb(self) -> tuple[float | None, float | None]:
        """Limits of memory in GiB: of the host, and of each device."""
        return self.max_memory_gb, self.max_device_memory_gb

    @property
    def options(self) -> TaskOptions:
        metric = None if self.metric is None else Metric(self.metric)
        return TaskOptions(
            template=self.template, metric=metric, max_new=self.max_new, chat=self.chat
        )

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """Return the models of the line, or sender and receiver; the settings must name them."""
        from profiles.compute.models import ModelSource

        if self.line:
            return tuple(ModelSource(path=Path(it)) for it in self.line)
        return (
            ModelSource(path=self.sender, adapter=self.sender_lora),
            ModelSource(path=self.receiver, adapter=self.receiver_lora),
        )

    @property
    def pair(self) -> tuple[ModelSource, ModelSource]:
        """Return sender and receiver. For a line, return the sender and receiver of its last
        pair."""
        return self.sources[-2], self.sources[-1]

    def devices(self) -> tuple[torch.device, torch.device]:
        """Return the receiver's and the sender's device; raises ConfigError if one does not
        exist."""
        ours = choose_device(self.device)
        theirs = self.sender_device
        return ours, ours if theirs is None else choose_device(theirs, "sender-device")


def same(name: str, group: str) -> Any:
    """Return a field like the field of `Settings` with this name. `--help` shows its flag in
    `group`."""
    field_ = Settings.__dataclass_fields__[name]
    return field(default=field_.default, metadata={**field_.metadata, "group": group})


def add_flags(parser: argparse.ArgumentParser, *groups: str, of: type[Any] = Settings) -> None:
    """Add flags for a class's settings. A flag that the user omits is None in the arguments."""
    for group in groups:
        titled = parser if group == "out" else parser.add_argument_group(group)
        for name, field_ in of.__dataclass_fields__.items():
            if field_.metadata.get("group") != group:
                continue
            how, kind = dict(field_.metadata), field_.type.removesuffix(" | None")
            option = how.pop("option", f"--{name.replace('_', '-')}")
            del how["group"]
            if kind == "bool":
                how = {"help": how["help"], "action": "store_const", "const": not field_.default}
            elif kind == "tuple[str, ...]":
                how |= {} if "nargs" in how else {"action": "append"}
            else:
                how["type"] = _TYPES[kind]
                if "default" not in how["help"] and field_.default is not None:
                    shown = f"{field_.default:g}" if kind == "float" else field_.default
                    how["help"] += f"; default: {shown}"
            titled.add_argument(option, **{"dest": name, **how})


def require(holds: bool, flag: str, value: object, need: str) -> None:
    if not holds:
        raise ConfigError(f"--{flag} is {value}; it has to be {need}")


def choose_device(name: str, flag: str = "device") -> torch.device:
    """Return the device with this name. `auto` is an accelerator if the machine has one. Raises
    ConfigError if the device does not exist."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise ConfigError(f"--{flag} {name} cannot be used: {exc}; try auto or cpu") from exc
    return device
