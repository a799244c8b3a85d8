"""Plugin that lets SGLang run without an accelerator: `launch_server --device cpu`."""

import os

BACKEND = "torch_cpu"


def activate() -> str | None:
    """Return the name of the platform class. None if SGLang should use another platform."""
    import torch

    # If the variable is set, the user decided: 1 chooses SGLang's own CPU engine, 0 chooses none.
    if "SGLANG_USE_CPU_ENGINE" in os.environ or torch.accelerator.is_available():
        return None
    return "sglang_torch_cpu.platform.TorchCpuPlatform"


def register() -> None:
    """Offer `--attention-backend torch_cpu`, and let LoRA run without a GPU. Must run before
    arguments are parsed."""
    if activate() is None:
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_torch_cpu import kernels, pageable, start

    add_attention_backend_choices([BACKEND])
    # SGLang applies the hooks when all plugins are loaded.
    for target, (hook, kind) in (kernels.HOOKS | pageable.HOOKS | start.hooks()).items():
        HookRegistry.register(target, hook, kind)
