"""The platform: plain PyTorch operators on the host's cores, gloo between ranks."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_torch_cpu import BACKEND


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args) -> None:
        if server_args.attention_backend is None:
            server_args.attention_backend = BACKEND

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def init_backend(self) -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_torch_cpu.attention import TorchCpuAttention

        register_attention_backend(BACKEND)(TorchCpuAttention)
