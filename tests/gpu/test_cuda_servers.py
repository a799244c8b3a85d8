"""Two servers on a GPU against the oracle: every attention, in CUDA graphs and without, two ranks.

Quantised weights and adapters are tested, too. For quantised weights, the oracle computes with the
dequantised matrices.

Two implementations in half precision do not give equal bits. So the first token and its
log-probability are compared with a tolerance, and the effect of the block must be larger than the
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parts import answer, eventually, prompt, whole_pages
from quantised_parts import write_quantised
from teams import BASE, Checkpoints

from benchmarks.gpu.servers import SizedServer
from benchmarks.oracle import generate
from cachetree.ids import Span
from profiles.compute.models import ModelSource, load_model
from profiles.random_models import shape, write_models
from sglang_droidspeak.fleet.servers import Server, free_port, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS = {"none": Span(0, 0), "0:3": Span(0, 3), "2:5": Span(2, 5), "all": Span(0, 6)}
TOLERANCE = 0.1
ROUNDED = 0.4
"""Largest difference for FP8. Its kernels round their inputs, which already changes the oracle's
answer by 0.2."""


OPTIONS = {
    "dtype": "bfloat16",
    "mem-fraction-static": 0.3,
    "max-total-tokens": 1 << 16,
    "page-size": 16,
    "max-running-requests": 8,  # Graphs of larger batches would take most of the start.
}


@dataclass(frozen=True, kw_only=True)
class Case:
    architecture: str = "llama"
    attention: str = "flashinfer"
    recompute: str = "server"
    weights: str = "unquantised"
    has_graphs: bool = True
    num_ranks: int = 1

    @property
    def options(self) -> dict[str, Any]:
        eager = {f"cuda-graph-backend-{it}": "disabled" for it in ("decode", "prefill")}
        more = {} if self.has_graphs else eager
        return {**OPTIONS, "attention-backend": self.attention, "tp-size": self.num_ranks, **more}


CASES = {
    "llama_fa3_and_flashinfer": Case(attention="fa3", recompute="flashinfer"),
    "qwen3_flashinfer_eager": Case(architecture="qwen3", has_graphs=False),
    "llama_flashinfer": Case(),
    "qwen3_fa3_eager": Case(architecture="qwen3", attention="fa3", has_graphs=False),
    "two_ranks": Case(num_ranks=2),
    **{it: Case(weights=it) for it in ("awq", "gptq", "fp8")},
}
"""Each attention and architecture, with CUDA graphs and without. The first two cases have never run
on a device. They come first, so that they run even if the time is too short for all."""


def test_an_adapter_reads_what_the_base_has(tmp_path):
    models = Checkpoints.write(tmp_path, {"adapter": {"rank": 8}})
    lora = {"max-loras-per-batch": 2, "max-lora-rank": 8, "lora-target-modules": ["all"]}
    spec = SizedServer(
        model=models.whole[BASE],
        options={**OPTIONS, "lora-backend": "triton", **lora},
        adapters=models.adapters,
        droidspeak={"capture_layers": [2], "gate": "none"},
    )
    tokens, block = prompt(400, seed=2), Span(2, 5)
    with running(spec, folder=tmp_path / "logs") as (server,):
        answer(server, tokens, droidspeak={"mode": "off"}, max_new_tokens=1)
        controls = models.controls(BASE, block)
        reply = answer(server, tokens, lora_path="adapter", droidspeak=controls, max_new_tokens=8)
    assert reply.provenance["outcome"] == "reused"
    expected = models.expected("adapter", BASE, tokens, block)
    assert reply.logprobs[0] == pytest.approx(expected.logprobs[0], abs=TOLERANCE)


@pytest.fixture(
    scope="module", params=[pytest.param(it, marks=pytest.mark.xdist_group(it)) for it in CASES]
)
def pair(request, tmp_path_factory) -> Iterator[tuple[dict[str, Path], Server, Server, float]]:
    folder, case = tmp_path_factory.mktemp("cuda"), CASES[request.param]
    weights = case.weights
    if case.num_ranks > torch.cuda.device_count():
        pytest.skip(f"needs {case.num_ranks} devices")
    config = shape(case.architecture, layers=6, hidden=512, heads=8, kv_heads=4)
    config.intermediate_size = 1024  # Kernels for quantised weights take whole tiles.
    names = ("sender", "receiver")
    paths = write_models(folder, config, names, dtype=torch.bfloat16)
    tested = {}
    if weights != "unquantised":
        paths = [write_quantised(it, folder / f"{it.name}_{weights}", weights) for it in paths]
        tested = {"gpu_tested_weights": [weights]}
    models = dict(zip(names, paths, strict=True))
    options, shared = case.options, {**tested, "recompute_attention": case.recompute}
    address = f"tcp://127.0.0.1:{free_port(case.num_ranks)}"
    sender = SizedServer(
        model=models["sender"],
        name="sender",
        options=options,
        droidspeak={"listen": address, "capture_layers": [2], **shared},
    )
    receiver = SizedServer(
        model=models["receiver"],
        name="receiver",
        options=options,
        droidspeak={"peers": [address], "gate": "none", "host_gb": 0, **shared},
    )
    with running(sender, receiver, folder=folder / "logs") as (s, r):
        yield models, s, r, ROUNDED if weights == "fp8" else TOLERANCE


def test_blocks_agree_with_the_oracle(pair):
    models, sender, receiver, tolerance = pair
    hf = {
        name: load_model(ModelSource(path=path), dtype=torch.bfloat16, device=torch.device("cuda"))
        for name, path in models.items()
    }
    tokens = prompt(900, seed=1)
    answer(sender, tokens, max_new_tokens=40)
    num_reused = whole_pages(len(tokens))
    ids = torch.tensor([tokens]).cuda()
    seen = []
    for text, block in BLOCKS.items():

        def reused(text: str = text):
            receiver.flush()
            reply = answer(receiver, tokens, droidspeak={"block": text}, max_new_tokens=8)
            return reply if reply.provenance["outcome"] == "reused" else None

        reply = eventually(reused, timeout_s=30)
        expected = generate(
            hf["receiver"], hf["sender"], ids[:, :num_reused], ids[:, num_reused:], block, 1
        )
        assert reply.logprobs[0] == pytest.approx(expected.logprobs[0], abs=tolerance)
        if expected.margins[0] > tolerance:
            assert reply.ids[0] == expected.ids[0]
        seen.append(expected.logprobs[0])
    assert max(seen) - min(seen) > tolerance, "blocks must differ by more than the tolerance"
