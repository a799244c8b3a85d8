"""Layer spans and mixtures of sources have the results of the oracle, whatever they share."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from rounding import assert_differ_by_rounding, rounding
from test_oracle import FAMILIES, LOGPROB, NUM_LAYERS, PREFIX_IDS, SUFFIX_IDS, SUMS, make_model

from benchmarks.oracle import decode as oracle_decode
from benchmarks.oracle import generate, partial_prefill, prefill
from cachetree.ids import EMPTY_SPAN, Span
from profiles.compute.layered import GrowingKV, LayeredModel, PrefixKV
from profiles.compute.mixtures import Asked, decode, forced

ALL = Span(0, NUM_LAYERS)
IDS, SUFFIX = PREFIX_IDS[0].tolist(), SUFFIX_IDS[0].tolist()
BLOCKS = [EMPTY_SPAN, Span(0, 2), Span(1, 4), Span(1, 5), Span(3, 4), ALL]
SENDER, OWN = 0, 1


def made(family: str, dtype: torch.dtype = torch.float32):
    """Return models and sources: the sender's, the receiver's own, and one for every first
    layer."""
    receiver, sender = make_model(family, 1).to(dtype), make_model(family, 2).to(dtype)
    layered, theirs = LayeredModel(receiver), LayeredModel(sender).prefix(IDS, ALL)
    sources: list[PrefixKV] = [theirs.kv, layered.prefix(IDS, EMPTY_SPAN).kv]
    for start in range(NUM_LAYERS):
        entering = theirs.e[start] if start else layered.embed(PREFIX_IDS)
        sources.append(layered.recompute(entering, Span(start, NUM_LAYERS)))
    return receiver, sender, layered, sources


def mixture(block: Span) -> tuple[int, ...]:
    return tuple(2 + block.start if layer in block else SENDER for layer in range(NUM_LAYERS))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_answers_are_the_oracles(family):
    receiver, sender, layered, sources = made(family)
    cases = [(block, length) for block in BLOCKS for length in (7, 3)]
    asked = [Asked(mixture(block), tuple(SUFFIX[:length])) for block, length in cases]
    answers = decode(layered, sources, asked, max_new=5, ends=frozenset(), max_rows=5)
    for (block, length), answer in zip(cases, answers, strict=True):
        expected = generate(receiver, sender, PREFIX_IDS, SUFFIX_IDS[:, :length], block, 5)
        assert answer == expected.ids, (block, expected.margins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_logits_are_the_oracles(family, dtype):
    receiver, sender, layered, sources = made(family, dtype)
    rows = torch.cat([SUFFIX_IDS, SUFFIX_IDS.flip(1)])
    streams = forced(
        layered, sources, [mixture(block) for block in BLOCKS], rows.tolist(), max_rows=3
    )
    for block, stream in zip(BLOCKS, streams, strict=True):
        prefix = partial_prefill(receiver, sender, PREFIX_IDS, block)
        for row in range(2):
            expected = oracle_logits(receiver, prefix, rows[row : row + 1])
            got = layered.logits(stream[row])
            close = rounding(dtype, **SUMS)
            assert (got - expected).abs().max() < close * expected.abs().max(), block


def oracle_logits(model, prefix, ids):
    from transformers import DynamicCache

    cache = DynamicCache(prefix, config=model.config)
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].float()


def test_texts_beside_longer_ones_are_as_if_alone():
    _, _, layered, sources = made("llama")
    texts = [SUFFIX, SUFFIX[:4], SUFFIX[1:]]
    mixtures = [mixture(Span(1, 3)), mixture(Span(3, 4))]
    together = forced(layered, sources, mixtures, texts, 2)
    for row, text in enumerate(texts):
        alone = forced(layered, sources, mixtures, [text], 8)
        for whole, expected in zip(together, alone, strict=True):
            assert_differ_by_rounding(whole[row, : len(text)], expected[0], **SUMS)


def test_work_that_mixtures_share_is_done_once(monkeypatch):
    _, _, layered, sources = made("llama")
    rows_through: list[int] = []
    step = layered.step

    def counting(layer, hidden, *rest):
        rows_through.append(hidden.shape[0])
        return step(layer, hidden, *rest)

    monkeypatch.setattr(layered, "step", counting)
    starting_at_1 = [mixture(Span(1, stop)) for stop in range(2, NUM_LAYERS + 1)]
    forced(layered, sources, starting_at_1, [SUFFIX], 64)
    # Layers 0 and 1 once; layer 2 for [1, 2) and for the rest; then one more each.
    assert sum(rows_through) == 1 + 1 + 2 + 3 + 4


def test_an_answer_ends_with_its_end_token():
    receiver, sender, layered, sources = made("llama")
    free = generate(receiver, sender, PREFIX_IDS, SUFFIX_IDS, ALL, 5).ids
    options = {"max_new": 5, "max_rows": 8}
    asked = [Asked(mixture(ALL), tuple(SUFFIX))]
    ended = decode(layered, sources, asked, ends=frozenset({free[2]}), **options)
    assert ended == [free[: free.index(free[2]) + 1]]


def drafts_of(answer: Sequence[int]) -> list[tuple[int, ...]]:
    """Return drafts of an answer: right, partly wrong, too short, too long, and of another
    answer."""
    wrong = int(not answer[2])
    return [
        (),
        tuple(answer),
        (*answer, 7, 8),
        tuple(answer[:3]),
        (*answer[:2], wrong, *answer[3:]),
        (*answer[:2], wrong, *answer[2:]),
        (*answer[:2], *answer[3:]),
        (wrong,) * 5,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_changes_no_answer(dtype):
    _, _, layered, sources = made("llama", dtype)
    options = {"max_new": 9, "max_rows": 13}
    suffixes = [tuple(SUFFIX[:length]) for length in (7, 3)]
    free = [Asked(mixture(block), suffix) for block in BLOCKS for suffix in suffixes]
    answers = decode(layered, sources, free, ends=frozenset(), **options)
    ends = frozenset({answers[0][4], answers[3][6]})
    expected = decode(layered, sources, free, ends=ends, **options)
    drafted = [
        (replace(it, draft=draft), answer)
        for it, whole, answer in zip(free, answers, expected, strict=True)
        for draft in drafts_of(whole)
    ]
    decoded = decode(layered, sources, [it for it, _ in drafted], ends=ends, **options)
    for (asked, answer), got in zip(drafted, decoded, strict=True):
        assert got == answer, asked


def test_right_part_of_a_draft_takes_no_step(monkeypatch):
    _, _, layered, sources = made("llama")
    asked = Asked(mixture(ALL), tuple(SUFFIX))
    options = {"max_new": 9, "ends": frozenset(), "max_rows": 8}
    (answer,) = decode(layered, sources, [asked], **options)
    other = [*answer[:4], int(not answer[4]), *answer[5:]]
    forwards: list[None] = []
    embed = layered.embed
    monkeypatch.setattr(layered, "embed", lambda ids: forwards.append(None) or embed(ids))
    for draft, num_forwards in ((answer, 1), (other, 2), ((), 9)):
        forwards.clear()
        assert decode(layered, sources, [replace(asked, draft=tuple(draft))], **options) == [answer]
        assert len(forwards) == num_forwards, draft


def test_the_past_is_copied_once_for_all_rows_and_tokens():
    _, _, layered, sources = made("llama")
    past = sources[SENDER][0]
    heads, size = past[0].shape[1], past[0].shape[3]
    tokens = [tuple(torch.randn(3, heads, n, size) for _ in range(2)) for n in (2, 1)]
    seen, num_past = GrowingKV(past, 3, 3), len(IDS)
    first = seen.begin(3, layered.place(num_past, [0], [2])).update(*tokens[0])
    second = seen.begin(3, layered.place(num_past, [2], [1])).update(*tokens[1])
    for i in range(2):
        parts = [past[i].expand(3, -1, -1, -1), tokens[0][i], tokens[1][i]]
        assert torch.equal(first[i], torch.cat(parts[:2], 2))
        assert torch.equal(second[i], torch.cat(parts, 2))
        assert first[i].data_ptr() == second[i].data_ptr()
    again = [it[:2] for it in tokens[1]]
    (keys, _) = seen.begin(2, layered.place(num_past, [0], [1])).update(*again)
    assert torch.equal(keys, torch.cat([past[0].expand(2, -1, -1, -1), again[0]], 2))
    assert keys.data_ptr() == first[0].data_ptr()


def test_padding_is_written_where_nobody_reads():
    _, _, layered, sources = made("llama")
    past = sources[SENDER][0]
    heads, size = past[0].shape[1], past[0].shape[3]
    keys, values = (torch.randn(2, heads, 3, size) for _ in range(2))
    placement = layered.place(len(IDS), [0, 2], [3, 1])
    seen = GrowingKV(past, 2, 3).begin(2, placement)
    read, _ = seen.update(keys, values)
    assert read.shape[2] == placement.mask.shape[-1] == len(IDS) + 3
    assert torch.equal(read[0, :, -3:], keys[0])
    assert torch.equal(read[1, :, -1], keys[1, :, 0])


def test_a_blend_of_all_tokens_is_a_full_prefill_and_of_none_the_past():
    receiver, _, layered, sources = made("qwen3")
    everything = [len(IDS)] * layered.num_layers
    blended = layered.blend(IDS, everything, sources[SENDER])
    own = prefill(receiver, PREFIX_IDS).kv
    for got, expected in zip(blended, own, strict=True):
        for mixed, ours in zip(got, expected, strict=True):
            assert_differ_by_rounding(mixed, ours, **SUMS)
    nothing = layered.blend(IDS, [0] * layered.num_layers, sources[SENDER])
    for got, theirs in zip(nothing, sources[SENDER], strict=True):
        assert all(torch.equal(mixed, past) for mixed, past in zip(got, theirs, strict=True))


def test_the_next_token_after_a_mixture_has_the_oracles_margin():
    receiver, sender, layered, sources = made("phi3")
    prefix = partial_prefill(receiver, sender, PREFIX_IDS, Span(1, 4))
    expected = oracle_decode(receiver, prefix, SUFFIX_IDS, 1)
    stream = forced(layered, sources, [mixture(Span(1, 4))], [SUFFIX], 8)[0]
    best, second = layered.logits(stream[0, -1]).log_softmax(-1).topk(2).values.tolist()
    assert best == pytest.approx(expected.logprobs[0], abs=LOGPROB)
    assert best - second == pytest.approx(expected.margins[0], abs=LOGPROB)
