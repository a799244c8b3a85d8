"""Make a second attention backend at start, for partial prefills.

A partial prefill must not overwrite the buffers of SGLang's own backend, because running forwards
and CUDA graphs still read them. SGLang subtracts the second backend's device memory before it sizes
the KV pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cachetree import ConfigError
from sglang_droidspeak.engine.names import ModelRunner

_MIB: Final = 1 << 20
_PLANS_BYTES: Final = 4 * 8 * _MIB
"""Bytes for the plans of FlashInfer's four wrappers, 8 MiB each."""
_LARGE_BYTES: Final = {"Qwen2ForCausalLM": 512 * _MIB, "Qwen3ForCausalLM": 512 * _MIB}
"""Least bytes of workspace that SGLang gives FlashInfer. Keys are model architectures."""


def attention_bytes(choice: str, architectures: Sequence[str]) -> int:
    """Predict the bytes of device memory that the second backend will take, as computed in
    FlashInferAttnBackend.__init__. `choice` is the setting `recompute_attention`."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attention_backends

    prefill, _decode = attention_backends()
    if choice == "server" and prefill == "trtllm_mha":
        return _PLANS_BYTES  # It has FlashInfer's plans, but shares the first backend's workspace.
    if "flashinfer" not in (choice, prefill):
        return 0
    workspace = envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()
    workspace = max([workspace, *(_LARGE_BYTES.get(it, 0) for it in architectures)])
    return workspace + _PLANS_BYTES


def recompute_attention(runner: ModelRunner, choice: str) -> Any:
    """Make an attention backend of SGLang with its own workspace. `choice` is its name, or `server`
    for a backend like the server's own for prefills.

    Raises ConfigError if this device cannot run it.
    """
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    prefill = runner.prefill_attention_backend_str
    name = prefill if choice == "server" else choice
    before = runner.init_new_workspace
    try:
        made = attention_backend_setup._build_backend_from_str(
            model_runner=runner,
            backend_str=name,
            # A new workspace only if the server has a backend of this name, which uses the old one.
            init_new_workspace=name in (prefill, runner.decode_attention_backend_str),
        )
    except Exception as exc:
        raise ConfigError(
            f"recompute_attention is {choice!r}, and {name} cannot be made here: {exc}"
        ) from exc
    finally:
        runner.init_new_workspace = before
    made.prefill_attention_backend_str = made.decode_attention_backend_str = name
    runner.kv_index_translator.bind_and_verify_backends([made])
    return made
