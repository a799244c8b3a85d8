"""A refresh in low rank against the layer's own projection: without a server, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.lora.layers import QKVParallelLinearWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from torch import Tensor, nn

from cachetree.ids import EMPTY_SPAN, ModelId, Span
from cachetree.plan import Plan
from sglang_droidspeak.job import Job
from sglang_droidspeak.layers import LayerStack
from sglang_droidspeak.low_rank import LowRank
from sglang_droidspeak.models import LoadedModel, Models
from sglang_droidspeak.pool import PoolPages, pool_of

HIDDEN, HEADS, KV_HEADS, HEAD = 64, 4, 2, 16
PAGE, PAGES = 4, Span(1, 4)
TOKENS = Span(PAGES.start * PAGE, PAGES.stop * PAGE)
NUM_SLOTS, CHUNK = 40, 5
LAYER = 1
BASE = "base"
ADAPTERS = {
    "wide": {"rank": 8},
    "narrow": {"rank": 4, "modules": ("q_proj", "v_proj")},
    "mlp": {"rank": 4, "modules": ()},
}
ROWS = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}


class Adapter(nn.Module):
    """As SGLang keeps one, and what it adds to each whole matrix."""

    def __init__(self, rank: int, modules: Sequence[str] = tuple(ROWS), *more: str) -> None:
        super().__init__()
        self.scaling = 2.0
        weights: dict[str, Tensor] = {}
        self.products = {name: torch.zeros(rows, HIDDEN) for name, rows in ROWS.items()}
        for name in modules:
            a, b = torch.randn(rank, HIDDEN) / 8, torch.randn(ROWS[name], rank) / 8
            weights |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            self.products[name] = self.scaling * b @ a
            weights |= {f"{name}.{each}": torch.randn(ROWS[name]) for each in more}
        LoRAAdapter.normalize_qkv_proj(self, list(weights), weights)
        self.layers = [SimpleNamespace(weights=weights) for _ in range(LAYER + 1)]


class Layer(nn.Module):
    """One rank's part of a decoder layer, as far as it matters here."""

    attn_boundary = None

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        nn.init.normal_(self.input_layernorm.weight, mean=1.0)
        group = SimpleNamespace(rank_in_group=tp_rank, world_size=tp_size)
        base = SimpleNamespace(
            q_proj_shard_size=ROWS["q_proj"] // tp_size,
            kv_proj_shard_size=max(HEAD, ROWS["k_proj"] // tp_size),
            num_kv_head_replicas=max(1, tp_size // KV_HEADS),
            tp_group=group,
            kv_tp_group=group,
            total_num_heads=HEADS,
            total_num_kv_heads=KV_HEADS,
            head_size=HEAD,
        )
        projection = SimpleNamespace(base_layer=base)
        projection.slice_lora_b_weights = lambda b: QKVParallelLinearWithLoRA.slice_lora_b_weights(
            projection, b
        )
        rotary = RotaryEmbedding(HEAD, HEAD, 64, 10000, True, torch.float32)
        self.self_attn = SimpleNamespace(qkv_proj=projection, rotary_emb=rotary)

    def forward(self, positions, hidden_states, forward_batch) -> None:
        raise NotImplementedError


@dataclass
class Rig:
    """A layer of one rank whose pool holds the sender's KV and E of some tokens."""

    low_rank: LowRank
    layer: Layer
    pool: Any
    e: Tensor
    heads: slice
    """Of the KV heads, this rank's."""
    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    adapters: Mapping[str, Adapter]

    def kv(self, name: str) -> tuple[Tensor, Tensor]:
        """What a model's whole matrices make of E, as this rank's heads."""
        x = self.layer.input_layernorm(self.e)
        k, v = (self._projected(x, name, it) for it in ("k_proj", "v_proj"))
        k = self.layer.self_attn.rotary_emb(torch.tensor(list(TOKENS)), k.clone(), k)[1]
        return tuple(it.view(-1, KV_HEADS, HEAD)[:, self.heads] for it in (k, v))

    def _projected(self, x: Tensor, name: str, matrix: str) -> Tensor:
        adapter = self.adapters.get(name)
        added = 0.0 if adapter is None else adapter.products[matrix]
        return x @ (self.weights[matrix] + added).T + self.biases[matrix]

    def refreshed(self, sender: str, receiver: str) -> tuple[Tensor, Tensor]:
        """The receiver's KV out of the sender's."""
        slots = torch.randperm(NUM_SLOTS)[: 2 * len(TOKENS)]
        source, target = slots.chunk(2)
        for buffer, rows in zip(self.buffers, self.kv(sender), strict=True):
            buffer[source] = rows
        self.low_rank._e_pool.e[LAYER][source] = self.e
        plan = Plan(
            sender=ModelId(sender),
            receiver=ModelId(receiver),
            location=pool_of(sender),
            pages=PAGES,
            block=EMPTY_SPAN,
            refreshed=(LAYER,),
            num_layers=LAYER + 1,
        )
        job = Job(
            rid="1",
            plan=plan,
            staging=PoolPages(slots=source),
            pages=PAGES,
            slots=target,
            page_size=PAGE,
            match_s=0.0,
            queued_s=0.0,
        )
        assert self.low_rank.can_refresh(plan.sender, plan.receiver, LAYER)
        self.low_rank.refresh(job, LAYER, TOKENS)
        for buffer, rows in zip(self.buffers, self.kv(sender), strict=True):
            assert torch.equal(buffer[source], rows), "the sender's own is as it was"
        return tuple(buffer[target] for buffer in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.pool.k_buffer[LAYER], self.pool.v_buffer[LAYER]


@torch.no_grad()
def rig(tp_rank: int = 0, tp_size: int = 1, **others: Adapter) -> Rig:
    torch.manual_seed(7)
    layers = nn.ModuleList(Layer(tp_rank, tp_size) for _ in range(LAYER + 1))
    stack = LayerStack(SimpleNamespace(model=SimpleNamespace(layers=layers)))
    adapters = {name: Adapter(**made) for name, made in ADAPTERS.items()} | others
    num_heads = max(1, KV_HEADS // tp_size)
    first = tp_rank // max(1, tp_size // KV_HEADS) * num_heads
    buffers = [
        {layer: torch.randn(NUM_SLOTS, num_heads, HEAD) for layer in range(LAYER + 1)} for _ in "kv"
    ]
    pool = SimpleNamespace(k_buffer=buffers[0], v_buffer=buffers[1])
    models = Models(ModelId(BASE), LAYER + 1, lambda folder: ModelId(folder.name))
    models._loaded |= {name: LoadedModel(ModelId(name), None) for name in adapters}
    runner = SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        token_to_kv_pool=pool,
        lora_manager=SimpleNamespace(loras=adapters),
    )
    e_pool = SimpleNamespace(e={LAYER: torch.randn(NUM_SLOTS, HIDDEN)})
    attachment = SimpleNamespace(runner=runner, stack=stack, e_pool=e_pool)
    return Rig(
        low_rank=LowRank(attachment, models, CHUNK),
        layer=layers[LAYER],
        pool=pool,
        e=torch.randn(len(TOKENS), HIDDEN),
        heads=slice(first, first + num_heads),
        weights={name: torch.randn(rows, HIDDEN) / 8 for name, rows in ROWS.items()},
        biases={name: torch.randn(rows) for name, rows in ROWS.items()},
        adapters=adapters,
    )


PAIRS = [
    (BASE, "wide"),
    ("wide", BASE),
    ("wide", "narrow"),
    ("narrow", "wide"),
    (BASE, "narrow"),
    ("mlp", "wide"),
]


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
@torch.no_grad()
def test_it_is_the_receivers_own_projection(
    sender: str, receiver: str, tp_rank: int, tp_size: int
) -> None:
    it = rig(tp_rank, tp_size)
    found, theirs = it.refreshed(sender, receiver), it.kv(sender)
    for name, mine, expected, before in zip(
        ("k_proj", "v_proj"), found, it.kv(receiver), theirs, strict=True
    ):
        assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-5)
        is_touched = any(
            bool(it.adapters[each].products[name].any())
            for each in (sender, receiver)
            if each != BASE
        )
        assert torch.equal(mine, before) != is_touched


@torch.no_grad()
def test_models_equal_there_keep_the_senders() -> None:
    it = rig()
    for mine, theirs in zip(it.refreshed(BASE, "mlp"), it.kv(BASE), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_more_than_factors_is_projected_anew() -> None:
    biased = Adapter(4, tuple(ROWS), "lora_B.bias")
    it = rig(biased=biased)
    assert not it.low_rank.can_refresh(ModelId(BASE), ModelId("biased"), LAYER)
    assert not it.low_rank.can_refresh(ModelId("biased"), ModelId("wide"), LAYER)
    assert not it.low_rank.can_refresh(ModelId(BASE), ModelId("gone"), LAYER)
    assert not it.low_rank.can_refresh(ModelId(BASE), ModelId("wide"), 0), "no E is kept there"


@pytest.mark.parametrize("change", [{"k_norm": None}, {"rotary_emb": SimpleNamespace()}])
def test_nor_is_k_that_is_more_than_a_projection_and_a_rotation(change: dict[str, Any]) -> None:
    it = rig()
    attention = it.low_rank._stack.attention(0)
    vars(attention).update(change)
    low_rank = LowRank(
        SimpleNamespace(
            runner=it.low_rank._runner, stack=it.low_rank._stack, e_pool=it.low_rank._e_pool
        ),
        it.low_rank._models,
        CHUNK,
    )
    assert not low_rank.can_refresh(ModelId(BASE), ModelId("wide"), LAYER)


def test_factors_go_with_their_adapter() -> None:
    it = rig()
    assert it.low_rank.can_refresh(ModelId(BASE), ModelId("wide"), LAYER)
    assert len(it.low_rank._known) == 1
    del it.adapters["wide"]  # type: ignore[attr-defined]
    assert len(it.low_rank._known) == 0
