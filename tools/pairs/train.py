"""One stage, from its start to its gates, with a checkpoint at least every half a minute.

Rows and initial weights depend only on the stage, its seed and the step, so a run that was killed
continues exactly as if it had not been. Everything is float32, on one thread.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import LlamaForCausalLM

from tools.pairs.model import LEAVING, Tensors, fresh_model
from tools.pairs.rows import Row, make_row
from tools.pairs.stages import FullRates, Gate, LayerPlan, LoraRates, Stage
from tools.pairs.wiring import wire

MAX_ATTEMPTS: Final = 4
SECONDS_BETWEEN_CHECKPOINTS: Final = 30.0
_SEED_STRIDE: Final = 1000
_GATE_ROWS: Final = 64
_LARGEST_NORM: Final = 1.0


class RecipeError(Exception):
    """A stage missed a gate with every seed that it may try."""


class GateMissed(Exception):
    """One attempt of a stage ended below a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a stage leaves behind; `fingerprint` names the whole history that led to it."""

    model: LlamaForCausalLM | PeftModel
    fingerprint: str


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
    parent: Trained | None,
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


def started_from(stage: Stage, parent: Trained | None, seed: int) -> LlamaForCausalLM | PeftModel:
    """The model before the first step."""
    torch.manual_seed(seed)
    model = fresh_model(len(stage.layers))
    if parent is None:
        wire(model)
    else:
        model.load_state_dict(expanded(parent.model.state_dict(), stage.layers, model))
    if isinstance(stage.rates, FullRates):
        return model
    rates = stage.rates
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=rates.rank,
            lora_alpha=rates.alpha,
            target_modules=list(rates.targets),
        ),
    )


def expanded(weights: Tensors, layers: LayerPlan, fresh: LlamaForCausalLM) -> Tensors:
    """The weights with layers copied, moved and inserted as the plan says.

    A new layer has `fresh`'s random weights, except that its two output projections are zero: the
    model computes what it computed before.
    """
    result = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for i, source in enumerate(layers):
        for name, tensor in fresh.model.layers[i].state_dict().items():
            if source is not None:
                result[f"model.layers.{i}.{name}"] = weights[f"model.layers.{source}.{name}"]
            else:
                is_leaving = name.endswith(LEAVING)
                result[f"model.layers.{i}.{name}"] = tensor * 0 if is_leaving else tensor
    return result


def optimizers_of(
    model: LlamaForCausalLM | PeftModel, rates: FullRates | LoraRates
) -> list[Optimizer]:
    """Muon on the layers' matrices and Adam on the rest, or Adam on an adapter's factors."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    betas = (0.9, 0.98)
    if isinstance(rates, LoraRates):
        return [AdamW(trained.values(), lr=rates.rate, betas=betas, weight_decay=0.0)]

    def groups(rate: float, is_matrix: bool) -> list[dict[str, object]]:
        return [
            {"params": [p], "lr": rate * rates.multiplier(name)}
            for name, p in trained.items()
            if (".layers." in name and p.dim() == 2) == is_matrix
        ]

    return [
        Muon(groups(rates.matrices, True), weight_decay=rates.weight_decay),
        AdamW(groups(rates.others, False), betas=betas, weight_decay=0.0),
    ]


class _Run:
    """One attempt of a stage. Its file holds weights, optimizer state and the step reached."""

    def __init__(self, stage: Stage, parent: Trained | None, seed: int, folder: Path) -> None:
        self._stage, self._seed = stage, seed
        self._file = folder / f"seed_{seed}.safetensors"
        # Gates are left out: they judge weights and do not change them.
        before = "" if parent is None else parent.fingerprint
        history = f"{replace(stage, gates=())!r} {seed} {before}"
        self._fingerprint = hashlib.sha256(history.encode()).hexdigest()[:16]
        self._model = started_from(stage, parent, seed)
        self._trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._optimizers = optimizers_of(self._model, stage.rates)
        self._step = 0
        self._restore()

    def finish(self, seconds_between_checkpoints: float) -> Trained:
        """Train to the end and check the gates. Raises GateMissed."""
        stage, step = self._stage, self._step
        saved = time.monotonic()
        schedules = [
            LambdaLR(it, lambda epoch: stage.schedule.factor(step + epoch, stage.num_steps))
            for it in self._optimizers
        ]
        bar = tqdm(total=stage.num_steps, initial=step, desc=f"{stage.name:13}", unit="step")
        with bar:
            self._check_gates()
            while self._step < stage.num_steps:
                loss = self._advance(schedules)
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if time.monotonic() - saved >= seconds_between_checkpoints:
                    self._save()
                    saved = time.monotonic()
                self._check_gates()
        return Trained(model=self._model, fingerprint=self._fingerprint)

    def _advance(self, schedules: Sequence[LambdaLR]) -> float:
        phase = self._stage.phase_at(self._step)
        rng = Random(f"{self._stage.name} {self._seed} {self._step}")
        tasks, shares = list(self._stage.mix), list(self._stage.mix.values())
        rows = [
            make_row(rng, rng.choices(tasks, shares)[0], phase.length + 1)
            for _ in range(phase.num_rows)
        ]
        ids, weights = _tensors(rows)
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        clip_grad_norm_(self._trained.values(), _LARGEST_NORM)
        for optimizer, schedule in zip(self._optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        self._step += 1
        return loss.item()

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
        tensors = {name: p.detach() for name, p in self._trained.items()}
        for name, parameter in self._trained.items():
            for key, value in self._state_of(parameter).items():
                tensors[f"{name} {key}"] = value
        about = {"fingerprint": self._fingerprint, "step": self._step}
        part = self._file.with_suffix(".part")
        save_file(tensors, part, metadata={"run": json.dumps(about)})
        part.replace(self._file)

    def _restore(self) -> None:
        """Continue from the file, where there is one and it belongs to this history."""
        if not self._file.exists():
            return
        with safe_open(self._file, framework="pt") as file:
            about = json.loads(file.metadata()["run"])
            if about["fingerprint"] != self._fingerprint:
                return
            for key in file.keys():  # noqa: SIM118
                name, _, of_state = key.partition(" ")
                parameter, tensor = self._trained[name], file.get_tensor(key)
                if of_state:
                    self._state_of(parameter)[of_state] = tensor
                else:
                    parameter.data.copy_(tensor)
        self._step = int(about["step"])

    def _state_of(self, parameter: Tensor) -> Tensors:
        """What the parameter's optimizer remembers; it is empty before the first step."""
        (owner,) = (
            it
            for it in self._optimizers
            if any(parameter is p for group in it.param_groups for p in group["params"])
        )
        return owner.state[parameter]


@torch.no_grad()
def accuracy(model: LlamaForCausalLM | PeftModel, gate: Gate) -> float:
    """Share of the answer tokens of fresh rows that the model gets right, given the text before."""
    rng = Random(f"gate {gate.task} {gate.length}")
    rows = [make_row(rng, gate.task, gate.length + 1) for _ in range(_GATE_ROWS)]
    ids, _ = _tensors(rows)
    right = (model(input_ids=ids[:, :-1]).logits.argmax(-1) == ids[:, 1:]).float()
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
            parent = trained.get(stage.parent)
            trained[stage.name] = train_stage(stage, parent, folder / stage.name)
    return trained
