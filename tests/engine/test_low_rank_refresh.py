"""A refresh in low rank against the layer's own projection: without a server, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import assert_differ_by_rounding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.lora.layers import QKVParallelLinearWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from torch import Tensor, nn

from cachetree.ids import EMPTY_SPAN, ModelId, Span
from cachetree.planning.plan import Match, Plan
from profiles.random_models import shape, write_adapter, write_models
from sglang_droidspeak.adapters.factors import SharedA, shared_a
from sglang_droidspeak.adapters.models import LoadedModel, Models
from sglang_droidspeak.engine.layers import LayerStack
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.low_rank import LowRank
from sglang_droidspeak.store.capture import EPool
from sglang_droidspeak.store.pool import pool_of

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

    def share(self, other: Adapter) -> None:
        """Take its A, as far as this one has any."""
        rows, theirs = ROWS["k_proj"], other.layers[LAYER].weights["qkv_proj.lora_A.weight"]
        mine = self.layers[LAYER].weights
        is_kept = mine["qkv_proj.lora_A.weight"].any(1, keepdim=True)
        mine["qkv_proj.lora_A.weight"] = torch.where(is_kept, theirs, 0.0)
        matrices = zip(
            ROWS,
            mine["qkv_proj.lora_A.weight"].chunk(3),
            mine["qkv_proj.lora_B.weight"].split([ROWS["q_proj"], rows, rows]),
            strict=True,
        )
        self.products = {name: self.scaling * b @ a for name, a, b in matrices}


class Layer(nn.Module):
    """One rank's part of a decoder layer, as far as it matters here."""

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
        self.attn_boundary = SimpleNamespace(prepare=self._prepare)

    def _prepare(self, hidden: Tensor, forward_batch: Any, *, capture: Any = None) -> None:
        if capture is not None:
            capture(hidden)

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
        padded = torch.cat([self.e, torch.randn(3, HIDDEN)])
        self.layer.attn_boundary.prepare(padded, SimpleNamespace(out_cache_loc=source))
        plan = Plan(
            sender=ModelId(sender),
            receiver=ModelId(receiver),
            location=pool_of(sender),
            pages=PAGES,
            block=EMPTY_SPAN,
            refreshed=(LAYER,),
            num_layers=LAYER + 1,
        )
        assert self.low_rank.can_refresh(plan.sender, plan.receiver, LAYER)
        self.low_rank.refresh(plan, LAYER, source, target, TOKENS)
        for buffer, rows in zip(self.buffers, self.kv(sender), strict=True):
            assert torch.equal(buffer[source], rows), "the sender's own is as it was"
        return tuple(buffer[target] for buffer in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.pool.k_buffer[LAYER], self.pool.v_buffer[LAYER]


@torch.no_grad()
def rig(
    tp_rank: int = 0, tp_size: int = 1, shared: SharedA | None = None, **others: Adapter
) -> Rig:
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
    e_pool = EPool((LAYER,), {LAYER: shared} if shared else {}, NUM_SLOTS, Span(0, HIDDEN), runner)
    e_pool.capture_from(stack)
    attachment = SimpleNamespace(runner=runner, stack=stack, e_pool=e_pool)
    return Rig(
        low_rank=LowRank(attachment, models, CHUNK, Ranks(None)),
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
        assert_differ_by_rounding(mine, expected, terms=HIDDEN)
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
        Ranks(None),
    )
    assert not low_rank.can_refresh(ModelId(BASE), ModelId("wide"), LAYER)


def test_factors_go_with_their_adapter() -> None:
    it = rig()
    assert it.low_rank.can_refresh(ModelId(BASE), ModelId("wide"), LAYER)
    assert len(it.low_rank._known) == 1
    del it.adapters["wide"]  # type: ignore[attr-defined]
    assert len(it.low_rank._known) == 0


def sharing() -> tuple[SharedA, dict[str, Adapter]]:
    """Adapters with one A, and that."""
    torch.manual_seed(8)
    one, other, partly = Adapter(8), Adapter(8), Adapter(8, ("q_proj", "v_proj"))
    for it in (other, partly):
        it.share(one)
    _, k, v = one.layers[LAYER].weights["qkv_proj.lora_A.weight"].chunk(3)
    return SharedA(k, v), {"one": one, "other": other, "partly": partly}


@pytest.mark.parametrize(
    ("sender", "receiver"), [("one", "other"), (BASE, "one"), ("partly", BASE), ("one", "partly")]
)
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (1, 2)])
@torch.no_grad()
def test_what_is_kept_in_place_of_e_is_enough(
    sender: str, receiver: str, tp_rank: int, tp_size: int
) -> None:
    shared, adapters = sharing()
    it = rig(tp_rank, tp_size, shared, **adapters)
    pool = it.low_rank._e_pool
    assert (pool.e, pool.reduced[LAYER].shape) == ({}, (NUM_SLOTS, 16))
    found = it.refreshed(sender, receiver)
    for mine, expected in zip(found, it.kv(receiver), strict=True):
        assert_differ_by_rounding(mine, expected, terms=HIDDEN)


