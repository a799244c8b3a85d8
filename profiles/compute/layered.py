"""A transformers decoder taken apart: run any span of its layers, over any keys and values.

It works for models with decoder layers named like Llama's (`models.ARCHITECTURES`), without sliding
windows, with SDPA attention, in any dtype, on any device. Results that outlast a call are in host
memory, one tensor per layer. All else is on the model's device.

For every row of a batch, attention sees:

    # [0, past)             keys and values of the prefix, shared by all rows        ┐
    # [past, past + tail)   keys and values of the row's earlier tokens              ├ GrowingKV
    # then                  the row's new tokens, causally                           ┘
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from cachetree import ConfigError, Span

KV = tuple[Tensor, Tensor]
"""Keys (after the rotation) and values of one layer: `[rows, kv_heads, tokens, head_dim]` each."""

PrefixKV = Sequence[KV | None]
"""KV of one prefix at each layer, with one row. None at a layer at which this source has no KV."""

HOST: Final = torch.device("cpu")

ROUNDING: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference of logits by rounding, as a share of the largest logit, for each dtype."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The result of one model's pass over a prefix: KV of all layers, and E at the requested
    layers.

    E is the residual stream entering a layer, `[1, tokens, hidden]`.
    """

    kv: tuple[KV, ...]
    e: dict[int, Tensor]


class GrowingKV:
    """One layer's KV for the rows of a batch. Each row begins with a copy of the shared past, and
    has room for tokens of its own.

    Attention reads this buffer in place, so a new token needs no copy of earlier tokens. A new
    token overwrites a wrong guess at its place.
    """

    def __init__(self, past: KV, num_rows: int, room: int) -> None:
        self._whole = []
        for tensor in past:
            _, heads, num_tokens, size = tensor.shape
            whole = tensor.new_empty(num_rows, heads, num_tokens + room + 1, size)
            whole[:, :, :num_tokens] = tensor
            whole[:, :, num_tokens:] = 0  # Unwritten places must be finite; their weight is 0.
            self._whole.append(whole)

    def begin(self, num_rows: int, placement: Placement) -> GrowingKV:
        """Set where `update` will store the new tokens of the first `num_rows` rows."""
        self._num_rows, self._placement = num_rows, placement
        return self

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> KV:
        rows = torch.arange(self._num_rows, device=keys.device)[:, None]
        for whole, new in zip(self._whole, (keys, values), strict=True):
            whole[rows, :, self._placement.columns] = new.transpose(1, 2)
        num_keys = self._placement.mask.shape[-1]
        read_keys, read_values = (it[: self._num_rows, :, :num_keys] for it in self._whole)
        return read_keys, read_values


@dataclass(frozen=True, slots=True)
class Placement:
    """Positions of new tokens, and the tokens to which they attend. They are the same in every
    layer of a forward."""

    positions: Tensor
    columns: Tensor
    """Columns of a `GrowingKV` for the new tokens' keys and values. Padding goes to the last
    column, which no token reads."""
    rotary: tuple[Tensor, Tensor]
    mask: Tensor

    def of_rows(self, rows: Tensor) -> Placement:
        """Return the placement of these rows of the batch."""
        cos, sin = self.rotary
        rotary = cos[rows], sin[rows]
        return Placement(self.positions[rows], self.columns[rows], rotary, self.mask[rows])


