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
from transformers import AutoModelForCausalLM, AutoTokenizer

from profiles.adapters import with_adapter
from tools.pairs.documents import WRITERS, write_document
from tools.pairs.model import PROJECTIONS, fresh_model, read_model, write_model, write_tokenizer
from tools.pairs.rows import EXERCISES, make_row
from tools.pairs.stages import (
    FOUNDATION,
    RANDOM_WEIGHTS,
    STAGES,
    Cosine,
    FullRates,
    Gate,
    LinearEnd,
    LoraRates,
    Phase,
    Stage,
)
from tools.pairs.train import (
    MAX_ATTEMPTS,
    RecipeError,
    Trained,
    expanded,
    one_thread,
    run_recipe,
    started_from,
    train_stage,
)
from tools.pairs.wiring import WIRED_LAYERS
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
    small, large = fresh_model(2), fresh_model(5)
    large.load_state_dict(expanded(small.state_dict(), (None, 0, None, 1, None), large))
    ids = torch.randint(0, 512, (2, 20))
    with torch.no_grad():
        assert_differ_by_rounding(
            large(ids).logits, small(ids).logits, terms=large.config.intermediate_size, steps=5
        )


def test_wired_heads_look_back_at_their_distances():
    """More than at any other distance, on average over random tokens, in the first layer: the
    second one has to learn what the first one adds."""
    model = started_from(small_stage(FullRates()), None, 5)
    ids = torch.randint(4, 512, (20, 40))
    with torch.no_grad():
        first = model(ids, output_attentions=True).attentions[0].mean(0)
    for head, distance in enumerate(WIRED_LAYERS[0]):
        by_distance = [first[head].diagonal(-it).mean() for it in range(20)]
        assert by_distance.index(max(by_distance)) == distance, head
        assert max(by_distance) > 0.5


def test_what_is_written_is_what_was_trained_rounded(tmp_path):
    trained = train_stage(small_stage(FullRates()), None, tmp_path / "work").model
    write_model(trained, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.dtype == torch.bfloat16
    for name, tensor in trained.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor.bfloat16()), name


def test_the_tokenizer_adds_nothing(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<bos> question : where lives fimek ?"
    assert tokenizer(text).input_ids == VOCABULARY.encode(text)
    assert tokenizer.decode([VOCABULARY.ids["red"], VOCABULARY.ids["lamp"]]) == "red lamp"


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "v_proj", "up_proj")])
def test_an_adapter_merged_into_its_base_is_what_was_trained(targets, tmp_path):
    base = train_stage(small_stage(FullRates()), None, tmp_path / "base")
    before = weights_of(base.model)
    rates = LoraRates(rate=0.05, rank=3, alpha=6.0, targets=targets)
    trained = train_stage(small_stage(rates, parent="base"), base, tmp_path / "lora").model
    write_model(trained, tmp_path / "adapter")
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {it.name for it in (tmp_path / "adapter").iterdir()} == names
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], set(config["target_modules"])) == (3, set(targets))
    result = with_adapter(before, tmp_path / "adapter")
    expected = trained.merge_and_unload().state_dict()
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(result[name], tensor, atol=1e-6)
        is_target = any(f"{target}.weight" in name for target in targets)
        assert torch.equal(tensor, before[name]) is not is_target, name
    assert_same(base.model, before)


def assert_same(model, weights: dict[str, torch.Tensor]) -> None:
    assert {it: torch.equal(tensor, weights[it]) for it, tensor in model.state_dict().items()} == (
        dict.fromkeys(weights, True)
    )


def test_more_is_made_of_a_foundation_that_was_written(tmp_path):
    foundation = small_stage(FullRates(), name=FOUNDATION)
    made = train_stage(foundation, None, tmp_path / "work")
    write_model(made.model, tmp_path / FOUNDATION)
    model = read_model(tmp_path / FOUNDATION)
    assert model.dtype == torch.float32
    extra = small_stage(LoraRates(rank=2), name="extra", parent=FOUNDATION)
    given = {FOUNDATION: replace(made, model=model)}
    found = run_recipe((extra,), tmp_path / "more", given)
    assert set(found) == {FOUNDATION, "extra"}


