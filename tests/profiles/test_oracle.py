"""The oracle agrees with plain transformers if both have an answer, and differs where reuse has to
change it."""

import pytest
import torch
from rounding import assert_differ_by_rounding, rounding
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.oracle import decode, generate, partial_prefill, prefill, recompute
from cachetree.ids import EMPTY_SPAN, Span

NUM_LAYERS = 5
PREFIX, SUFFIX, MAX_NEW = 48, 7, 6
SUMS = {"terms": PREFIX + SUFFIX, "steps": NUM_LAYERS}
"""Length of the sums through which a token of these models passes. The attention's sum is the
longest."""
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large, so that random models have opinions
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "arcee": {},
    "glm4": {"head_dim": 16},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
}
"""Sizes in the config of each family that have other names than in llama's."""


def make_model(family: str, seed: int, **changed: object) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family] | changed)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def make_ids(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (1, num_tokens), generator=generator)


@pytest.fixture(params=FAMILIES)
def pair(request):
    return make_model(request.param, 1), make_model(request.param, 2)


LOGPROB = 8 * rounding(torch.float32, **SUMS)
"""Largest rounding error of a log-probability of these models. Their logits reach 8."""
PREFIX_IDS, SUFFIX_IDS = make_ids(PREFIX, 3), make_ids(SUFFIX, 4)


def plain_generate(model: PreTrainedModel) -> list[int]:
    ids = torch.cat([PREFIX_IDS, SUFFIX_IDS], 1)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_NEW,
        min_new_tokens=MAX_NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("block", [EMPTY_SPAN, Span(0, 2), Span(1, 4), Span(3, 5), Span(0, 5)])
def test_a_model_that_is_its_own_sender_answers_as_itself(pair, block):
    _, receiver = pair
    result = generate(receiver, receiver, PREFIX_IDS, SUFFIX_IDS, block, MAX_NEW)
    assert result.ids == plain_generate(receiver)


def test_all_layers_are_the_receivers_own(pair):
    sender, receiver = pair
    result = generate(receiver, sender, PREFIX_IDS, SUFFIX_IDS, Span(0, NUM_LAYERS), MAX_NEW)
    assert result.ids == plain_generate(receiver)


def test_a_middle_block_is_neither_full_reuse_nor_full_prefill(pair):
    sender, receiver = pair
    blocks = [EMPTY_SPAN, Span(2, 4), Span(0, NUM_LAYERS)]
    logprobs = [
        generate(receiver, sender, PREFIX_IDS, SUFFIX_IDS, block, MAX_NEW).logprobs
        for block in blocks
    ]
    assert logprobs[0] != pytest.approx(logprobs[1], abs=1e-3)
    assert logprobs[1] != pytest.approx(logprobs[2], abs=1e-3)


def test_layers_outside_the_block_are_the_senders(pair):
    sender, receiver = pair
    block = Span(2, 4)
    kv = partial_prefill(receiver, sender, PREFIX_IDS, block)
    theirs, ours = prefill(sender, PREFIX_IDS), prefill(receiver, PREFIX_IDS)
    for layer in range(NUM_LAYERS):
        for i in (0, 1):
            assert torch.equal(kv[layer][i], theirs.kv[layer][i]) == (layer not in block)
            assert not torch.allclose(kv[layer][i], ours.kv[layer][i], atol=1e-3)


def test_the_first_layer_of_a_block_projects_the_senders_stream(pair):
    """K and V of the transition layer are the receiver's projection of the sender's E. The test
    computes it by hand."""
    sender, receiver = pair
    layer = receiver.model.layers[2]
    e = prefill(sender, PREFIX_IDS).e[2]
    value = partial_prefill(receiver, sender, PREFIX_IDS, Span(2, 3))[2][1]
    normed = layer.input_layernorm(e)
    attention = layer.self_attn
    if hasattr(attention, "v_proj"):
        expected = attention.v_proj(normed)
    else:
        expected = attention.qkv_proj(normed)[..., -value.shape[1] * value.shape[3] :]
    got = value.transpose(1, 2).flatten(2)
    assert_differ_by_rounding(got, expected, terms=SIZES["hidden_size"])


def test_a_block_from_the_first_layer_needs_nothing_of_the_sender(pair):
    sender, receiver = pair
    kv = partial_prefill(receiver, sender, PREFIX_IDS, Span(0, 3))
    ours = prefill(receiver, PREFIX_IDS)
    for layer in range(3):
        assert_differ_by_rounding(kv[layer][0], ours.kv[layer][0], **SUMS)


