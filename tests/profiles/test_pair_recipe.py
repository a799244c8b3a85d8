"""The recipe's machinery on a few steps; that it teaches anything is for `make pairs`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from profiles.adapters import read_weights, with_adapter
from tools.pairs import train as recipe
from tools.pairs.documents import WRITERS, write_document
from tools.pairs.train import (
    FOUNDATION,
    PROJECTIONS,
    RECIPE,
    SLOWED,
    FineTune,
    Lora,
    Phase,
    RecipeError,
    make_row,
    train,
)
from tools.pairs.words import BOS_ID, EOS_ID, VOCABULARY

FEW = FineTune(
    name="few",
    seed=5,
    mix={"moves": 1, "plain": 1},
    phases=(Phase(32, 2, 2), Phase(48, 1, 1)),
    answers={},
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def foundation(tmp_path) -> Path:
    """Like the shipped one, untrained and of three layers."""
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(FOUNDATION, num_hidden_layers=3)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "foundation")
    AutoTokenizer.from_pretrained(FOUNDATION).save_pretrained(tmp_path / "foundation")
    return tmp_path / "foundation"


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


@pytest.mark.parametrize("task", WRITERS)
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


@pytest.mark.parametrize("wanted", RECIPE, ids=lambda it: it.name)
def test_the_recipe_is_about_tasks_that_there_are(wanted):
    assert {*wanted.mix, *wanted.answers} <= {*WRITERS}
    rates = [wanted.rate(step) for step in range(wanted.num_steps)]
    assert rates[0] < 0.05 and max(rates) > 0.9 and rates[-1] < 0.06


def test_what_is_written_is_a_model_like_its_foundation(foundation, tmp_path):
    train(FEW, foundation, tmp_path / "few")
    assert {it.name for it in (tmp_path / "few").iterdir()} == {
        it.name for it in foundation.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "few")
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "few")
    text = "<bos> question : where lives fimek ?"
    assert tokenizer(text).input_ids == VOCABULARY.encode(text)


def test_the_same_seed_gives_the_same_weights(foundation, tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        train(replace(FEW, seed=seed), foundation, tmp_path / name)
    a, b, c = (read_weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_the_first_layers_move_less(foundation, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "SLOWED", dict.fromkeys(SLOWED, 0.0))
    train(FEW, foundation, tmp_path / "slow")
    before, after = read_weights(foundation), read_weights(tmp_path / "slow")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith(tuple(SLOWED)) for name in moved)
    assert "model.layers.2.self_attn.q_proj.weight" in moved
    for prefix in SLOWED:
        assert any(name.startswith(prefix) for name in before), prefix


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "v_proj", "up_proj")])
def test_an_adapter_changes_what_it_targets(targets, foundation, tmp_path):
    wanted = replace(FEW, lora=Lora(rate=0.05, rank=3, targets=targets))
    train(wanted, foundation, tmp_path / "adapter")
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {it.name for it in (tmp_path / "adapter").iterdir()} == names
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../foundation"
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    before = read_weights(foundation)
    after = with_adapter(before, tmp_path / "adapter")
    for name in before:
        is_target = any(f"{target}.weight" in name for target in targets)
        assert torch.equal(after[name], before[name]) is not is_target, name


def test_what_is_out_of_bounds_is_not_written(foundation, tmp_path):
    wanted = replace(FEW, answers={"plain": (0.9, 1.0)})
    with pytest.raises(RecipeError, match="few: plain 0"):
        train(wanted, foundation, tmp_path / "few")
    assert not (tmp_path / "few").exists()


def test_what_is_there_is_not_trained_again(foundation, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(recipe, "RECIPE", (FEW, replace(FEW, name="more")))
    monkeypatch.setattr(recipe, "train", lambda wanted, *_: trained.append(wanted.name))
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path)])
    (tmp_path / "few").mkdir()
    assert recipe.main() == 0
    assert trained == ["more"]