def test_slowed_parameters_move_less(tmp_path):
    base = train_stage(small_stage(FullRates()), None, tmp_path / "base")
    rates = FullRates(slowed=(("model.embed_tokens", 0.0), ("model.layers.0.", 0.0)))
    after = train_stage(small_stage(rates, parent="base"), base, tmp_path / "slow").model
    moved = {
        name
        for name, tensor in after.named_parameters()
        if not torch.equal(tensor, base.model.get_parameter(name))
    }
    slowed = {it for it in moved if it.startswith(("model.embed_tokens", "model.layers.0."))}
    assert slowed == set()
    assert "model.layers.1.self_attn.q_proj.weight" in moved and "model.norm.weight" in moved


def test_every_stage_slows_parameters_that_there_are():
    names = [name for name, _ in fresh_model(12).named_parameters()]
    for stage in STAGES:
        if isinstance(stage.rates, FullRates):
            for prefix, _ in stage.rates.slowed:
                assert any(it.startswith(prefix) for it in names), prefix


_CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path("tests/profiles").resolve()))
from test_pair_recipe import NUM_STEPS, RATES, foundation, one_thread, small_stage, train_stage
with one_thread():
    train_stage(small_stage(RATES[sys.argv[1]], NUM_STEPS), foundation(), Path(sys.argv[2]), 0.0)
"""
RATES = {"full": FullRates(), "lora": LoraRates()}


def foundation() -> Trained:
    """Untrained, but the same everywhere."""
    return Trained(model=started_from(small_stage(FullRates()), None, 1), fingerprint="first")


@pytest.mark.parametrize("kind", RATES)
def test_a_killed_run_continues_as_if_nothing_had_happened(kind, tmp_path):
    stage = small_stage(RATES[kind], NUM_STEPS)
    uninterrupted = train_stage(stage, foundation(), tmp_path / "whole")
    file = tmp_path / "killed" / f"seed_{stage.seed}.safetensors"
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind, str(tmp_path / "killed")],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 600
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert file.exists()
    with safe_open(file, framework="pt") as checkpoint:
        about = json.loads(checkpoint.metadata()["run"])
        assert 0 < about["step"] < NUM_STEPS, "killed at the wrong time to test anything"
    continued = train_stage(stage, foundation(), tmp_path / "killed")
    assert_same(continued.model, weights_of(uninterrupted.model))


def test_a_checkpoint_of_another_recipe_is_not_used(tmp_path):
    first = train_stage(small_stage(FullRates()), None, tmp_path)
    other = train_stage(small_stage(FullRates(matrices=0.1)), None, tmp_path)
    assert other.fingerprint != first.fingerprint
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(other.model.get_parameter(name), first.model.get_parameter(name))


def test_a_missed_gate_tries_the_next_seeds_once(tmp_path):
    gate = Gate(task="recall", length=32, at_least=0.9)
    stage = small_stage(FullRates(), gates=(gate,))
    for _ in range(2):
        with pytest.raises(RecipeError, match=f"stage small .* {MAX_ATTEMPTS} seeds"):
            train_stage(stage, None, tmp_path)
    assert len(list(tmp_path.glob("seed_*.safetensors"))) == MAX_ATTEMPTS


def test_a_finished_stage_is_loaded_and_judged_by_the_gates_of_today(tmp_path):
    stage = small_stage(FullRates())
    trained = train_stage(stage, None, tmp_path)
    strict = replace(stage, gates=(Gate(task="recall", length=32, at_most=0.0, at=0.3),))
    again = train_stage(strict, None, tmp_path)
    assert again.fingerprint == trained.fingerprint
    unreachable = replace(stage, gates=(Gate(task="recall", length=32, at_least=0.9),))
    with pytest.raises(RecipeError):
        train_stage(unreachable, None, tmp_path)
