"""Refuse configurations that cannot work, before a server takes a request.

Each function looks only at its arguments. It does nothing, or raises ConfigError or ProfileError
with the value and the remedy. `Settings` itself refuses settings that contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from cachetree import ConfigError, ProfileError
from cachetree.checkpoint import ModelIdentity, Weights, varying_rope
from cachetree.planning import LineProfile, PairProfile
from sglang_droidspeak.engine import Quantization
from sglang_droidspeak.start.config import MIN_PAGE_SIZE, Settings

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import LoRARef, MHATokenToKVPool

ARCHITECTURES = frozenset(
    {
        "ArceeForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Model classes that can recompute a block: their layers pass on one residual stream, and have an
`attn_boundary`, which sees the stream before attention."""
EXACT_ONLY = frozenset(
    {
        "ApertusForCausalLM",
        "CohereForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "Olmo2ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Model classes that can load KV, but cannot recompute a block. Such a model reads only its own KV,
from any server. An activated LoRA on such a model reads the base's KV."""


_NOT_THE_CHECKPOINTS = (
    "served weights have to be the checkpoint's, because the model id is its digest"
)
_NOT_ITS_CONFIG = "the served model may differ from the checkpoint's config.json"
READ_AS_SAFETENSORS = [
    "auto",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "layered",
    "runai_streamer",
]
"""Values of `load_format` with which SGLang loads the same files from which the model id is
computed."""
_SCALED = "scales of quantised KV belong to one model"
_SHARED_OUT = "each rank would have E of only a share of the tokens"
_PADDED = "SGLang pads a forward to the tokens of its batch, and a recompute has other tokens"

_FORMATS: Final[Mapping[str, str]] = {
    # method by which SGLang runs weights: format in which they are stored
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "fp8": "fp8",
}

ACCEPTED: Final[Mapping[str, tuple[Collection[object], str]]] = {
    # server argument: (values that work, why others do not); tools.reference copies it to docs
    "device": (["cpu", "cuda"], "copies and partial prefills exist for these devices only"),
    "nnodes": ([None, 1], "the ranks of a server share one host and its ports"),
    "pp_size": ([1], "a recompute block may span pipeline stages"),
    "dp_size": ([1], "its replicas would share one address and one folder on disk"),
    "attn_dp_size": ([None, 1], "a recompute on one rank enters collectives alone"),
    "attn_cp_size": ([None, 1], "SGLang changes such batches in ways that a recompute does not"),
    "dcp_size": ([None, 1], "SGLang changes such batches in ways that a recompute does not"),
    "speculative_algorithm": ([None], "the KV of drafted tokens moves between slots"),
    "disaggregation_mode": ([None, "null"], "one server has to do both prefill and decode"),
    "kv_cache_dtype": ([None, "auto", "bfloat16", "bf16", "float16", "float32"], _SCALED),
    "quantization_param_path": ([None], _SCALED),
    "quantization": ([None, "unquant"], _NOT_THE_CHECKPOINTS),
    "modelopt_quant": ([None], _NOT_THE_CHECKPOINTS),
    "rl_quant_profile": ([None], _NOT_THE_CHECKPOINTS),
    "rl_on_policy_target": ([None], "E would be float32 beside a model of another dtype"),
    "load_format": (READ_AS_SAFETENSORS, _NOT_THE_CHECKPOINTS),
    "weight_cache_mode": (["off"], _NOT_THE_CHECKPOINTS),
    "kt_weight_path": ([None], _NOT_THE_CHECKPOINTS),
    "download_dir": ([None], "SGLang would serve the files in that folder, not those in HF_HOME"),
    "forward_hooks": ([None, []], "they may change what layers compute"),
    "model_impl": (["auto", "sglang"], "other layers pass on no residual stream at a boundary"),
    "cpu_offload_gb": ([0], "layers fetch their own weights, and a recompute stops inside a layer"),
    "json_model_override_args": ([None, "", "{}"], _NOT_ITS_CONFIG),
    "decrypted_config_file": ([None, ""], _NOT_ITS_CONFIG),
    "model_config_parser": (["auto", "hf"], _NOT_ITS_CONFIG),
    "is_embedding": ([None, False], "the model does not generate"),
    "enable_two_batch_overlap": ([None, False], "it splits the recompute's batch"),
    "enable_pdmux": ([None, False], "it splits the recompute's batch"),
    "enable_hisparse": ([None, False], "its KV pool is not per-layer rows"),
    "enable_torch_compile": ([None, False], "E is not captured in compiled layers"),
    "enable_nvidia_megakernel": ([None, False], "E is not captured in its kernels"),
    "enable_layernorm_sp": ([False], _SHARED_OUT),
    "enable_attn_tp_input_scattered": ([False], _SHARED_OUT),
    "moe_a2a_backend": (["none"], _PADDED),
    "moe_dense_tp_size": ([None], _PADDED),
    "enable_deterministic_inference": ([None, False], "answers depend on the pages of peers"),
    "enable_watermark": ([False], "it reads the sampling state, and a recompute samples nothing"),
    "enable_memory_saver": ([False], "it may free KV during a copy"),
    "enable_return_routed_experts": ([False], "loaded tokens were routed to no experts here"),
    "kv_canary": (["none"], "loaded KV has none of its marks"),
    "dllm_algorithm": ([None], "its prefix KV is not causal"),
    "tokenizer_worker_num": ([1], "its workers have no drift guard, and no pages for operators"),
    "smg_grpc_mode": ([False], "that front end has no drift guard, and no pages for operators"),
    "use_ray": ([False], "its schedulers load no plugins"),
}

VARIABLES: Final[Mapping[str, str]] = {
    # environment variable that SGLang reads: why it must not be set
    "SGLANG_RUST_SERVER": "that front end has no drift guard, and no pages for operators",
    "SGLANG_USE_HND_KVCACHE": "its KV pool is not per-layer rows",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "SGLang would resize the KV pool after E is allocated",
    "SGLANG_USE_CPU_ENGINE": "its kernels overwrite E, which is read again later",
}


# Checks before anything is loaded.


def check_arguments(
    server_args: Any, args: Any, hip: str | None, variables: Collection[str]
) -> None:
    """Refuse arguments of SGLang that do not work.

    `args` has the arguments as SGLang resolved them, `server_args` as the user gave them.
    `variables` has the names of `VARIABLES` that are set. `hip` is torch's ROCm version, or None.
    """
    for field, (accepted, why) in ACCEPTED.items():
        # On some devices SGLang resolves it to the checkpoint's own method; see `check_weights`.
        value = getattr(server_args if field == "quantization" else args, field)
        if value not in accepted:
            raise ConfigError(
                f"{field} is {value!r}: {why}; start the server without it or without droidspeak"
            )
    for name in variables:
        raise ConfigError(
            f"{name} is set: {VARIABLES[name]}; start the server without it or without droidspeak"
        )
    if hip is not None:
        raise ConfigError("torch is built for ROCm; start the server without droidspeak there")
    check_page_size(args.page_size or 1)


def check_page_size(num_tokens: int) -> None:
    if num_tokens < MIN_PAGE_SIZE:
        raise ConfigError(
            f"page_size is {num_tokens}: each page has its own key, and looking up such small "
            "pages costs more than they save; start all servers that share a cache with "
            f"--page-size {MIN_PAGE_SIZE}"
        )


def check_weights(
    model_path: str, quantization: Quantization | None, tested: Collection[str]
) -> None:
    """Check a checkpoint's quantisation. `tested` is the setting `gpu_tested_weights`."""
    if quantization is None:
        return
    cause = f"the checkpoint {model_path} is quantised ({quantization.method})"
    remedy = "serve an unquantised one, or start the server without droidspeak"
    stored_as = _FORMATS.get(quantization.method)
    if stored_as is None:
        raise ConfigError(f"{cause}: only formats AWQ, GPTQ and FP8 can be profiled; {remedy}")
    if quantization.kv:
        raise ConfigError(f"{cause}, and so is its KV ({quantization.kv}): {_SCALED}; {remedy}")
    if stored_as not in tested:
        raise ConfigError(
            f"{cause}: no CPU runs such weights, so no test has covered them; if `make gpu` has "
            f"passed on this device, set gpu_tested_weights: [{stored_as}], or {remedy}"
        )


def check_model(identity: ModelIdentity, model_path: str) -> None:
    if identity.architecture not in ARCHITECTURES | EXACT_ONLY:
        raise ConfigError(
            f"model class {identity.architecture} of {model_path} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}, and for exact reuse only "
            f"{', '.join(sorted(EXACT_ONLY))}"
        )
    if varying_rope(identity.rope) == "longrope":
        raise ConfigError(
            f"{model_path} has rope_type longrope and takes longer prompts than its original ones: "
            "SGLang rotates a token by the other requests of its batch, so equal prefixes have "
            "different KV; start the server without droidspeak"
        )


def check_blocks(settings: Settings, identity: ModelIdentity) -> None:
    """Refuse settings about blocks if the model's class cannot recompute a block."""
    if identity.architecture in ARCHITECTURES:
        return
    for field, value, without in (
        ("gate", settings.gate, "enforce"),
        ("capture_layers", settings.capture_layers, None),
    ):
        if value not in (without, ()):
            raise ConfigError(
                f"{field} is {value}, and layers of {identity.architecture} cannot be recomputed; "
                "remove it: reuse by this class is exact"
            )


def check_capture_layers(settings: Settings, identity: ModelIdentity) -> None:
    for layer in settings.capture_layers or ():
        if not 0 < layer < identity.num_layers:
            raise ConfigError(
                f"capture_layers has {layer}; give layers from 1 to {identity.num_layers - 1}"
            )


def check_ports(settings: Settings, tp_size: int) -> None:
    """Refuse ports if they do not suffice for all ranks. Each rank adds its number to both ports.

    Raises ConfigError if `listen` has port 0 on several ranks, or the ranges of both ports overlap.
    """
    port = int((settings.listen or ":0").rpartition(":")[2])
    if settings.listen and not port and tp_size > 1:
        raise ConfigError(
            f"listen is {settings.listen}, and each of {tp_size} ranks would take a free port that "
            "other servers cannot know; name the first rank's port"
        )
    if port and settings.bulk_port and abs(port - settings.bulk_port) < tp_size:
        raise ConfigError(
            f"bulk_port is {settings.bulk_port} and listen {settings.listen}, and the ports of "
            f"{tp_size} ranks overlap; choose numbers at least {tp_size} apart"
        )


def check_memory(settings: Settings, tp_size: int, free_gb: float) -> None:
    """Refuse sizes if all ranks together page-lock more memory at start than the host has free.

    For servers with an accelerator. Raises ConfigError.
    """
    taken_gb = settings.taken_gb(tp_size)
    if taken_gb >= free_gb:
        raise ConfigError(
            f"host_gb is {settings.host_gb} and staging_gb {settings.staging_gb}: on {tp_size} "
            f"ranks {taken_gb:.1f} GiB are page-locked at start, and {free_gb:.1f} GiB of host "
            "memory are free; lower host_gb or staging_gb"
        )


def check_failed_profile(settings: Settings, failed: str) -> None:
    """Refuse a profile that did not pass, except with `gate: none`. `failed` says why."""
    if settings.gate == "enforce":
        raise ProfileError(
            f"{failed}; remove the file from `profiles`, or profile the pair on more data"
        )


def refuse_pair(file: Path, profile: PairProfile, identity: ModelIdentity) -> None:
    """Refuse a profile that names this model neither as sender nor as receiver.

    The error compares with the role that is more like this model, and names the first field that
    differs.
    """
    differing = {
        role: [
            it for it in identity.__struct_fields__ if getattr(side, it) != getattr(identity, it)
        ]
        for role, side in (("sender", profile.sender), ("receiver", profile.receiver))
    }
    role = min(differing, key=lambda it: len(differing[it]))
    field = differing[role][0]
    raise ProfileError(
        f"profile {file} is of the pair {profile.pair}, "
        f"and this server's model is {identity.model_id} by content: {field} is "
        f"{getattr(identity, field)!r}, and {getattr(getattr(profile, role), field)!r} in the "
        f"profile's {role}; profile this pair, or remove the file from `profiles`"
    )


def check_line(file: str, line: LineProfile, identity: ModelIdentity) -> None:
    if identity not in line.line.models:
        raise ProfileError(
            f"profile {file} is of the line {line.line}, and this server's model, "
            f"{identity.model_id} by content, is none of these; start from a model of the line, "
            "profile a line with this one, or remove the file from `lines`"
        )
    if not line.passed:
        raise ProfileError(
            f"profile {file} did not pass its gate: {line.reason}; remove it from `lines`, or "
            "profile the line on more data"
        )


def check_activated(
    refs: Collection[LoRARef],
    invocation: Callable[[LoRARef], Sequence[int]],
    num_slots: int,
    modules: Collection[str],
) -> None:
    """Refuse activated LoRAs (adapters with an `invocation`) that this server cannot run.

    An activated LoRA needs two slots of a batch: its own and the base's. It cannot work if any
    adapter may change lm_head, because SGLang applies such an adapter to whole prompts.
    """
    num_unpinned = num_slots - sum(bool(it.pinned) for it in refs)
    for ref in filter(invocation, refs):
        if not {"all", "lm_head"}.isdisjoint(modules):
            raise ConfigError(
                f"activated LoRA {ref.lora_name} cannot be served if adapters may change lm_head; "
                "list the modules of all adapters in --lora-target-modules, without lm_head and "
                "without `all`, which has it"
            )
        if num_unpinned < 2 and not ref.pinned:
            raise ConfigError(
                f"activated LoRA {ref.lora_name} takes two slots of a batch, its own and the "
                f"base's, and --max-loras-per-batch leaves {num_unpinned} beside pinned adapters; "
                "raise it"
            )


# Checks after the model is loaded.


def check_kv_pool(pool: MHATokenToKVPool, plain: type[MHATokenToKVPool]) -> None:
    """Refuse a KV pool of another class than `plain`, of another layout than NHD, or with scales.

    A `plain` pool has one row of K and one row of V for each slot and layer. Raises ConfigError.
    """
    layout = getattr(pool, "kv_cache_layout", "none")
    if type(pool) is not plain or layout != "nhd":
        raise ConfigError(
            f"KV pool {type(pool).__name__} with layout {layout} is not supported; use a model "
            "with full attention in every layer, and leave SGLang's layout as it is by default"
        )
    if pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"KV is kept in {pool.dtype}: {_SCALED}; start the server with --kv-cache-dtype "
            "bfloat16"
        )


def check_stored_type(weights: Weights, served: str) -> None:
    """Refuse the setting `lines` if the checkpoint has another dtype than the served weights:
    rounding would change how far the models of a line are apart. `served` is a dtype as safetensors
    names it, such as `BF16`."""
    for name, (stored, _) in weights.layouts.items():
        if stored != served:
            raise ConfigError(
                f"lines is set, and {name} is {stored} in the checkpoint and {served} when served: "
                f"rounding changes distances; save the line's models as {served} and profile them, "
                "or set lines to []"
            )


def check_tree_components(names: set[str]) -> None:
    """Refuse a radix tree of SGLang with other components than full attention."""
    if names != {"FULL"}:
        raise ConfigError(
            f"tree components {', '.join(sorted(names))} are not supported; only FULL is"
        )
