"""The recipe's machinery on stages of a few steps; that it teaches anything is for `make pairs`."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from rounding import assert_differ_by_rounding
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from profiles.adapters import merged
from tools.pairs.documents import WRITERS, write_document
from tools.pairs.export import export_adapter, export_all, export_model, read_model, to_llama
from tools.pairs.model import Shape, TinyLlama
from tools.pairs.rows import EXERCISES, make_row
from tools.pairs.stages import (
    FOUNDATION,
    RANDOM_WEIGHTS,
    STAGES,
    Cosine,
    Gate,
    LinearEnd,
    Phase,
    Stage,
)
from tools.pairs.train import (
    MAX_ATTEMPTS,
    NOTHING,
    RecipeError,
    expanded,
    one_thread,
    run_recipe,
    train_stage,
)
from tools.pairs.updates import FullRates, LoraRates
from tools.pairs.words import BOS_ID, EOS_ID, VOCABULARY

NUM_STEPS = 20
REPOSITORY = Path(__file__).parents[2]


def small_stage(rates: FullRates | LoraRates, num_steps: int = 3, **changes) -> Stage:
    settings = {
        "name": "small",
        "parent": RANDOM_WEIGHTS,
        "layers": (0, 1),
        "seed": 5,
        "mix": {"recall": 1, "plain": 1},
        "phases": (Phase(32, 2, num_steps),),
        "rates": rates,
        "schedule": Cosine(warm_up=2),
        "gates": (),
    }
    return Stage(**{**settings, **changes})


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("task", WRITERS)
def test_answers_stand_in_the_document(task):
    for seed in range(20):
        document = write_document(Random(seed), task, 120)
        text = f" {' '.join(document.sentences)} "
        assert document.questions
        assert all(f" {question.answer} " in text for question in document.questions)
        VOCABULARY.encode(text)


def test_a_biography_never_gives_the_answer_away_by_its_relation():
    """Several people have each relation, so that a question needs its person."""
    for seed in range(20):
        document = write_document(Random(seed), "biographies", 120)
        relations = [q.text.rsplit(" ", 2)[0] for q in document.questions]
        assert all(relations.count(relation) >= 3 for relation in relations)


@pytest.mark.parametrize("task", [*WRITERS, *EXERCISES])
def test_rows_are_full_and_reproducible(task):
    for seed in range(5):
        row = make_row(Random(seed), task, 97)
        assert len(row.ids) == len(row.weights) == len(row.scored) == 97
        assert row.ids[0] == BOS_ID
        assert any(row.scored)
        assert row == make_row(Random(seed), task, 97)


def test_the_scored_tokens_of_a_row_answer_its_questions():
    row = make_row(Random(0), "plain", 200)
    answered = [i for i, scored in enumerate(row.scored) if scored and not row.scored[i - 1]]
    for start in answered:
        assert VOCABULARY.words[row.ids[start - 1]] == "?"
        rest = [row.ids[i] for i in range(start, 200) if not row.scored[i]]
        assert rest[:1] in ([EOS_ID], [])  # the row may end within its last answer


def test_stages_follow_their_parents():
    seen = {RANDOM_WEIGHTS}
    for stage in STAGES:
        assert stage.parent in seen
        assert all(gate.task in {*WRITERS, *EXERCISES} for gate in stage.gates)
        assert set(stage.mix) <= {*WRITERS, *EXERCISES}
        assert stage.phase_at(stage.num_steps - 1) == stage.phases[-1]
        seen.add(stage.name)


@pytest.mark.parametrize("schedule", [LinearEnd(), Cosine()])
def test_schedules_warm_up_and_end_low(schedule):
    factors = [schedule.factor(step, 1000) for step in range(1000)]
    assert factors[0] < 0.05
    assert max(factors) > 0.99
    assert factors[-1] < 0.06


def test_inserted_layers_change_nothing():
    torch.manual_seed(0)
    small, large = TinyLlama(Shape(num_layers=2)), TinyLlama(Shape(num_layers=5))
    large.load_state_dict(expanded(small.state_dict(), (None, 0, None, 1, None), large))
    ids = torch.randint(0, 512, (2, 20))
    with torch.no_grad():
        assert_differ_by_rounding(
            large(ids), small(ids), terms=Shape(num_layers=5).mlp_size, steps=5
        )


def test_an_export_computes_what_was_trained(tmp_path):
    trained = train_stage(small_stage(FullRates()), NOTHING, tmp_path / "work")
    export_model(trained, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model = TinyLlama(trained.shape)
    model.load_state_dict({name: t.bfloat16().float() for name, t in trained.weights.items()})
    ids = torch.randint(0, 512, (2, 40))
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, model(ids), atol=1e-4)


def test_the_tokenizer_adds_nothing(tmp_path):
    trained = train_stage(small_stage(FullRates(), num_steps=1), NOTHING, tmp_path / "work")
    export_model(trained, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "<bos> question : where lives fimek ?"
    assert tokenizer(text).input_ids == VOCABULARY.encode(text)
    assert tokenizer.decode([VOCABULARY.ids["red"], VOCABULARY.ids["lamp"]]) == "red lamp"


def test_an_adapter_merged_into_its_base_is_what_was_trained(tmp_path):
    base = train_stage(small_stage(FullRates()), NOTHING, tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.weights.items()}
    rates = LoraRates(rate=0.05)
    trained = train_stage(small_stage(rates, parent="base"), base, tmp_path / "lora")
    export_adapter(trained, rates, tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    result = merged(to_llama(before, base.shape), factors, rates.alpha / rates.rank)
    expected = to_llama(trained.weights, trained.shape)
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(result[name], tensor, atol=1e-6)
    assert not torch.equal(trained.weights["layers.0.qkv.weight"], before["layers.0.qkv.weight"])


def test_an_adapter_of_few_targets_changes_only_those(tmp_path):
    base = train_stage(small_stage(FullRates()), NOTHING, tmp_path / "base")
    before = to_llama({name: it.clone() for name, it in base.weights.items()}, base.shape)
    rates = LoraRates(rate=0.05, rank=3, alpha=6.0, targets=("q_proj", "v_proj", "up_proj"))
    trained = train_stage(small_stage(rates, parent="base"), base, tmp_path / "lora")
    export_adapter(trained, rates, tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in factors} == {*rates.targets}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (3, list(rates.targets))
    result, expected = merged(before, factors, 2.0), to_llama(trained.weights, trained.shape)
    for name, tensor in expected.items():
        assert torch.allclose(result[name], tensor, atol=1e-6)
        is_target = any(target in name for target in rates.targets)
        assert torch.equal(tensor, before[name]) is not is_target, name


def test_more_is_made_of_a_foundation_that_was_exported(tmp_path):
    stages = (
        small_stage(FullRates(), name=FOUNDATION),
        small_stage(LoraRates(rank=2), name="extra", parent=FOUNDATION),
    )
    export_all(stages[:1], run_recipe(stages[:1], tmp_path / "work", {}), tmp_path / "out")
    given = read_model(tmp_path / "out" / FOUNDATION)
    exported = load_file(tmp_path / "out" / FOUNDATION / "model.safetensors")
    again = to_llama(given.weights, given.shape)
    assert {
        name: it.bfloat16().equal(exported[name]) for name, it in again.items()
    } == dict.fromkeys(exported, True)
    made = run_recipe(stages[1:], tmp_path / "more", {FOUNDATION: given})
    export_all(stages[1:], made, tmp_path / "out")
    assert {it.name for it in (tmp_path / "out").iterdir()} == {FOUNDATION, "extra"}
    assert (tmp_path / "out" / "extra" / "adapter_model.safetensors").exists()


def test_slowed_parameters_move_less(tmp_path):
    base = train_stage(small_stage(FullRates()), NOTHING, tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.weights.items()}
    rates = FullRates(slowed=(("embedding", 0.0), ("layers.0.", 0.0)))
    after = train_stage(small_stage(rates, parent="base"), base, tmp_path / "slow").weights
    assert torch.equal(after["embedding.weight"], before["embedding.weight"])
    assert torch.equal(after["layers.0.qkv.weight"], before["layers.0.qkv.weight"])
    assert not torch.equal(after["layers.1.qkv.weight"], before["layers.1.qkv.weight"])


_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path("tests/profiles").resolve()))
from test_pair_recipe import NOTHING, NUM_STEPS, RATES, one_thread, small_stage, train_stage
with one_thread():
    train_stage(small_stage(RATES[sys.argv[1]], NUM_STEPS), NOTHING, Path(sys.argv[2]), 0.0)
"""
RATES = {"full": FullRates(), "lora": LoraRates()}


