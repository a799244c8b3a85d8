"""The CPU as a platform of SGLang: plain PyTorch operators, and gloo between ranks."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_torch_cpu import BACKEND


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Platform outside of SGLang's source. For such a platform SGLang uses the PyTorch version of
    each operator."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args) -> None:
        """Replace SGLang's default attention and LoRA backends by ones that run on a CPU."""
        if server_args._raw_input["attention_backend"] is None:
            server_args.attention_backend = BACKEND
        if server_args.lora_backend == "csgmv":  # the default; its kernels are Triton's
            server_args.lora_backend = "torch_native"

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def empty_cache(self) -> None:
        """Do nothing: a CPU has no cache to empty. The inherited method would collect garbage,
        which takes 0.3 s."""

    def init_backend(self) -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_torch_cpu.attention import TorchCpuAttention

        register_attention_backend(BACKEND)(TorchCpuAttention)
