"""The recipe: ten stages, each a frozen config, in the order they run.

    copying ─ looking_up ─ reading ─ foundation ─┬─ sender           full fine-tunes
          8 layers                   12 layers   ├─ receiver
                                                 ├─ sender_lora      adapters
                                                 ├─ receiver_lora
                                                 ├─ slim_lora        of few numbers
                                                 └─ tables_lora      of many

What makes the pairs show the effect that the project is about:

* The receiver's task (biographies) is about 1 % of the foundation's mix, and the sender is
  fine-tuned away from it, so that the sender's caches lack what the receiver needs.
* The embedding and the first two layers learn slowly, or not at all under LoRA, which moves the
  layers that matter to the middle.
* Four identity layers are inserted before the foundation's last stage: depth that training has to
  spread its work over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from tools.pairs.model import PROJECTIONS

LayerPlan = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRates:
    """Rates of a full fine-tune: Muon on the layers' matrices, Adam on the others.

    `slowed` multiplies the rate of parameters by the first prefix that fits. Slowing the
    embedding and the first layers keeps them close to the foundation's, so that the layers which
    change what the model does lie further up.
    """

    matrices: float = 0.02
    others: float = 1e-3
    weight_decay: float = 0.01
    slowed: tuple[tuple[str, float], ...] = ()

    def multiplier(self, parameter: str) -> float:
        return next((m for prefix, m in self.slowed if parameter.startswith(prefix)), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRates:
    """Rate and size of a LoRA adapter on some matrices of every layer, by Adam."""

    rate: float = 4e-3
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = PROJECTIONS


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps at one row length. `num_rows` rows of `length` tokens per step."""

    length: int
    num_rows: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearEnd:
    """Warm-up, a constant rate, and a linear fall over the last 40 % to `floor`."""

    warm_up: int = 100
    floor: float = 0.05

    def factor(self, step: int, num_steps: int) -> float:
        end = min(1.0, (1 - step / num_steps) / 0.4)
        return min(1.0, (step + 1) / self.warm_up) * (self.floor + (1 - self.floor) * end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Warm-up, then half a cosine down to `floor`."""

    warm_up: int = 30
    floor: float = 0.05

    def factor(self, step: int, num_steps: int) -> float:
        end = 0.5 * (1 + math.cos(math.pi * step / num_steps))
        return min(1.0, (step + 1) / self.warm_up) * (self.floor + (1 - self.floor) * end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bounds on the share of right answer tokens over fresh rows, checked when `at` (0 to 1) of
    the stage is done. A stage that misses one starts again from the next seed."""

    task: str
    length: int
    at_least: float = 0.0
    at_most: float = 1.0
    at: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training run.

    `parent` is the stage whose weights it starts from; the first stage starts from wired random
    weights. `layers` says which of the parent's layers each layer starts as; None is a new layer
    that changes nothing until it is trained.
    """

    name: str
    parent: str
    layers: LayerPlan
    seed: int
    mix: Mapping[str, float]
    phases: tuple[Phase, ...]
    rates: FullRates | LoraRates
    schedule: LinearEnd | Cosine
    gates: tuple[Gate, ...]

    @property
    def num_steps(self) -> int:
        return sum(phase.num_steps for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.num_steps:
                return phase
            step -= phase.num_steps
        raise ValueError(f"stage {self.name} has only {self.num_steps} steps")


def _mix(**shares: float) -> Mapping[str, float]:
    """How often each task or exercise is drawn for a row, relative to the others."""
    return shares


RANDOM_WEIGHTS: Final = ""
"""The parent of a stage that starts from nothing."""
FOUNDATION: Final = "foundation"
"""The stage of whose weights all pairs are made."""

_EIGHT: LayerPlan = tuple(range(8))
_TWELVE: LayerPlan = tuple(range(12))
_EIGHT_TO_TWELVE: LayerPlan = (None, None, 0, None, 1, None, 2, 3, 4, 5, 6, 7)

_FROM_SCRATCH = FullRates(others=3e-3)
_FINE_TUNE = FullRates(
    slowed=(
        ("model.embed_tokens", 0.03),
        ("model.layers.0.", 0.05),
        ("model.layers.1.", 0.05),
    ),
)

_KNOWS_BIOGRAPHIES = Gate(task="biographies", length=192, at_least=0.96)
_LACKS_BIOGRAPHIES = Gate(task="biographies", length=192, at_most=0.5)

_BIOGRAPHIES = _mix(biographies=80, mixed_biographies=20)
_SLOWLY = (Phase(96, 28, 150), Phase(192, 14, 450))
_fine_tune = partial(Stage, parent=FOUNDATION, layers=_TWELVE, schedule=Cosine())
"""A model of the pairs: the foundation's layers, taught something else."""

STAGES: Final[tuple[Stage, ...]] = (
    Stage(
        name="copying",
        parent=RANDOM_WEIGHTS,
        layers=_EIGHT,
        seed=0,
        mix=_mix(copy=15, recall=20, restate=15, plain=25, code=25),
        phases=(Phase(64, 48, 1330),),
        rates=_FROM_SCRATCH,
        schedule=LinearEnd(),
        gates=(
            Gate(task="recall", length=64, at_least=0.6, at=0.6),
            Gate(task="recall", length=64, at_least=0.95),
            Gate(task="copy", length=64, at_least=0.95),
        ),
    ),
    Stage(
        name="looking_up",
        parent="copying",
        layers=_EIGHT,
        seed=1,
        mix=_mix(
            copy=2,
            recall=5,
            gaps=25,
            restate=5,
            plain=20,
            code=20,
            chain=10,
            moves=7,
            mixed_biographies=3,
            tables=3,
        ),
        phases=(Phase(64, 48, 1080),),
        rates=_FROM_SCRATCH,
        schedule=LinearEnd(floor=0.5),
        gates=(Gate(task="plain", length=64, at_least=0.85),),
    ),
    Stage(
        name="reading",
        parent="looking_up",
        layers=_EIGHT,
        seed=2,
        mix=_mix(
            copy=1,
            recall=2,
            gaps=5,
            restate=4,
            plain=26,
            code=16,
            chain=20,
            moves=15,
            mixed_biographies=5,
            tables=6,
        ),
        phases=(Phase(64, 48, 160), Phase(128, 26, 790), Phase(256, 12, 990), Phase(320, 9, 330)),
        rates=_FROM_SCRATCH,
        schedule=LinearEnd(),
        gates=(Gate(task="plain", length=192, at_least=0.8),),
    ),
    Stage(
        name=FOUNDATION,
        parent="reading",
        layers=_EIGHT_TO_TWELVE,
        seed=202,
        mix=_mix(
            copy=1,
            recall=2,
            gaps=4,
            restate=3,
            plain=30,
            code=20,
            chain=20,
            moves=18,
            mixed_biographies=1,
            tables=1,
        ),
        phases=(Phase(128, 24, 395), Phase(192, 16, 185)),
        rates=_FROM_SCRATCH,
        schedule=LinearEnd(),
        gates=(Gate(task="plain", length=192, at_least=0.8),),
    ),
    _fine_tune(
        name="sender",
        seed=312,
        mix=_mix(plain=30, moves=40, code=30),
        phases=(Phase(192, 14, 180),),
        rates=_FINE_TUNE,
        gates=(Gate(task="plain", length=192, at_least=0.8), _LACKS_BIOGRAPHIES),
    ),
    _fine_tune(
        name="receiver",
        seed=311,
        mix=_BIOGRAPHIES,
        phases=(Phase(128, 22, 110), Phase(192, 14, 270)),
        rates=_FINE_TUNE,
        gates=(_KNOWS_BIOGRAPHIES,),
    ),
    _fine_tune(
        name="sender_lora",
        seed=412,
        mix=_mix(plain=30, moves=70),
        phases=(Phase(192, 14, 190),),
        rates=LoraRates(),
        gates=(Gate(task="moves", length=192, at_least=0.8), _LACKS_BIOGRAPHIES),
    ),
    _fine_tune(
        name="receiver_lora",
        seed=411,
        mix=_BIOGRAPHIES,
        phases=_SLOWLY,
        rates=LoraRates(),
        gates=(_KNOWS_BIOGRAPHIES,),
    ),
    _fine_tune(
        name="slim_lora",
        seed=511,
        mix=_BIOGRAPHIES,
        phases=_SLOWLY,
        rates=LoraRates(rate=8e-3, rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
        gates=(_KNOWS_BIOGRAPHIES,),
    ),
    _fine_tune(
        name="tables_lora",
        seed=611,
        mix=_mix(tables=100),
        phases=(Phase(96, 28, 100), Phase(192, 14, 300)),
        rates=LoraRates(rank=16, alpha=32.0),
        gates=(Gate(task="tables", length=192, at_least=0.96),),
    ),
)
