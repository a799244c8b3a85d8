"""Percentiles, summaries and checks of the demo, on answers made up here."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_policy import PROFILE

from sglang_droidspeak.demo.results import (
    Condition,
    QualityCheck,
    Sample,
    check_quality,
    equality_failures,
    measured_of,
    reuse_failures,
)
from sglang_droidspeak.request.meta_info import RequestProvenance

REUSED = RequestProvenance(
    outcome="reused", reused_tokens=128, recomputed_layers=3, loaded_layers=9, fetched_bytes=1000
)
NOTHING = RequestProvenance(outcome="off")


def sample(**changes) -> Sample:
    values = {
        "ttft_ms": 10.0,
        "quality": 1.0,
        "token_ids": (7, 2),
        "num_reusable": 128,
        "provenance": REUSED,
    }
    return Sample(**{**values, **changes})


def samples(num: int = 10, **of: list[Sample]) -> dict[Condition, list[Sample]]:
    """Return the samples of a demo that passes all checks. Named conditions get other samples."""
    good = {condition: [sample()] * num for condition in Condition}
    for alone in (Condition.FULL_PREFILL, Condition.ALORA_PREFILL):
        good[alone] = [sample(provenance=NOTHING)] * num
    return {**good, **{Condition(name): value for name, value in of.items()}}


def test_a_condition_is_the_means_of_its_requests():
    mixed = [sample(), sample(quality=0.0, provenance=NOTHING)]
    measured = measured_of(samples(2, block=mixed))
    assert measured[Condition.FULL_REUSE].quality == 1.0
    block = measured[Condition.BLOCK]
    assert (block.quality, block.num_reused) == (0.5, 1)
    assert (block.tokens_reused, block.layers_recomputed, block.bytes_moved) == (64, 1.5, 500)


def test_the_interval_of_a_quality_counts_documents_and_not_questions():
    one_document = [sample(quality=it) for it in (1.0, 0.0, 1.0, 0.0)]
    assert measured_of(samples(4, block=one_document))[Condition.BLOCK].quality_95 == (0.5, 0.5)
    many = [sample(quality=it, document=i) for i, it in enumerate((1.0, 0.0, 1.0, 0.0))]
    low, high = measured_of(samples(4, block=many))[Condition.BLOCK].quality_95
    assert low < 0.5 < high


def test_random_weights_have_no_quality():
    nobody_knows = {condition: [sample(quality=None)] for condition in Condition}
    measured = measured_of(nobody_knows)
    assert {it.quality for it in measured.values()} == {None}
    assert check_quality(nobody_knows, PROFILE) == QualityCheck()


def test_speed_is_relative_to_the_median_of_full_prefill():
    slow = [sample(ttft_ms=ms, provenance=NOTHING) for ms in (300.0, 100.0, 200.0)]
    speed = measured_of(samples(3, full_prefill=slow, block=[sample(ttft_ms=50.0)] * 3))
    assert speed[Condition.FULL_PREFILL].ttft_p50_ms == 200.0
    assert speed[Condition.FULL_PREFILL].ttft_p90_ms == 280.0
    assert speed[Condition.FULL_PREFILL].speedup == 1.0
    assert speed[Condition.BLOCK].speedup == 4.0


def test_a_good_demo_has_no_failures():
    good = samples()
    assert [*reuse_failures(good, "quality"), *equality_failures(good, "quality", "float32")] == []
    assert check_quality(good, PROFILE) == QualityCheck()


def test_a_condition_that_reused_nothing_fails_with_its_outcomes():
    missed = sample(provenance=RequestProvenance(outcome="no_match"))
    (failure,) = reuse_failures(samples(block=[missed] * 10), "quality")
    assert "only 0 of 10 requests of block" in failure
    assert "10 × no_match" in failure


def test_reuse_of_a_part_of_the_document_is_not_reuse_of_it():
    part = sample(num_reusable=256)
    assert len(list(reuse_failures(samples(full_reuse=[part] * 10), "speed"))) == 1


@pytest.mark.parametrize(("num_missed", "num_failures"), [(1, 0), (2, 1)])
def test_one_missed_deadline_in_ten_is_let_pass(num_missed, num_failures):
    missed = sample(provenance=RequestProvenance(outcome="fallback: DeadlineExceeded"))
    answered = [missed] * num_missed + [sample()] * (10 - num_missed)
    assert len(list(reuse_failures(samples(block=answered), "quality"))) == num_failures


@pytest.mark.parametrize("alone", ["full_prefill", "alora_prefill"])
def test_a_full_prefill_that_reused_fails(alone):
    (failure,) = reuse_failures(samples(**{alone: [sample()] * 10}), "quality")
    assert f"10 requests of {Condition(alone).title} reused" in failure


def test_an_activated_adapter_whose_answer_is_not_exact_fails():
    approximate = sample(provenance=replace(REUSED, exact=False))
    (failure,) = reuse_failures(samples(alora_reuse=[approximate] + [sample()] * 9), "quality")
    assert failure == "quality: an answer of aLoRA reuse is not exact"


def test_an_activated_adapter_must_answer_as_it_does_alone():
    other = [sample(token_ids=(7, 3))] + [sample()] * 9
    (failure,) = equality_failures(samples(alora_reuse=other), "speed", "float32")
    assert "aLoRA reuse gave the answer of aLoRA prefill for only 9 of 10" in failure


def test_a_pair_without_an_activated_adapter_is_checked_all_the_same():
    four = {it: of for it, of in samples().items() if not it.is_activated}
    assert len(measured_of(four)) == 4
    assert [*reuse_failures(four, "speed"), *equality_failures(four, "speed", "float32")] == []


def test_recomputing_all_layers_must_give_the_same_tokens():
    other = [sample(token_ids=(7, 3))] + [sample()] * 9
    (failure,) = equality_failures(samples(all_layers=other), "speed", "float32")
    assert "only 9 of 10 prompts, in float32" in failure


def test_in_16_bits_most_first_tokens_must_agree():
    later = samples(all_layers=[sample(token_ids=(7, 3))] * 10)
    assert list(equality_failures(later, "speed", "bfloat16")) == []
    first = samples(all_layers=[sample(token_ids=(8, 2))] * 3 + [sample()] * 7)
    assert len(list(equality_failures(first, "speed", "bfloat16"))) == 1


def by_document(*wrong: int, num: int) -> dict[Condition, list[Sample]]:
    """Two questions each about `num` documents. With the block, all answers about the documents in
    `wrong` are wrong."""
    numbers = [document for document in range(num) for _ in range(2)]
    full = [sample(document=it, provenance=NOTHING) for it in numbers]
    block = [sample(document=it, quality=float(it not in wrong)) for it in numbers]
    return samples(2 * num, full_prefill=full, block=block)


def test_a_block_that_clearly_loses_more_than_the_tolerance_fails():
    for lossy in (by_document(0, 1, num=2), by_document(*range(8), num=40)):
        check = check_quality(lossy, PROFILE)
        assert "full prefill reaches 1.000" in check.failures[0]
        assert "profile the pair on data like this" in check.failures[0]
        assert check.notes == ()


def test_documents_too_few_to_be_sure_are_a_note():
    check = check_quality(by_document(0, num=2), PROFILE)
    assert check.failures == ()
    assert "f1 0.500" in check.notes[0]
    assert "2 documents are too few to say whether by chance" in check.notes[0]


def test_a_loss_within_the_tolerance_is_neither():
    tolerant = replace(PROFILE, tolerance=0.2)
    assert check_quality(by_document(0, num=10), tolerant) == QualityCheck()
