"""What is to be profiled, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from cachetree import ConfigError
from profiles.compute import ModelSource
from profiles.costs import DEFAULT_REPEATS, Repeats
from profiles.data import TaskOptions
from profiles.stats import MOST_TRIED

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be profiled, and how. Raises ConfigError for what cannot be."""

    sender: ModelSource
    receiver: ModelSource
    small: ModelSource | None = None
    """A smaller model to compare with."""
    data: tuple[str, ...]
    """Data sets as `profiles.data.datasets` names them."""
    held_out: tuple[str, ...] = ()
    """Likewise; where there are none, a share of `data` is held out."""
    held_out_share: float = 0.5
    data_dir: Path | None = None
    options: TaskOptions = field(default_factory=TaskOptions)
    max_prompt_tokens: int | None = None
    out: Path
    command: str = ""
    tolerance: float = 0.05
    """Largest accepted loss, relative to full prefill."""
    group: int | None = None
    """Blocks begin and end at multiples of so many layers; None is 1 up to 16 layers, 2 up to 32,
    and so on (`profiles.stats.default_group`)."""
    plans: int = MOST_TRIED
    """Blocks whose answers are decoded and that the gate tries, at most; and half as many more that
    may be worth it all the same."""
    page_size: int = 16
    """Tokens per page of the servers; only whole pages are reused."""
    dtype: str = "bfloat16"
    device: str = "auto"
    sender_device: str | None = None
    """None is the receiver's. Between the two, everything lies in the host's memory."""
    max_memory_gb: float | None = None
    """Of the host's memory beside the models' weights, in GiB; None is most of what is free."""
    max_device_memory_gb: float | None = None
    """Likewise of each device's."""
    seed: int = 0
    e_correction: bool = False
    """Try plans with corrected E, too."""
    fit_data: tuple[str, ...] = ()
    """As `data`, what their maps are fitted on; where there are none, the contexts that choose."""
    pruned: bool = True
    """Decode only plans that the fast measure leaves on the frontier."""
    timing: Repeats = DEFAULT_REPEATS
    """How often the parts of the cost model are timed."""

    def __post_init__(self) -> None:
        _require(0.0 < self.tolerance < 1.0, "tolerance", self.tolerance, "between 0 and 1")
        _require(
            self.group is None or self.group >= 1,
            "group",
            self.group,
            "a number of layers, at least 1",
        )
        _require(self.plans >= 2, "plans", self.plans, "at least 2")
        _require(self.page_size >= 1, "page-size", self.page_size, "at least 1 token")
        for flag in ("max-memory-gb", "max-device-memory-gb"):
            bound = getattr(self, flag.replace("-", "_"))
            _require(bound is None or bound > 0, flag, bound, "more than 0")
        if self.fit_data and not self.e_correction:
            raise ConfigError("--fit-data is given without --e-correction, which fits; give both")
        _require(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))


def _require(holds: bool, flag: str, value: object, need: str) -> None:
    if not holds:
        raise ConfigError(f"--{flag} is {value}; it has to be {need}")


def choose_device(name: str) -> torch.device:
    """`auto` is an accelerator where there is one; ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:
        raise ConfigError(f"--device {name} cannot be used: {exc}; try auto or cpu") from exc
    return device
