"""Maps of KV are what least squares gives, and a sender with mapped KV is otherwise unchanged."""

from __future__ import annotations

import torch
from test_stale_kv import CONFIG, PREFIX, tiny
from torch import Tensor

from benchmarks.kv_maps import MappedSender, fit_kv, fitted, mapped_kv, row, work
from cachetree import Span
from cachetree.corrections import Correction
from profiles.compute.layered import KV, LayeredModel
from profiles.compute.study import DocumentPasses
from profiles.stats.measured import NO_BLOCK, Candidate, Score

MODEL = LayeredModel(tiny(0.0))
SHAPE = 1, CONFIG.num_key_value_heads, 40, CONFIG.hidden_size // CONFIG.num_attention_heads


def turned(keys: Tensor, sign: float) -> Tensor:
    """Rotate keys to their positions, or back, pair by pair of a head's columns."""
    half = keys.shape[-1] // 2
    angles = torch.arange(keys.shape[2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), sign * angles.sin()
    first, second = keys[..., :half], keys[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def related(seed: int) -> tuple[list[KV], list[KV]]:
    """Return KV of two models. At each layer the second is linear in the first, except for the
    first token, which is unrelated and large."""
    drawn = torch.Generator().manual_seed(seed)
    theirs, own = [], []
    for layer in range(MODEL.num_layers):
        keys, values = (torch.randn(SHAPE, generator=drawn) for _ in range(2))
        change = torch.randn(32, 32, generator=torch.Generator().manual_seed(layer)) / 10
        flat = torch.cat([it[0].transpose(0, 1).flatten(1) for it in (keys, values)], 1)
        moved = flat + flat @ change + 0.1 * layer
        moved[0] = 1_000 * torch.randn(32, generator=drawn)
        parts = [it.view(40, 2, 8).transpose(0, 1)[None] for it in moved.chunk(2, 1)]
        theirs.append((turned(keys, 1), values))
        own.append((turned(parts[0], 1), parts[1]))
    return theirs, own


def test_maps_find_a_linear_relation_and_take_the_first_token_from_the_receiver():
    maps = fit_kv(MODEL, (related(seed) for seed in range(8)))
    theirs, own = related(99)
    for mapped, exact, loaded in zip(mapped_kv(MODEL, maps, theirs, own), own, theirs, strict=True):
        for ours, right, before in zip(mapped, exact, loaded, strict=True):
            assert torch.equal(ours[:, :, 0], right[:, :, 0])
            assert (ours - right).abs().max() < 0.01 < (before - right)[:, :, 1:].abs().max()


def test_a_mapped_sender_is_its_model_except_for_the_kv():
    """Maps that add nothing leave a sender's KV and E, except for the first token's KV."""
    sender = LayeredModel(tiny(0.3))
    nothing = [Correction(torch.zeros(32), torch.zeros(32, 32))] * MODEL.num_layers
    plain, own = sender.prefix(PREFIX, [1]), MODEL.prefix(PREFIX, []).kv
    made = MappedSender(sender, MODEL, nothing).prefix(PREFIX, [1])
    assert torch.equal(made.e[1], plain.e[1])
    for mapped, loaded, exact in zip(made.kv, plain.kv, own, strict=True):
        for ours, theirs, right in zip(mapped, loaded, exact, strict=True):
            torch.testing.assert_close(ours[:, :, 1:], theirs[:, :, 1:])
            torch.testing.assert_close(ours[:, :, :1], right[:, :, :1])


def test_maps_of_a_stopped_run_are_read_again(tmp_path):
    models, file = (LayeredModel(tiny(0.3)), MODEL), tmp_path / "maps"
    passes = [DocumentPasses(*models, range(it, it + 24), [1], [1]) for it in range(1, 9)]
    fresh = fitted(passes, [1], file)
    for first, again in zip(fresh, fitted([], [], file), strict=True):
        assert first.keys() == again.keys()
        assert all(first[it].named(it) == again[it].named(it) for it in first)
    assert [*fresh[0]] == [0, 1, 2] and [*fresh[1]] == [1]


def test_work_counts_products_of_a_token():
    sizes = {"tokens": 10, "num_layers": 4, "size": (900, 10, 6)}
    block = Candidate(runs=(Span(1, 3),))
    assert work(NO_BLOCK, 0, **sizes) == 0
    assert work(NO_BLOCK, 4, **sizes) == 4 * 36 / 4_000
    assert work(block, 0, **sizes) == (1_000 + 60) / 4_000
    assert work(block, 2, **sizes) == (1_000 + 60 + 2 * 36) / 4_000


def test_a_row_has_the_gates_verdict_and_the_guards_delay():
    near, far = ([Score(kl=it, tv=it, quality=1.0)] for it in (0.01, 0.9))
    full = [[1.0]] * 100
    good = row(full, [near] * 80, [far] * 4, 0.05, num_runs=20)
    assert good["contexts"] == 80 and good["lost"] == [0, 0, 0]
    assert good["proven_after"] is not None and good["allowed"] < 0.1
    assert good["foreign_tv"] == [0.9, 0.9, 0.9]
    assert all(it["within_200"] > 0.5 for it in good["found"].values())
