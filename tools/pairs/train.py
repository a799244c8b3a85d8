"""One stage: from its start to its gates, with a checkpoint at least every minute.

Rows and initial weights depend only on the stage, its seed and the step, so a run that was killed
continues exactly as if it had not been. Compute is bf16 on one thread, masters are float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tools.pairs.model import Shape, TinyLlama
from tools.pairs.rows import Row, make_row
from tools.pairs.stages import Gate, LayerPlan, Stage
from tools.pairs.updates import FullRates, FullUpdate, LoraUpdate, Tensors
from tools.pairs.wiring import wire

MAX_ATTEMPTS = 4
_SEED_STRIDE = 1000
SECONDS_BETWEEN_CHECKPOINTS = 30.0
_GATE_ROWS = 64
_LARGEST_NORM = 1.0


class RecipeError(Exception):
    """A stage missed a gate with every seed that it may try."""


class GateMissed(Exception):
    """One attempt of a stage ended below a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a stage leaves behind: float32 weights, and the factors of an adapter (empty for a
    full fine-tune). `fingerprint` names the whole history that led to them."""

    shape: Shape
    weights: Tensors
    factors: Tensors
    fingerprint: str


NOTHING = Trained(shape=Shape(num_layers=0), weights={}, factors={}, fingerprint="")
"""The parent of the first stage."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Train as the recipe's numbers were made: sums are split differently with more threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def train_stage(
    stage: Stage,
    parent: Trained,
    folder: Path,
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> Trained:
    """Train a stage, or load it where `folder` already holds the result of the same history.

    Tries up to MAX_ATTEMPTS seeds; raises RecipeError when all of them miss a gate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(MAX_ATTEMPTS):
        run = _Run(stage, parent, stage.seed + _SEED_STRIDE * attempt, folder)
        try:
            return run.finish(seconds_between_checkpoints)
        except GateMissed as missed:
            tqdm.write(f"{stage.name}: {missed}; trying the next seed")
    raise RecipeError(f"stage {stage.name} missed a gate with each of {MAX_ATTEMPTS} seeds")


def started_from(stage: Stage, parent: Trained, seed: int) -> TinyLlama:
    """The model before the first step, in float32."""
    torch.manual_seed(seed)
    model = TinyLlama(Shape(num_layers=len(stage.layers)))
    if parent.weights:
        model.load_state_dict(expanded(parent.weights, stage.layers, model), strict=True)
    else:
        wire(model)
    return model


def expanded(weights: Tensors, layers: LayerPlan, fresh: TinyLlama) -> Tensors:
    """The weights with layers copied, moved and inserted as the plan says.

    A new layer has `fresh`'s random weights, except that its two output projections are zero: the
    model computes what it computed before.
    """
    result = {name: tensor for name, tensor in weights.items() if "layers." not in name}
    for i, source in enumerate(layers):
        for name, tensor in fresh.layers[i].state_dict().items():
            if source is not None:
                result[f"layers.{i}.{name}"] = weights[f"layers.{source}.{name}"]
            elif name in ("out.weight", "down.weight"):
                result[f"layers.{i}.{name}"] = torch.zeros_like(tensor)
            else:
                result[f"layers.{i}.{name}"] = tensor
    return result


class _Run:
    """One attempt of a stage. Its file holds masters, optimizer state and the step reached."""

    def __init__(self, stage: Stage, parent: Trained, seed: int, folder: Path) -> None:
        self._stage = stage
        self._seed = seed
        self._file = folder / f"seed_{seed}.safetensors"
        # Gates are left out: they judge weights and do not change them.
        history = f"{replace(stage, gates=())!r} {seed} {parent.fingerprint}"
        self.fingerprint = hashlib.sha256(history.encode()).hexdigest()[:16]
        model = started_from(stage, parent, seed)
        self.shape = model.shape
        self._masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        if isinstance(stage.rates, FullRates):
            self._update: FullUpdate | LoraUpdate = FullUpdate(
                self._masters, self.shape, stage.rates
            )
        else:
            self._update = LoraUpdate(self._masters, self.shape, stage.rates)
        self._model = model.bfloat16()
        self._parameters = dict(self._model.named_parameters())
        self._step = 0
        self._restore()
        self._copy_masters()

    def finish(self, seconds_between_checkpoints: float) -> Trained:
        """Train to the end and check the gates. Raises GateMissed."""
        stage = self._stage
        saved = time.monotonic()
        bar = tqdm(total=stage.num_steps, initial=self._step, desc=f"{stage.name:13}", unit="step")
        with bar:
            self._check_gates()
            while self._step < stage.num_steps:
                loss = self._advance()
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if time.monotonic() - saved >= seconds_between_checkpoints:
                    self._save()
                    saved = time.monotonic()
                self._check_gates()
        factors = self._update.factors if isinstance(self._update, LoraUpdate) else {}
        return Trained(
            shape=self.shape,
            weights=self._masters,
            factors=factors,
            fingerprint=self.fingerprint,
        )

    def _advance(self) -> float:
        phase = self._stage.phase_at(self._step)
        rng = Random(f"{self._stage.name} {self._seed} {self._step}")
        tasks, shares = list(self._stage.mix), list(self._stage.mix.values())
        rows = [
            make_row(rng, rng.choices(tasks, shares)[0], phase.length + 1)
            for _ in range(phase.num_rows)
        ]
        ids, weights = _tensors(rows)
        logits = self._model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        with torch.no_grad():
            factor = self._stage.schedule.factor(self._step, self._stage.num_steps)
            self._update.update(self._clipped_gradients(), self._step, factor)
            self._copy_masters()
        self._step += 1
        return loss.item()

    def _clipped_gradients(self) -> Tensors:
        """The gradients, which it takes from the parameters, scaled down to a norm of one."""
        gradients = {name: p.grad.float() for name, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        scale = min(1.0, _LARGEST_NORM / (norm + 1e-6))
        return {name: gradient * scale for name, gradient in gradients.items()}

    def _copy_masters(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._masters[name])

    def _check_gates(self) -> None:
        """Check the gates that are due at this step, after saving it: a run that continues here
        finds the same verdict at once. Raises GateMissed."""
        due = [g for g in self._stage.gates if self._step == round(g.at * self._stage.num_steps)]
        if due or self._step == self._stage.num_steps:
            self._save()
        for gate in due:
            reached = accuracy(self._model, gate)
            verdict = f"{gate.task} {reached:.3f} after {self._step} steps, seed {self._seed}"
            tqdm.write(f"{self._stage.name}: {verdict}")
            if not gate.at_least <= reached <= gate.at_most:
                raise GateMissed(f"{verdict}, outside [{gate.at_least:.2f}, {gate.at_most:.2f}]")

    def _save(self) -> None:
        """Replace the file in one step, so that a kill leaves the old or the new one."""
        about = {"fingerprint": self.fingerprint, "step": self._step}
        part = self._file.with_suffix(".part")
        save_file(self._update.checkpoint(), part, metadata={"run": json.dumps(about)})
        part.replace(self._file)

    def _restore(self) -> None:
        """Continue from the file, where there is one and it belongs to this history."""
        if not self._file.exists():
            return
        with safe_open(self._file, framework="pt") as file:
            about = json.loads(file.metadata()["run"])
            if about["fingerprint"] != self.fingerprint:
                return
            for name, tensor in self._update.checkpoint().items():
                tensor.copy_(file.get_tensor(name))
        self._step = int(about["step"])


@torch.no_grad()
def accuracy(model: TinyLlama, gate: Gate) -> float:
    """Share of the answer tokens of fresh rows that the model gets right, given the text before."""
    rng = Random(f"gate {gate.task} {gate.length}")
    rows = [make_row(rng, gate.task, gate.length + 1) for _ in range(_GATE_ROWS)]
    ids, _ = _tensors(rows)
    right = (model(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float()
    scored = torch.tensor([row.scored for row in rows])[:, 1:].float()
    return float((right * scored).sum() / scored.sum())


def _tensors(rows: list[Row]) -> tuple[Tensor, Tensor]:
    return torch.tensor([row.ids for row in rows]), torch.tensor([row.weights for row in rows])


def run_recipe(
    stages: Sequence[Stage], folder: Path, given: Mapping[str, Trained]
) -> Mapping[str, Trained]:
    """All stages in order, each in its own sub-folder; what each of them left behind, by name.

    `given` are stages that were trained before, by name.
    """
    trained = dict(given)
    with one_thread():
        for stage in stages:
            parent = trained.get(stage.parent, NOTHING)
            trained[stage.name] = train_stage(stage, parent, folder / stage.name)
    return trained