def test_only_refreshes_begin_there_and_only_for_that_a() -> None:
    shared, adapters = sharing()
    it = rig(shared=shared, **adapters)

    def told(sender: str, receiver: str) -> Match:
        noted = Match(
            model=ModelId(sender), location=pool_of(sender), num_pages=3, e_pages={LAYER: 3}
        )
        return it.low_rank.of_pool(noted, ModelId(receiver))

    assert (told("one", "other").e_pages, told("one", "other").reduced_pages) == ({}, {LAYER: 3})
    assert told(BASE, "mlp").reduced_pages == {LAYER: 3}, "it touches neither K nor V"
    for pair in (("one", "wide"), ("narrow", "one"), (BASE, "gone")):
        assert (told(*pair).e_pages, told(*pair).reduced_pages) == ({}, {})


def test_what_is_adopted_goes_along() -> None:
    shared, adapters = sharing()
    pool = rig(shared=shared, **adapters).low_rank._e_pool
    source, slots = torch.tensor([1, 2]), torch.tensor([7, 8])
    pool.reduced[LAYER][source] = 5.0
    pool.adopt(source, slots, first_own=LAYER)
    assert not pool.reduced[LAYER][slots].any()
    pool.adopt(source, slots, first_own=LAYER + 1)
    assert bool((pool.reduced[LAYER][slots] == 5.0).all())


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    config = shape("llama", layers=2, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS)
    (path,) = write_models(tmp_path_factory.mktemp("base"), config, ["base"])
    return path


@pytest.mark.parametrize(
    ("made", "num_shared"),
    [
        ([{}], (4, 4)),
        ([{}, {"a_of": 0}], (4, 4)),
        ([{}, {"a_of": 0, "modules": ("q_proj", "v_proj")}], (4, 4)),
        ([{"modules": ("q_proj", "v_proj")}], (0, 4)),
        ([{}, {"a_of": 0}, {}], None),
        ([{}, {"a_of": 0}, {"rank": 8, "modules": ("q_proj", "v_proj")}], None),
        ([{"modules": ("up_proj",)}], None),
        ([], None),
    ],
)
def test_a_is_shared_where_all_have_the_same(
    base: Path, tmp_path: Path, made: list[dict[str, Any]], num_shared: tuple[int, int] | None
) -> None:
    """By the bytes of the files. Nothing is where no adapter touches K or V."""
    adapters: list[Path] = []
    for seed, options in enumerate(made):
        a_of = {"a_of": adapters[0]} if "a_of" in options else {}
        folder = tmp_path / str(seed)
        adapters.append(write_adapter(folder, base, **(options | a_of), seed=seed))
    server = SimpleNamespace(
        adapters=adapters,
        refreshed_layers=frozenset({LAYER}),
        identity=SimpleNamespace(hidden_size=HIDDEN),
    )
    layer = Layer(0, 1)
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer]))
    found = {at: (len(it.k), len(it.v)) for at, it in shared_a(server, model).items()}
    assert found == ({} if num_shared is None else {LAYER: num_shared})
    layer.self_attn.k_norm = None
    assert shared_a(server, model) == {}
