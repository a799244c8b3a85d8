"""Every supported family on a virtual device, with SGLang's own model: what is captured, loaded,
recomputed and stored there equals what plain transformers computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_on_cuda import MAP, PAGE, PEER, Engine, Part, fork, land, load, on_device, stored
from safetensors.torch import load_file, save_file
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from transformers import AutoModelForCausalLM
from virtual_cuda import VirtualCuda

from benchmarks.oracle import partial_prefill, prefill
from cachetree.clock import Deadline
from cachetree.ids import KV, Kind, Span, Step, part_of, steps_of
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.store.pool import PoolPages

FAMILIES = ["llama", "mistral", "phi3", "qwen2", "qwen3", "mixtral"]
FAMILIES += ["arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"]
BLOCK = Span(1, 3)
NUM_PREFIX = 2 * PAGE
TOKENS = random_prompt(NUM_PREFIX + 5, seed=1)
TOLERANCE = 1e-4


ALIKE = {"mistral", "phi3", "qwen2", "arcee", "glm4", "glm4_moe", "qwen2_moe", "qwen3_moe"}
"""Families with layers that pass the same values as the layers of llama, qwen3 and mixtral."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(it, marks=[pytest.mark.slow] * (it in ALIKE)) for it in FAMILIES],
)
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    config = shape(request.param, layers=4, hidden=64, heads=2, kv_heads=1)
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    sender, receiver = write_models(tmp_path_factory.mktemp("pair"), config, ["s", "r"])
    return sender, receiver


class StoredInFp8(LinearMethodBase):
    """Replace SGLang's own method for quantised weights, because its kernels need a device. The
    layer has no matrix to look at: it makes one of its stored values as it runs."""

    def __init__(self, layer: LinearBase) -> None:
        layer.stored = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
        del layer.weight

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.stored.to(x.dtype), bias)


def quantised(runner: Any) -> Any:
    layers = [it for it in runner.model.model.layers.modules() if isinstance(it, LinearBase)]
    assert layers
    for layer in layers:
        layer.quant_method = StoredInFp8(layer)
    return runner


def test_layers_whose_weights_are_quantised_equal_it_too(tmp_path):
    pair = write_models(
        tmp_path, shape("llama", layers=4, hidden=64, heads=2, kv_heads=1), ["s", "r"]
    )
    for path in pair:
        weights = load_file(path / "model.safetensors")
        for name in [it for it in weights if "_proj" in it]:
            weights[name] = weights[name].to(torch.float8_e4m3fn).float()
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    differences = fork(partial(play, *pair, quantised), dict[str, float])
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=TOLERANCE)


def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_what_happens_on_the_device_equals_the_oracle(pair):
    differences = fork(partial(play, *pair), dict[str, float])
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=TOLERANCE)
    assert len(differences) == 10


