"""Test the platform's activation, its PyTorch kernels, and LoRA without pinned memory."""

import os
import subprocess
import sys

import pytest
import torch
from sglang_torch_cpu import activate
from sglang_torch_cpu.kernels import _gate
from sglang_torch_cpu.pageable import Pageable
from sglang_torch_cpu.start import START_METHOD, hooks

PLATFORM = "sglang_torch_cpu.platform.TorchCpuPlatform"


def test_active_only_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert activate() == PLATFORM
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert activate() is None


@pytest.mark.parametrize("value", ["0", "1"])
def test_sglangs_own_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    assert activate() is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning works here")
def test_pinned_requests_become_pageable() -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(3, pin_memory=True)
    with Pageable():
        made = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu")
        assert made.tolist() == [1, 2]
        assert made.pin_memory() is made
        assert torch.zeros(3, pin_memory=True).sum() == 0
    with pytest.raises(RuntimeError):
        made.pin_memory()


def test_an_unknown_start_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD, "forkserver")
    with pytest.raises(ValueError, match="forkserver"):
        hooks()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="another platform is active here")
def test_sglang_finds_and_selects_it() -> None:
    program = """
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
load_plugins()
print(type(current_platform).__name__, ATTENTION_BACKEND_CHOICES.count("torch_cpu"))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["TorchCpuPlatform", "1"], result.stderr


def test_a_shared_experts_gate_is_what_its_kernel_computes() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(8)
    shared, routed = torch.randn(5, 8), torch.randn(5, 8)
    gated = torch.stack([torch.sigmoid(it @ weight) for it in hidden])[:, None] * shared
    output = routed.clone()
    _gate(hidden, weight, shared, output, do_add=True)
    assert torch.allclose(output, routed + gated, atol=1e-6)
    _gate(hidden, weight, shared, output, do_add=False)
    assert torch.allclose(output, gated, atol=1e-6)
