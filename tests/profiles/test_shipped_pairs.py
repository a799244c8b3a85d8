"""The weights, documents and profile in the repository belong together and show the effect."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from cachetree.identity import read_model_identity
from cachetree.ids import Span
from cachetree.profile import read_profile
from profiles.adapters import merge_folder
from profiles.pairs.check import Properties, measure_properties
from profiles.pairs.questions import SEEDS, make_records
from profiles.pairs.words import BOS_ID, VOCABULARY
from profiles.records import by_context, context_prompt, prompt_of, read_records
from profiles.sweep import Scores, Settings, load_pair

PAIRS = Path(__file__).parents[2] / "profiles" / "pairs"
WEIGHTS, DATA = PAIRS / "weights", PAIRS / "data"
NUM_QUESTIONS = 18
PAGE_SIZE = 16


def test_the_weights_fit_the_repository():
    total = sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file())
    assert total < 20_000_000


@pytest.mark.parametrize("name", SEEDS)
def test_the_documents_are_what_their_script_makes(name):
    assert read_records(DATA / f"{name}.jsonl") == make_records(name)


def test_no_document_is_in_both_sets():
    contexts = [{r.context for r in read_records(DATA / f"{name}.jsonl")} for name in SEEDS]
    assert len(contexts[0]) == len(contexts[1]) == 24
    assert not contexts[0] & contexts[1]


@pytest.mark.parametrize("model", ["foundation", "sender", "receiver"])
def test_the_tokenizer_is_the_vocabulary_and_knows_every_word(model):
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / model)
    for record in read_records(DATA / "held_out.jsonl"):
        ids = tokenizer(prompt_of(record)).input_ids
        assert ids == VOCABULARY.encode(prompt_of(record))
        assert ids[0] == BOS_ID
        assert ids.count(BOS_ID) == 1


def test_a_document_is_seven_to_nine_pages_shared_by_its_questions():
    for name in SEEDS:
        for context, questions in by_context(read_records(DATA / f"{name}.jsonl")):
            num_tokens = len(context_prompt(context).split())
            assert 7 <= num_tokens // PAGE_SIZE <= 9
            assert len(questions) == 3
            assert all(prompt_of(r).startswith(f"{context_prompt(context)} ") for r in questions)


def test_the_profile_is_of_these_weights(tmp_path):
    profile = read_profile(PAIRS / "sender_to_receiver.json")
    assert profile.sender == read_model_identity(WEIGHTS / "sender", tmp_path)
    assert profile.receiver == read_model_identity(WEIGHTS / "receiver", tmp_path)


def test_the_profile_has_a_cheap_block_that_reuse_needs():
    profile = read_profile(PAIRS / "sender_to_receiver.json")
    assert profile.passed
    assert profile.recommended is not None
    assert len(profile.recommended.block) <= 6
    assert profile.full_prefill_quality - profile.full_reuse_quality >= 0.2
    assert profile.recommended.quality >= 0.95 * profile.full_prefill_quality
    assert (PAIRS / "sender_to_receiver.json").stat().st_size < 100_000


def merged_pair(tmp_path: Path) -> tuple[Path, Path]:
    for role in ("sender", "receiver"):
        merge_folder(WEIGHTS / "foundation", WEIGHTS / f"{role}_lora", tmp_path / role)
    return tmp_path / "sender", tmp_path / "receiver"


@pytest.mark.parametrize("kind", ["full fine-tune", "LoRA"])
def test_a_pair_has_the_properties_of_its_kind(kind, tmp_path):
    sender, receiver = WEIGHTS / "sender", WEIGHTS / "receiver"
    if kind == "LoRA":
        sender, receiver = merged_pair(tmp_path)
    pair = load_pair(sender, receiver, torch.bfloat16)
    records = read_records(DATA / "held_out.jsonl")[:NUM_QUESTIONS]
    assert measure_properties(pair, records, Settings()).missed() == []


def test_a_pair_without_the_effect_is_told_so():
    blocks = {Span(0, 0): 0.9, Span(2, 5): 0.8, Span(0, 12): 1.0}
    flat = Properties(Scores(0.7, 1.0, blocks, 10), Span(2, 5), (0.0, 0.05))
    missed = flat.missed()
    assert len(missed) == 4
    assert "receiver 1.000 - sender 0.700" in missed[0]