def test_recomputing_in_chunks_changes_nothing(pair):
    sender, receiver = pair
    block = Span(1, 4)
    whole = partial_prefill(receiver, sender, PREFIX_IDS, block)
    e = prefill(sender, PREFIX_IDS).e[block.start]
    first = recompute(receiver, e[:, :16], block, [(k[:, :, :0], v[:, :, :0]) for k, v in whole])
    past = [
        first[layer] if layer in block else (k[:, :, :16], v[:, :, :16])
        for layer, (k, v) in enumerate(whole)
    ]
    chunked = recompute(receiver, e[:, 16:], block, past)
    for layer in block:
        assert_differ_by_rounding(chunked[layer][0], whole[layer][0], **SUMS)
        assert_differ_by_rounding(chunked[layer][1], whole[layer][1], **SUMS)


def test_suffix_may_come_in_any_split(pair):
    """The tokens after the last whole page belong to the suffix. If sender and receiver are the
    same model, any cut gives the same answer."""
    _, receiver = pair
    ids = torch.cat([PREFIX_IDS, SUFFIX_IDS], 1)
    cuts = [decode(receiver, prefill(receiver, ids[:, :n]).kv, ids[:, n:], 4) for n in (16, 40, 54)]
    assert cuts[0].ids == cuts[1].ids == cuts[2].ids
    assert cuts[0].logprobs == pytest.approx(cuts[2].logprobs, abs=LOGPROB)


@pytest.mark.parametrize("block", [EMPTY_SPAN, Span(0, 2), Span(1, 4)])
def test_own_tokens_stay_exact_at_every_layer(pair, block):
    sender, receiver = pair
    own = 16
    kv = partial_prefill(receiver, sender, PREFIX_IDS, block, own)
    ours = prefill(receiver, PREFIX_IDS[:, :own])
    for layer in range(NUM_LAYERS):
        assert kv[layer][0].shape[2] == PREFIX
        assert torch.equal(kv[layer][0][:, :, :own], ours.kv[layer][0])
        assert torch.equal(kv[layer][1][:, :, :own], ours.kv[layer][1])


def test_recomputed_tokens_attend_over_the_own_ones(pair):
    sender, receiver = pair
    block, own = Span(1, 4), 16
    with_own = partial_prefill(receiver, sender, PREFIX_IDS, block, own)
    without = partial_prefill(receiver, sender, PREFIX_IDS, block)
    assert not torch.allclose(with_own[3][0][:, :, own:], without[3][0][:, :, own:], atol=1e-3)


def test_own_tokens_and_all_layers_are_the_receivers_prefill(pair):
    sender, receiver = pair
    kv = partial_prefill(receiver, sender, PREFIX_IDS, Span(0, NUM_LAYERS), 16)
    ours = prefill(receiver, PREFIX_IDS)
    for layer in range(NUM_LAYERS):
        assert_differ_by_rounding(kv[layer][0], ours.kv[layer][0], **SUMS)
        assert_differ_by_rounding(kv[layer][1], ours.kv[layer][1], **SUMS)


def test_bf16_runs():
    sender, receiver = make_model("llama", 1).bfloat16(), make_model("llama", 2).bfloat16()
    kv = partial_prefill(receiver, sender, PREFIX_IDS, Span(1, 3), 16)
    assert {tensor.dtype for layer in kv for tensor in layer} == {torch.bfloat16}
    assert len(decode(receiver, kv, SUFFIX_IDS, 3).ids) == 3


def test_logprobs_and_margins_are_those_of_the_tokens():
    model = make_model("llama", 1)
    ids = torch.cat([PREFIX_IDS, SUFFIX_IDS], 1)
    logprobs = model(ids).logits[0, -1].detach().log_softmax(-1).sort(descending=True).values
    result = decode(model, prefill(model, PREFIX_IDS).kv, SUFFIX_IDS, 1)
    assert result.logprobs == pytest.approx([float(logprobs[0])], abs=LOGPROB)
    assert result.margins == pytest.approx([float(logprobs[0] - logprobs[1])], abs=LOGPROB)


def test_a_sliding_window_is_refused():
    model = make_model("mistral", 1, sliding_window=8)
    with pytest.raises(ValueError, match="one of 8"):
        generate(model, model, PREFIX_IDS, SUFFIX_IDS, Span(1, 3), 2)
