"""The weights, documents and profiles in the repository belong together and show the effect of
reuse."""

import json
from pathlib import Path

import pytest
from shipped import DATA, PAIRS, SHIPPED, WEIGHTS, by_context, context_prompt, prompt_of
from transformers import AutoTokenizer

from cachetree.checkpoint.identity import read_model_identity
from cachetree.corrections import read_corrections
from cachetree.planning.profile import read_profile
from profiles.data.datasets import Source, load_sources
from profiles.data.documents import Document, data_files, make_documents
from profiles.data.records import read_records, write_records
from profiles.evidence import DataFile, read_measured
from profiles.stats.artifact import longest_used
from tools.pairs.questions import OPTIONS, SEEDS, make_records
from tools.pairs.words import BOS_ID, VOCABULARY

PAGE_SIZE = 16
CHECKPOINTS = ("foundation", "sender", "receiver")
RANKS = {"sender_lora": 8, "sender_alora": 8, "receiver_lora": 8, "slim_lora": 4, "tables_lora": 16}
"""Ranks of the adapters."""
MATRICES = {f"{it}_proj" for it in ("q", "k", "v", "o", "gate", "up", "down")}


def test_the_weights_fit_the_repository():
    total = sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file())
    assert total < 20_000_000


def test_every_fine_tune_is_shipped_as_its_page_says():
    assert {path.name for path in WEIGHTS.iterdir()} == {*CHECKPOINTS, *RANKS}
    for name, rank in RANKS.items():
        config = json.loads((WEIGHTS / name / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (rank, 2 * rank)
        targets = {"q_proj", "v_proj"} if name == "slim_lora" else MATRICES
        assert {*config["target_modules"]} == targets


@pytest.mark.parametrize("name", SEEDS)
def test_the_documents_are_what_their_script_makes(name):
    assert read_records(DATA / f"{name}.jsonl") == make_records(name, SEEDS[name])


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


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_profile_is_of_these_weights(shipped, tmp_path):
    profile = read_profile(shipped.profile)
    for source, identity in (
        (shipped.sender, profile.sender),
        (shipped.receiver, profile.receiver),
    ):
        assert identity == read_model_identity(source.path, tmp_path, source.adapter)


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_profile_has_a_cheap_block_that_reuse_needs(shipped):
    profile = read_measured(shipped.profile)
    assert profile.passed
    assert profile.recommended is not None
    assert len(profile.recommended.block) <= 6
    assert profile.full_prefill_quality - profile.full_reuse_quality >= 0.2
    assert profile.recommended.quality >= 0.95 * profile.full_prefill_quality
    assert shipped.profile.stat().st_size < 100_000


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_block_is_as_good_on_held_out_questions(shipped):
    """The quality is within 4 points of that on the training questions, which is the largest
    difference in the paper."""
    profile = read_measured(shipped.profile)
    by_block = {point.block: point for point in profile.frontier}
    point = by_block[profile.recommended.block]
    assert abs(point.held_out.mean - point.train_quality) <= 0.04


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_profile_says_how_it_was_made(shipped):
    made = read_measured(shipped.profile)
    assert made.made.sweep_passes_per_context == made.receiver.num_layers + 1
    assert made.made.dtype == "bfloat16"
    assert (made.train.num_contexts, made.held_out.num_contexts) == (24, 96)
    assert [file.name for file in made.train.files] == ["train.jsonl"]
    assert [file.name for file in made.held_out.files] == ["held_out.jsonl"]
    assert made.costs.error < 0.25


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda it: it.name)
def test_the_profile_is_judged_on_documents_that_anybody_can_write_again(shipped, tmp_path):
    path = tmp_path / "held_out.jsonl"
    write_records(make_records("held_out", SEEDS["held_out"], 96), path)
    assert read_measured(shipped.profile).held_out.files == files_of(path)
    assert read_measured(shipped.profile).train.files == files_of(DATA / "train.jsonl")


@pytest.mark.parametrize("task", ["biographies", "tables"])
def test_a_profile_is_used_up_to_the_length_that_twenty_of_its_documents_reach(task, tmp_path):
    profiles = [read_measured(path) for path in DATA.parent.glob("*.json")]
    of_task = [it for it in profiles if it.held_out.tasks[0].name == task]
    path = tmp_path / "held_out.jsonl"
    write_records(make_records("held_out", SEEDS["held_out"], 96, task), path)
    documents = documents_of(load_sources([str(path)], OPTIONS))
    assert {it.measured_tokens for it in of_task} == {longest_used(documents, PAGE_SIZE)} == {160}


def files_of(path: Path) -> tuple[DataFile, ...]:
    """Return the data files as a profile names them."""
    sources = load_sources([str(path)], OPTIONS)
    return data_files(sources, documents_of(sources))


def documents_of(sources: list[Source]) -> list[Document]:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "foundation")
    return make_documents(sources, tokenizer, page_size=PAGE_SIZE, max_prompt_tokens=None)


@pytest.mark.parametrize(
    ("receiver", "task"), [("tables_lora", "tables"), ("receiver_lora", "biographies")]
)
def test_adapters_are_profiled_on_their_base(receiver, task, tmp_path):
    """The profile is of these weights, and of documents that the recipe can write again. It need
    not have passed."""
    profile = read_measured(DATA.parent / f"foundation_to_{receiver}.json")
    base = WEIGHTS / "foundation"
    assert profile.sender == read_model_identity(base, tmp_path, None)
    assert profile.receiver == read_model_identity(base, tmp_path, WEIGHTS / receiver)
    for name, num_documents in (("train", 24), ("held_out", 96)):
        path = tmp_path / f"{name}.jsonl"
        write_records(make_records(name, SEEDS[name], num_documents, task), path)
        split = profile.train if name == "train" else profile.held_out
        assert files_of(path) == split.files
    if profile.passed:
        lost = profile.full_prefill_quality - profile.recommended.quality
        assert lost <= 0.05 * profile.full_prefill_quality


@pytest.mark.parametrize("path", sorted(DATA.parent.glob("*.json")), ids=lambda it: it.stem)
def test_the_drift_guard_is_told_what_each_plan_may_differ_by(path):
    profile = read_profile(path)
    plans = [it for it in profile.blocks if len(it.block) < profile.receiver.num_layers]
    assert profile.recommended in plans
    assert all(0 < it.tv_bound < 0.1 for it in plans)


@pytest.mark.parametrize("path", sorted(PAIRS.glob("../real/*.json")), ids=lambda it: it.stem)
def test_verified_plan_needs_only_shipped_maps(path):
    profile = read_measured(path)
    assert read_corrections(profile, path).keys() == {it.sha256 for it in profile.e_maps}