class LayeredModel:
    """Runs spans of a model's layers, and computes no more than the caller asks for."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.layers = model.model.layers
        self.num_layers = len(self.layers)
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.kv_bytes = 2 * kv_heads * head_dim * self.dtype.itemsize
        """Bytes of KV of one token at one layer."""
        self.e_bytes = config.hidden_size * self.dtype.itemsize
        """Bytes of E of one token."""
        of_layer = sum(it.numel() for it in self.layers[0].parameters())
        self.head_layers = model.get_input_embeddings().weight.numel() / of_layer
        """Work of the output head for one token, relative to the work of one layer."""

    def embed(self, ids: Tensor) -> Tensor:
        """Embed `[rows, tokens]` as `[rows, tokens, hidden]`."""
        return self.model.get_input_embeddings()(ids.to(self.device))

    @torch.inference_mode()
    def prefix(self, ids: Sequence[int], e_layers: Collection[int]) -> Prefix:
        """Compute the model's own KV for a prefix, and its E at `e_layers`."""
        entering = self.embed(torch.tensor([list(ids)]))
        kv, e = self._run(entering, Span(0, self.num_layers), e_layers)
        return Prefix(tuple(kv.values()), e)

    @torch.inference_mode()
    def recompute(self, entering: Tensor, layers: Span) -> PrefixKV:
        """Compute KV of `layers` from the residual stream `[1, tokens, hidden]` that enters the
        first of them."""
        kv, _ = self._run(entering.to(self.device), layers, ())
        return [kv.get(layer) for layer in range(self.num_layers)]

    @torch.inference_mode()
    def through(self, hidden: Tensor, layers: Iterable[int]) -> tuple[Tensor, list[KV]]:
        """Run full layers over a prefix, one after the other. Their KV stays on the device."""
        positions, rotary = self._begin(hidden)
        made = []
        for layer in layers:
            cache = _Keep()
            hidden = self._call(layer, hidden, None, positions, rotary, cache)
            made.append(cache.kv)
        return hidden, made

    @torch.inference_mode()
    def kv_alone(self, hidden: Tensor, layer: int) -> KV:
        """Compute only a layer's keys and values for a prefix. Both stay on the device."""
        cache = _OnlyKV()
        with contextlib.suppress(_Enough):
            self._call(layer, hidden, None, *self._begin(hidden), cache)
        return cache.kv

    def _run(
        self, hidden: Tensor, layers: Span, e_layers: Collection[int]
    ) -> tuple[dict[int, KV], dict[int, Tensor]]:
        """Return KV of `layers`, and E at `e_layers`. Keys are layers. The last layer computes only
        K and V."""
        made, e = {}, {}
        for layer in layers:
            if layer in e_layers:
                e[layer] = hidden.to(HOST)
            if layer == layers.stop - 1:
                keys, values = self.kv_alone(hidden, layer)
            else:
                hidden, [(keys, values)] = self.through(hidden, [layer])
            made[layer] = keys.to(HOST), values.to(HOST)
        return made, e

    def _begin(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the positions of a whole prefix's tokens, and RoPE's sines and cosines."""
        positions = torch.arange(hidden.shape[1], device=self.device)[None]
        return positions, self._rotary(hidden, positions)

    @torch.inference_mode()
    def blend(self, ids: Sequence[int], counts: Sequence[int], past: PrefixKV) -> list[KV]:
        """Compute a prefix's KV as CacheBlend does (EuroSys '25, §4.3). Layer i recomputes
        `counts[i]` tokens; counts never rise from layer to layer.

        A layer recomputes the tokens with the largest difference between new KV and `past` at the
        layer before. If no token differed, it recomputes the same tokens as the layer before. For
        all tokens that a layer does not recompute, attention reads `past`.
        """
        hidden = self.embed(torch.tensor([list(ids)]))
        chosen = torch.arange(len(ids), device=self.device)
        deviation = torch.zeros(len(ids), device=self.device)
        made = []
        for layer, num_kept in enumerate(counts):
            theirs = self.kv_of(past, layer)
            if num_kept < len(chosen) and (not num_kept or bool(deviation.any())):
                most = deviation.topk(num_kept).indices.sort().values
                chosen, hidden = chosen[most], hidden[:, most]
            cache = _Replace(theirs, chosen)
            if len(chosen):
                seen = torch.arange(len(ids), device=self.device)[None] <= chosen[:, None]
                rotary = self._rotary(hidden, chosen[None])
                mask = self._additive(seen[None])
                hidden = self._call(layer, hidden, mask, chosen[None], rotary, cache)
            ours = [it[:, :, chosen].float() for it in cache.kv]
            loaded = [it[:, :, chosen].float() for it in theirs]
            deviation = sum(
                (a - b).square().sum((0, 1, 3)) for a, b in zip(ours, loaded, strict=True)
            )
            made.append((cache.kv[0].to(HOST), cache.kv[1].to(HOST)))
        return made

    def place(self, num_past: int, num_kept: Sequence[int], num_new: Sequence[int]) -> Placement:
        """Return the placement of new tokens, behind the shared past and each row's earlier tokens.

        Row i has `num_kept[i]` earlier tokens and `num_new[i]` new ones. Its other columns, up to
        the longest row's, are padding; no result depends on them.
        """
        first, length = (
            torch.tensor(it, device=self.device)[:, None] for it in (num_kept, num_new)
        )
        offsets = torch.arange(max(num_new), device=self.device)[None]
        is_token, places = offsets < length, num_past + first + offsets
        positions = places.where(is_token, 0)
        num_keys = num_past + int((first + length).max())
        seen = torch.arange(num_keys, device=self.device) <= positions[..., None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        rotary = self._rotary(like, positions)
        return Placement(positions, places.where(is_token, -1), rotary, self._additive(seen))

    def step(self, layer: int, hidden: Tensor, seen: GrowingKV, placement: Placement) -> Tensor:
        """Run one layer over new tokens `[rows, new, hidden]`, and store their KV in `seen`.

        The placement has as many rows as `hidden`, or one row that holds for all.
        """
        cache = seen.begin(len(hidden), placement)
        return self._call(
            layer, hidden, placement.mask, placement.positions, placement.rotary, cache
        )

    def kv_of(self, source: PrefixKV, layer: int) -> KV:
        """Return a source's KV of one layer on the model's device."""
        keys, values = source[layer]
        return keys.to(self.device), values.to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocabulary]` in float32 for `[..., hidden]` after the last layer."""
        return self.model.lm_head(self.model.model.norm(hidden)).float()

    def _call(
        self,
        layer: int,
        hidden: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        rotary: Any,
        cache: Any,
    ) -> Tensor:
        return self.layers[layer](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            position_embeddings=rotary,
            past_key_values=cache,
        )

    def _rotary(self, hidden: Tensor, positions: Tensor) -> Any:
        return self.model.model.rotary_emb(hidden, position_ids=positions)

    def _additive(self, seen: Tensor) -> Tensor:
        """Turn `[rows, queries, keys]`, true if a query sees a key, into a mask that is added."""
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill(~seen, torch.finfo(self.dtype).min)[:, None]


