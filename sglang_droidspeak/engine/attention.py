"""The attention that a partial prefill runs on: an instance of its own, made at start.

SGLang's own instance has plans and buffers that forwards under way, and CUDA graphs, still read.
What a second one takes of the device's memory is left out of what SGLang sizes its KV pool by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cachetree import ConfigError
from sglang_droidspeak.engine.names import ModelRunner

_MIB: Final = 1 << 20
_PLANS_BYTES: Final = 4 * 8 * _MIB
"""Of FlashInfer's four wrappers, each with 8 MiB for its plan."""
_LARGE_BYTES: Final = {"Qwen2ForCausalLM": 512 * _MIB, "Qwen3ForCausalLM": 512 * _MIB}
"""By architecture what SGLang gives FlashInfer in place of what is set."""


def attention_bytes(choice: str, architectures: Sequence[str]) -> int:
    """Device memory that the instance will take, known before there is one: see
    FlashInferAttnBackend.__init__."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attention_backends

    prefill, _decode = attention_backends()
    if choice == "server" and prefill == "trtllm_mha":
        return _PLANS_BYTES  # It has FlashInfer's plans, and shares the workspace of the first.
    if "flashinfer" not in (choice, prefill):
        return 0
    workspace = envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()
    workspace = max([workspace, *(_LARGE_BYTES.get(it, 0) for it in architectures)])
    return workspace + _PLANS_BYTES


def recompute_attention(runner: ModelRunner, choice: str) -> Any:
    """Another instance of SGLang's backend of that name, with a workspace of its own.

    Raises ConfigError where it cannot be made here.
    """
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    prefill = runner.prefill_attention_backend_str
    name = prefill if choice == "server" else choice
    before = runner.init_new_workspace
    try:
        made = attention_backend_setup._build_backend_from_str(
            model_runner=runner,
            backend_str=name,
            # Of a kind that the server does not use, what instances share is this one's alone.
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
