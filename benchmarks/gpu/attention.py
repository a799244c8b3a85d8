"""Save FlashInfer's attention over a cached prefix on this device, called as SGLang's backend does.

`tests/cuda/test_gpu_benchmark` compares the files of `tests/cuda/flashinfer` with the reference
that replaces FlashInfer's kernels on CPUs.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
NEW, BEFORE = (5, 3), (20, 7)
"""New tokens of each of two prompts, and tokens of each prompt's cached prefix."""
_WORKSPACE_BYTES = 128 << 20


def edges(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def dump(path: Path, workspace_bytes: int = _WORKSPACE_BYTES) -> None:
    """Write FlashInfer's inputs and output to a file of tensors."""
    import flashinfer

    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    num_slots = 4 * sum(BEFORE)
    inputs = {
        "q": random(sum(NEW), HEADS, HEAD_DIM),
        "keys": random(num_slots, KV_HEADS, HEAD_DIM),
        "values": random(num_slots, KV_HEADS, HEAD_DIM),
        "slots": torch.randperm(num_slots, generator=generator)[: sum(BEFORE)].int(),
        "new": edges(NEW),
        "before": edges(BEFORE),
    }
    on_device = {name: it.to("cuda") for name, it in inputs.items()}
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    last = torch.ones(len(NEW), dtype=torch.int32, device="cuda")
    indices = (on_device["new"], on_device["before"], on_device["slots"], last)
    wrapper.begin_forward(
        *indices, HEADS, KV_HEADS, HEAD_DIM, 1, q_data_type=torch.bfloat16, non_blocking=True
    )
    cache = (on_device["keys"], on_device["values"])
    scale = 1 / math.sqrt(HEAD_DIM)
    out, lse = wrapper.forward_return_lse(on_device["q"], cache, causal=False, sm_scale=scale)
    save_file({**inputs, "out": out.cpu().float(), "lse": lse.cpu().float()}, path)