def check_layers(model: LayeredModel, ids: Sequence[int]) -> None:
    """Raise ConfigError if logits computed layer by layer differ from the logits of the model's own
    forward in the installed transformers.

    `ids` has at least two tokens.
    """
    half = len(ids) // 2
    with torch.inference_mode():
        whole = torch.tensor([list(ids)], device=model.device)
        expected = model.model(input_ids=whole, logits_to_keep=1).logits[0, -1]
        kv = model.prefix(ids[:half], ()).kv
        hidden = model.embed(torch.tensor([list(ids[half:])]))
        placement = model.place(half, [0], [len(ids) - half])
        for layer in range(model.num_layers):
            seen = GrowingKV(model.kv_of(kv, layer), 1, len(ids) - half)
            hidden = model.step(layer, hidden, seen, placement)
        distance = (model.logits(hidden[0, -1]) - expected.float()).abs().max()
    allowed = ROUNDING[model.dtype] * expected.float().abs().max()
    if not distance <= allowed:
        raise ConfigError(
            f"layer by layer, {type(model.model).__name__} gives logits that are {distance:.3g} "
            f"from its own forward's (allowed: {allowed:.3g}) with transformers "
            f"{transformers.__version__}; use another release, or another dtype"
        )


class _Enough(Exception):
    """Raised once a layer's keys and values exist, because the rest of the layer is not needed."""


class _Keep:
    """A cache of one layer. It is empty at first, and keeps the keys and values that it gets."""

    kv: KV

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> KV:
        self.kv = (keys, values)
        return self.kv


class _OnlyKV(_Keep):
    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> KV:
        super().update(keys, values)
        raise _Enough


class _Replace(_Keep):
    """A cache of one layer that puts new KV of some tokens into the KV of a whole prefix."""

    def __init__(self, past: KV, chosen: Tensor) -> None:
        self.kv, self._chosen = past, chosen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> KV:
        past_keys, past_values = self.kv
        return super().update(
            past_keys.index_copy(2, self._chosen, keys),
            past_values.index_copy(2, self._chosen, values),
        )