@pytest.mark.parametrize("kind", RATES)
def test_a_killed_run_continues_as_if_nothing_had_happened(kind, tmp_path):
    stage = small_stage(RATES[kind], NUM_STEPS)
    uninterrupted = train_stage(stage, NOTHING, tmp_path / "whole")
    file = tmp_path / "killed" / f"seed_{stage.seed}.safetensors"
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind, str(tmp_path / "killed")],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert file.exists()
    with safe_open(file, framework="pt") as checkpoint:
        about = json.loads(checkpoint.metadata()["run"])
        assert 0 < about["step"] < NUM_STEPS, "killed at the wrong time to test anything"
    continued = train_stage(stage, NOTHING, tmp_path / "killed")
    for name, tensor in uninterrupted.weights.items():
        assert torch.equal(continued.weights[name], tensor)


def test_a_checkpoint_of_another_recipe_is_not_used(tmp_path):
    first = train_stage(small_stage(FullRates()), NOTHING, tmp_path)
    weights = {name: tensor.clone() for name, tensor in first.weights.items()}
    other = train_stage(small_stage(FullRates(matrices=0.1)), NOTHING, tmp_path)
    assert other.fingerprint != first.fingerprint
    assert not torch.equal(other.weights["layers.0.qkv.weight"], weights["layers.0.qkv.weight"])


def test_a_missed_gate_tries_the_next_seeds_once(tmp_path):
    gate = Gate(task="recall", length=32, at_least=0.9)
    stage = small_stage(FullRates(), gates=(gate,))
    for _ in range(2):
        with pytest.raises(RecipeError, match=f"stage small .* {MAX_ATTEMPTS} seeds"):
            train_stage(stage, NOTHING, tmp_path)
    assert len(list(tmp_path.glob("seed_*.safetensors"))) == MAX_ATTEMPTS


def test_a_finished_stage_is_loaded_and_judged_by_the_gates_of_today(tmp_path):
    stage = small_stage(FullRates())
    trained = train_stage(stage, NOTHING, tmp_path)
    strict = replace(stage, gates=(Gate(task="recall", length=32, at_most=0.0, at=0.3),))
    again = train_stage(strict, NOTHING, tmp_path)
    assert again.fingerprint == trained.fingerprint
    unreachable = replace(stage, gates=(Gate(task="recall", length=32, at_least=0.9),))
    with pytest.raises(RecipeError):
        train_stage(unreachable, NOTHING, tmp_path)
