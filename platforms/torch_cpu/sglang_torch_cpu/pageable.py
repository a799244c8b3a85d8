"""Let SGLang's LoRA run without an accelerator: ignore its requests for pinned memory."""

from collections.abc import Callable

import torch
from sglang.srt.plugins.hook_registry import HookType
from torch.overrides import TorchFunctionMode

# Methods of the manager in which LoRA code allocates. The mode is active only inside these calls,
# and only in their thread.
_ENTRIES = (
    "__init__",
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "fetch_new_loras",
    "prepare_lora_batch",
)


class Pageable(TorchFunctionMode):
    """Mode that ignores requests to pin tensors, in this thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _pageable(original: Callable, *args, **kwargs):
    with Pageable():
        return original(*args, **kwargs)


_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
HOOKS = {f"{_MANAGER}.{entry}": (_pageable, HookType.AROUND) for entry in _ENTRIES}
