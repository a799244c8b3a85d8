"""The attention that a partial prefill runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import ModelRunner


def recompute_backend(runner: ModelRunner) -> Any:
    """On CUDA a FlashInfer instance with a workspace of its own, else the runner's own backend.

    Whatever backend the server uses for the rest, its plans and buffers stay untouched.
    """
    if runner.device != "cuda":
        return runner.attn_backend
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    # Where no other part of the server uses FlashInfer, its shared workspace is ours alone.
    shares = "flashinfer" in (
        runner.prefill_attention_backend_str,
        runner.decode_attention_backend_str,
    )
    return FlashInferAttnBackend(runner, init_new_workspace=shares)
