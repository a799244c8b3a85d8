"""Partial prefill with plain transformers: slow and simple, to compare the product with.

It works for models that name their decoder layers like Llama, without sliding windows, in any
dtype, for one sequence at a time: ids are `[1, tokens]`.

    # layers [0, block.start)           loaded      sender's KV
    # layers [block.start, block.stop)  recomputed  receiver's KV, from sender's E at block.start
    # layers [block.stop, num_layers)   loaded      sender's KV
    #
    # tokens [0, own)                   the receiver's own KV at every layer (exact)
    # tokens [own, num_tokens)          as above; recomputed tokens also attend to tokens [0, own)

A server reuses whole pages only. To compare with it, pass the ids of those pages as the prefix, and
the rest as the beginning of the suffix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cachetree import Span

TIE = 1e-3
KV = tuple[Tensor, Tensor]
"""Keys (after the rotation) and values of one layer: `[1, kv_heads, tokens, head_dim]` each."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Result of one model's prefill of a prompt: KV of each layer, and the residual stream that
    enters each layer, `[1, tokens, hidden]`."""

    kv: tuple[KV, ...]
    e: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """Greedily decoded tokens, each with its log-probability. Decoding never stops early.

    `margins` has each token's distance to the second most likely token. If a margin is tiny,
    another implementation may rightly choose the other token.
    """

    ids: list[int]
    logprobs: list[float]
    margins: list[float]

    @property
    def sure(self) -> list[int]:
        """Tokens before the first position with two nearly equal candidates. Any float32
        implementation must choose the same tokens."""
        return self.ids[: next((i for i, it in enumerate(self.margins) if it < TIE), None)]


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor) -> Prefill:
    """Compute a model's own KV and E for a prompt."""
    output = model.model(input_ids=ids, use_cache=True, output_hidden_states=True)
    return Prefill(kv=_kv_of(output.past_key_values), e=tuple(output.hidden_states[:-1]))


@torch.no_grad()
def recompute(
    model: PreTrainedModel, entering: Tensor, block: Span, past: Sequence[KV]
) -> dict[int, KV]:
    """Run the layers of `block` on the residual stream that enters the first of them.

    `past` is the KV of all tokens before the tokens of `entering`, at all layers. The result has
    the KV of the earlier and the new tokens, for the layers of the block.
    """
    _refuse_sliding_window(model)
    num_past, num_new = past[0][0].shape[2], entering.shape[1]
    positions = torch.arange(num_past, num_past + num_new, device=entering.device)[None]
    rotary = model.model.rotary_emb(entering, position_ids=positions)
    mask = torch.full(
        (1, 1, num_new, num_past + num_new),
        torch.finfo(entering.dtype).min,
        dtype=entering.dtype,
        device=entering.device,
    ).triu(num_past + 1)
    cache = DynamicCache(past, config=model.config)
    hidden = entering
    for layer in block:
        hidden = model.model.layers[layer](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=rotary,
        )
    kv = _kv_of(cache)
    return {layer: kv[layer] for layer in block}


@torch.no_grad()
def partial_prefill(
    receiver: PreTrainedModel,
    sender: PreTrainedModel,
    ids: Tensor,
    block: Span,
    own: int = 0,
    correct: Callable[[Tensor], Tensor] = lambda e: e,
) -> list[KV]:
    """Compute KV of `ids` at all layers. The receiver prefills the first `own` tokens. For other
    tokens it recomputes the layers of `block`, from the sender's E after `correct`. All other KV
    is the sender's. A block from layer 0 starts from token embeddings."""
    theirs = prefill(sender, ids)
    ours = prefill(receiver, ids[:, :own]).kv if own else [_cut(kv, 0, 0) for kv in theirs.kv]
    recomputed: dict[int, KV] = {}
    if len(block):
        embeddings = receiver.get_input_embeddings()(ids)
        entering = correct(theirs.e[block.start]) if block.start > 0 else embeddings
        recomputed = recompute(receiver, entering[:, own:], block, ours)
    num_tokens = ids.shape[1]
    loaded = [
        _join(our_kv, _cut(their_kv, own, num_tokens))
        for our_kv, their_kv in zip(ours, theirs.kv, strict=True)
    ]
    return [recomputed.get(layer, loaded[layer]) for layer in range(len(loaded))]


@torch.no_grad()
def decode(
    receiver: PreTrainedModel, prefix: Sequence[KV], suffix_ids: Tensor, max_new: int
) -> Generated:
    """Prefill `suffix_ids` (at least one token) over the prefix's KV, then decode greedily."""
    cache = DynamicCache(prefix, config=receiver.config)
    generated = Generated([], [], [])
    ids = suffix_ids
    for _ in range(max_new):
        output = receiver(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logprobs = output.logits[0, -1].float().log_softmax(-1)
        best, second = logprobs.topk(2).values.tolist()
        generated.ids.append(int(logprobs.argmax()))
        generated.logprobs.append(best)
        generated.margins.append(best - second)
        ids = torch.tensor([[generated.ids[-1]]], device=suffix_ids.device)
    return generated


def generate(
    receiver: PreTrainedModel,
    sender: PreTrainedModel,
    prefix_ids: Tensor,
    suffix_ids: Tensor,
    block: Span,
    max_new: int,
) -> Generated:
    """Decode the receiver's answer over a prefix with KV from a partial prefill.

    If the receiver already has the first `own` tokens, call `decode` on
    `partial_prefill(..., own)`.
    """
    prefix = partial_prefill(receiver, sender, prefix_ids, block)
    return decode(receiver, prefix, suffix_ids, max_new)


def _kv_of(cache: DynamicCache) -> tuple[KV, ...]:
    return tuple((layer.keys, layer.values) for layer in cache.layers)


def _cut(kv: KV, start: int, stop: int) -> KV:
    """Return the KV of the tokens from `start` to before `stop`."""
    return kv[0][:, :, start:stop], kv[1][:, :, start:stop]


def _join(first: KV, second: KV) -> KV:
    return torch.cat([first[0], second[0]], 2), torch.cat([first[1], second[1]], 2)


def _refuse_sliding_window(model: PreTrainedModel) -> None:
    window = getattr(model.config, "sliding_window", None)
    if window:
        raise ValueError(f"the oracle knows no sliding windows; the model has one of {window}")
