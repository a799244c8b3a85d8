"""Maps of E are least-squares solutions, and the explained share is computed correctly."""

from __future__ import annotations

import pytest
import torch
from test_judging import SHIPPED, document_of

from benchmarks.oracle import prefill, recompute
from cachetree.corrections import Correction
from cachetree.ids import Span
from profiles.compute.fitting import PENALTIES, Moments, fit, fit_maps
from profiles.compute.layered import LayeredModel
from profiles.compute.study import DocumentPasses

HIDDEN = 24


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(seed: int, scatter: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E of the two models. The second differs by a map of rank 8, a bias, and noise."""
    x = 0.3 + drawn(seed, 400, HIDDEN)
    x[0] *= 1000  # As of the first token of many models.
    change = drawn(1, HIDDEN, 8) @ drawn(2, 8, HIDDEN) / 5
    return x, x + x @ change + drawn(3, HIDDEN) + scatter * drawn(seed + 50, 400, HIDDEN)


def moments(*seeds: int, scatter: float = 0.0) -> Moments:
    sums = Moments(HIDDEN)
    for seed in seeds:
        theirs, ours = rows(seed, scatter)
        sums.add(theirs[None], ours[None])
    return sums


def test_a_map_is_found_where_there_is_one():
    correction, explained = fit(moments(10, 11), moments(12))
    theirs, ours = rows(13)
    assert explained > 0.999
    error = (correction(theirs) - ours)[1:].square().mean()
    assert error < 1e-3 * (theirs - ours)[1:].square().mean()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_explained_share_equals_that_of_row_by_row(penalty):
    first, second = moments(10, 11, scatter=2.0), moments(12, scatter=2.0)
    correction = first.solve(penalty)
    theirs, ours = rows(12, 2.0)
    weight = 1 / theirs.square().mean(1, keepdim=True)
    left = (weight * (correction(theirs) - ours).square()).sum() / (
        weight * (theirs - ours).square()
    ).sum()
    assert second.explained(correction) == pytest.approx(1 - float(left), abs=1e-3)


def test_chance_is_not_fitted():
    """The penalty is chosen on other contexts, so noise that a map cannot predict is left alone."""
    first, second = Moments(HIDDEN), Moments(HIDDEN)
    for seed, part in ((20, first), (21, second)):
        x = drawn(seed, 60, HIDDEN)
        part.add(x, x + drawn(seed + 5, 60, HIDDEN))
    _, explained = fit(first, second)
    assert explained < 0.05


class _Passes:
    """Fake passes of one context, at one layer."""

    def __init__(self, seed: int, *, is_equal: bool = False) -> None:
        theirs, ours = rows(seed)
        self._both = theirs, theirs if is_equal else ours

    def e_of_both(self, _layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._both


def test_maps_have_the_models_dtype_and_a_name_by_their_content():
    contexts = (_Passes(seed) for seed in range(30, 38))
    ((named, correction),) = fit_maps(contexts, [5], torch.bfloat16, "cpu").items()
    assert (named.layer, named.dtype) == (5, "bfloat16")
    assert correction.bias.dtype == torch.bfloat16
    assert correction.named(5) == named


def test_equal_e_or_too_few_contexts_give_no_map():
    equal = [_Passes(seed, is_equal=True) for seed in range(30, 38)]
    few = [_Passes(seed) for seed in range(30, 33)]
    for contexts in (equal, few, []):
        assert fit_maps(contexts, [5], torch.float32, "cpu") == {}


def test_a_block_from_corrected_e_is_the_oracles():
    pair = SHIPPED[1].load()
    document, hidden = document_of(pair, 0), pair.receiver.config.hidden_size
    correction = Correction(drawn(1, hidden), drawn(2, hidden, hidden) / hidden)
    passes = DocumentPasses(
        LayeredModel(pair.sender),
        LayeredModel(pair.receiver),
        document.prefix,
        [3],
        corrections={"map": correction},
    )
    theirs = prefill(pair.sender, torch.tensor([document.prefix]))
    nothing = [(k[:, :, :0], v[:, :, :0]) for k, v in theirs.kv]
    e = theirs.e[3] + theirs.e[3] @ correction.matrix + correction.bias
    expected = recompute(pair.receiver, e, Span(3, 6), nothing)
    corrected, plain = passes.new(Span(3, 6), "map"), passes.new(Span(3, 6))
    for layer, (keys, values) in expected.items():
        for one, other, uncorrected in zip(
            corrected[layer], (keys, values), plain[layer], strict=True
        ):
            assert torch.allclose(one, other, atol=1e-4)
            assert not torch.allclose(one, uncorrected, atol=1e-2)


def test_e_is_corrected_on_the_receivers_device():
    """On a server with a GPU, the host would take many times as long for this as the recompute."""
    entered = []

    class OnMeta:
        device, num_layers = torch.device("meta"), 12

        def recompute(self, e: torch.Tensor, _layers: Span) -> list[object]:
            entered.append(e)
            return []

    sender = LayeredModel(SHIPPED[1].load().sender)
    hidden = sender.model.config.hidden_size
    maps = {"map": Correction(drawn(1, hidden), drawn(2, hidden, hidden))}
    DocumentPasses(sender, OnMeta(), range(8), [3], corrections=maps).new(Span(3, 6), "map")
    assert [(it.device.type, it.shape) for it in entered] == [("meta", (1, 8, hidden))]
