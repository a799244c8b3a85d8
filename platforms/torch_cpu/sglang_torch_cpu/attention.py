from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class TorchCpuAttention(TorchNativeAttnBackend):
    pass