def play(sender, receiver, changed=lambda runner: runner):
    """Return how far each result is from the right result."""
    ids = torch.tensor([TOKENS])
    theirs = prefill(model_of(sender), ids[:, :NUM_PREFIX])
    ours = prefill(model_of(receiver), ids)
    expected = partial_prefill(model_of(receiver), model_of(sender), ids[:, :NUM_PREFIX], BLOCK)
    both = model_of(receiver), model_of(sender)
    corrected = partial_prefill(
        *both, ids[:, :NUM_PREFIX], BLOCK, correct=lambda e: e + e / 2 + 0.25
    )
    values = {Step(Kind.E, at): e[0] for at, e in enumerate(theirs.e)}
    values |= {Step(Kind.KV, at): stored(kv) for at, kv in enumerate(theirs.kv)}
    own = {Step(Kind.E, at): e[0, :NUM_PREFIX] for at, e in enumerate(ours.e)}
    own |= {Step(Kind.KV, at): stored(kv)[:NUM_PREFIX] for at, kv in enumerate(ours.kv)}
    own_kv = [stored(kv) for kv in ours.kv]
    expected_kv = [stored(kv) for kv in expected]
    corrected_kv = [stored(kv) for kv in corrected]
    distances = {}
    cuda = VirtualCuda()
    with on_device(changed(load(receiver)), receiver, (1,), cuda) as engine:
        first = engine.slots(PAGE, 3 * PAGE)
        engine.run(engine.batch(Part(TOKENS, first)))
        distances["own KV"] = max(engine.differences(first[: len(TOKENS)], own_kv))
        e = engine.e_pool.e[1][first[: len(TOKENS)]].cpu()
        distances["E"] = float((e - ours.e[1][0]).abs().max())

        slots = engine.slots(4 * PAGE, 3 * PAGE)
        request = engine.loading(slots[:NUM_PREFIX], BLOCK, cuda.page_locked(1 << 18), PEER)
        land(request.source.staging, {step: values[step] for step in request.plan.steps})
        assert engine.run_with([request], Part(TOKENS, slots, NUM_PREFIX)) == ["reused"]
        distances["loaded"] = max(engine.differences(slots[:NUM_PREFIX], expected_kv))

        # Of one batch, one request's E stays as it is, and the other's is corrected.
        plain, mapped = engine.slots(19 * PAGE, 3 * PAGE), engine.slots(22 * PAGE, 3 * PAGE)
        memory = [cuda.page_locked(1 << 18) for _ in range(2)]
        requests = [
            engine.loading(plain[:NUM_PREFIX], BLOCK, memory[0], PEER, "plain"),
            engine.loading(mapped[:NUM_PREFIX], BLOCK, memory[1], PEER, "mapped", MAP),
        ]
        for request in requests:
            land(request.source.staging, {step: values[step] for step in request.plan.steps})
        parts = (
            Part(TOKENS, plain, NUM_PREFIX, "plain"),
            Part(TOKENS, mapped, NUM_PREFIX, "mapped"),
        )
        assert engine.run_with(requests, *parts) == ["reused", "reused"]
        distances["beside a corrected one"] = max(
            engine.differences(plain[:NUM_PREFIX], expected_kv)
        )
        distances["corrected"] = max(engine.differences(mapped[:NUM_PREFIX], corrected_kv))

        slots = engine.slots(7 * PAGE, 3 * PAGE)
        pages = PoolPages(first[:NUM_PREFIX])
        request = engine.loading(slots[:NUM_PREFIX], BLOCK, pages)
        assert engine.run_with([request], Part(TOKENS, slots, NUM_PREFIX)) == ["reused"]
        distances["of the pool"] = max(engine.differences(slots[:NUM_PREFIX], own_kv))

        # Forwards recompute both: E of the one is on the host, of the other in the pool.
        one, other = engine.slots(10 * PAGE, 3 * PAGE), engine.slots(13 * PAGE, 3 * PAGE)
        staged = engine.loading(one[:NUM_PREFIX], BLOCK, cuda.page_locked(1 << 18), rid="one")
        land(staged.source.staging, {step: own[step] for step in staged.plan.steps})
        pooled = engine.loading(other[:NUM_PREFIX], BLOCK, PoolPages(first[:NUM_PREFIX]))
        parts = (Part(TOKENS, one, NUM_PREFIX, "one"), Part(TOKENS, other, NUM_PREFIX))
        num_before = len(engine.made[0].runs)
        assert engine.run_with([staged, pooled], *parts) == ["reused", "reused"]
        assert engine.made[0].runs[num_before:] == [[0, 0], [PAGE]], "in parts of SGLang's size"
        both = torch.cat([one[:NUM_PREFIX], other[:NUM_PREFIX]])
        twice = [kv[:NUM_PREFIX].repeat(2, 1, 1, 1) for kv in own_kv]
        distances["mixed"] = max(engine.differences(both, twice))

        # Of a recompute nothing works any more: SGLang's own forward has no part in it.
        engine.made[0].fails = True
        engine.stack.run = lambda *_: engine.made[0].forward_extend(*[None] * 5)
        slots = engine.slots(16 * PAGE, 3 * PAGE)
        request = engine.loading(slots[:NUM_PREFIX], BLOCK, cuda.page_locked(1 << 18), PEER)
        land(request.source.staging, {step: values[step] for step in request.plan.steps})
        outcomes = engine.run_with([request], Part(TOKENS, slots, NUM_PREFIX))
        assert outcomes == ["fallback: FetchError"]
        distances["fallback"] = max(engine.differences(slots[:NUM_PREFIX], own_kv))
        e = engine.e_pool.e[1][slots[:NUM_PREFIX]].cpu()
        distances["E of the fallback"] = float((e - ours.e[1][0, :NUM_PREFIX]).abs().max())
        assert engine.e_pool.num_pages_without(slots[:NUM_PREFIX], PAGE) == 0

        distances["stored"] = _stored_difference(engine, first[:NUM_PREFIX], own)
        engine.close()
    assert not cuda.races, cuda.races[0]
    return distances


def _stored_difference(engine: Engine, slots: torch.Tensor, own: dict[Step, torch.Tensor]) -> float:
    pages = engine.store(TOKENS, slots)
    (match,) = engine.cache.match(pages)
    assert (match.num_pages, match.e_pages) == (len(pages), {1: len(pages)})
    largest = 0.0
    e = Step(Kind.E, 1)
    parts = (part_of(e), KV)
    lease = engine.cache.tree.lease(engine.model, pages, "test", Deadline.after(300), parts)
    for step in (e, *steps_of(KV, engine.num_layers)):
        raw = b"".join(bytes(it) for it in lease.views(step))
        stored = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        largest = max(largest, float((stored - own[step].reshape(-1)).abs().max()))
    return largest
