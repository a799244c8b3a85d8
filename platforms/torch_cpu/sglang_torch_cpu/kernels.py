"""PyTorch versions of functions that SGLang has only as Triton kernels."""

import torch
from sglang.srt.plugins.hook_registry import HookType


def _gate(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """Add a shared expert's output, times its gate, to `output`, or copy it there (Qwen2-MoE)."""
    share = torch.sigmoid(hidden_states.float() @ gate_weight.float())[:, None]
    gated = (share * shared_output).to(output.dtype)
    if do_add:
        output += gated
    else:
        output.copy_(gated)


_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"
HOOKS = {f"{_ELEMENTWISE}._launch_fused_gate_sigmoid_mul": (_gate, HookType.REPLACE)}
