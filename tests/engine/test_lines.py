"""Heirs of a line: which pairs inherit its plan, by the distance of their own models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_parts import CONFIG, weights, write
from line_parts import line_of

from cachetree import ConfigError, ModelId
from cachetree.checkpoint import Weights
from cachetree.checkpoint.identity import read_weights
from sglang_droidspeak.lines import MAX_REMEMBERED, Lines
from sglang_droidspeak.start import refuse

Q = "model.layers.1.self_attn.q_proj.weight"
Step = Callable[[float], Weights]


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """Return the weights of a training after a relative change of every tensor."""
    first = write(tmp_path / "0", weights(0))
    served = read_weights(first).sketched(first)

    def after(change: float) -> Weights:
        changed = {name: it * np.float32(1 + change) for name, it in weights(0).items()}
        return served.after_folder(write(tmp_path / str(change), changed, CONFIG))

    return after


def follow(lines: Lines, weights: Weights) -> dict[ModelId, tuple[bool, str]]:
    """Return whether each sender's plan is inherited, and why."""
    assert weights.identity is not None
    heirs = lines.follow(weights.identity, weights)
    assert all(it.receiver == weights.identity for it in heirs)
    return {it.sender.model_id: (it.passed, it.reason) for it in heirs}


def names_of(*models: Weights) -> list[ModelId]:
    return [it.identity.model_id for it in models if it.identity is not None]


def test_each_pair_inherits_by_its_own_distance(step):
    first, second, third = (step(it) for it in (0.0, 0.01, 0.02))
    (one, two) = names_of(first, second)
    lines = Lines([line_of([first, second], proven=(0.015,) * 4)])
    assert follow(lines, first) == {}
    assert follow(lines, second) == {one: (True, "inherited from the line v1 → v2")}
    heirs = follow(lines, third)
    assert heirs[two][0], "one step before"
    is_heir, reason = heirs[one]
    assert not is_heir and "changed by 0.02 of its weights" in reason and "for 0.015" in reason
    assert third.identity is not None
    (pair,) = [it for it in lines.follow(third.identity, third) if not it.passed]
    assert [(it.start, it.stop) for it in pair.blocks] == [(0, 3)] and pair.recommended is None


def test_what_is_served_again_is_a_receiver_again(step):
    first, second = step(0.0), step(0.01)
    lines = Lines([line_of([first, second], proven=(0.015,) * 4)])
    (one, two) = names_of(first, second)
    for weights_now in (first, second, second):
        follow(lines, weights_now)
    assert follow(lines, second).keys() == {one}
    assert follow(lines, first).keys() == {two}


def test_a_change_in_one_layer_is_judged_by_what_was_proven_for_it(step):
    first, second = step(0.0), step(0.01)
    narrow = Lines([line_of([first, second], proven=(0.02, 0.02, 0.005, 0.02))])
    follow(narrow, first)
    ((is_heir, reason),) = follow(narrow, second).values()
    assert not is_heir and reason.startswith("layer 1 changed")
    wide = line_of([first, second], proven=(0.02, 0.02, 0.02, 0.02))
    both = Lines([line_of([first, second], proven=(0.02, 0.02, 0.005, 0.02)), wide])
    follow(both, first)
    assert follow(both, second)[names_of(first)[0]][0], "by the second line"


def test_without_sketches_there_is_no_distance(step, tmp_path):
    first, second = step(0.0), step(0.01)
    lines = Lines([line_of([first, second], proven=(1.0,) * 4)])
    follow(lines, replace(first, sketches={}))
    assert follow(lines, second) == {}
    assert follow(Lines([]), first) == {}


def test_the_last_models_of_a_chain_are_remembered(step):
    models = [step(it / 100) for it in range(MAX_REMEMBERED + 3)]
    lines = Lines([line_of(models[:2], proven=(1.0,) * 4)])
    for weights_now in models:
        heirs = follow(lines, weights_now)
    assert [*heirs] == names_of(*models[2:-1]) and len(heirs) == MAX_REMEMBERED


def test_weights_that_are_served_in_another_type_than_they_are_stored_in_are_refused(step):
    stored = step(0.0)
    refuse.check_stored_type(stored, "F32")
    with pytest.raises(ConfigError, match=r"weight is F32 in the checkpoint and BF16 when"):
        refuse.check_stored_type(stored, "BF16")
