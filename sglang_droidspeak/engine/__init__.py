"""What of SGLang this package uses, and the probe that refuses another SGLang.

Supported: 0.5.23. The layer boundaries, the external linker and the replay-batch fields all move
between releases, so the probe compares what is used with what is there and names the difference.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from cachetree import ConfigError

SUPPORTED = "0.5.23"

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"

CHECK_SERVER_ARGS = "sglang.srt.server_args.ServerArgs.check_server_args"
ALLOC_MEMORY_POOL = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"
CELL_SIZE = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
NEW_PREFILL = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
REPLAY_LEN = "sglang.srt.managers.schedule_policy.PrefillAdder._replay_len"
MATCH = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.match"
CHECKPOINT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
REPORT = f"{_STREAMER}.stream_output"
REPORT_ABORT = f"{SCHEDULER_MODULE}.Scheduler.send_abort_output"
REQUEST_LEVEL = f"{_STREAMER}.is_request_level_customized_info_key"
_WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
WEIGHTS_WRITTEN = {
    f"{_WEIGHT_UPDATER}.begin_weight_update": ("self",),
    f"{_WEIGHT_UPDATER}.update_weights_from_disk": ("self", "model_path", "load_format"),
    f"{_WEIGHT_UPDATER}.load_weights_from_distributed": ("self", "named_tensors"),
    f"{_WEIGHT_UPDATER}.update_weights_from_tensor": ("self", "named_tensors", "load_format"),
    f"{_WEIGHT_UPDATER}.update_weights_from_ipc": ("self", "recv_req"),
}
"""Each of them, and nothing else, goes before a write to weights that serve; what writes into
memory from outside (RDMA) does so after the first. With the parameters."""
INTERNAL_STATE = f"{SCHEDULER_MODULE}.Scheduler.get_internal_state"
SLEEP_ON_IDLE = f"{SCHEDULER_MODULE}.Scheduler.maybe_sleep_on_idle"
LOAD_LORA = "sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights"
UNLOAD_LORA = "sglang.srt.lora.lora_manager.LoRAManager.unload_lora_adapter"
PREPARE_LORA = "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch"
CAN_SCHEDULE_LORA = f"{SCHEDULER_MODULE}.Scheduler.can_schedule_lora_req"
NATIVE_HASH = "sglang.srt.mem_cache.utils.get_native_hash"

_HICACHE = "sglang.srt.mem_cache.hicache_storage"
_SIGNATURES = {
    **WEIGHTS_WRITTEN,
    CHECK_SERVER_ARGS: ("self",),
    NATIVE_HASH: ("token_ids", "prior_digest", "page_size"),
    ALLOC_MEMORY_POOL: ("self", "memory_pool_config"),
    CELL_SIZE: ("self", "kvc", "num_layers"),
    FORWARD: ("self", "batch", "forward_batch"),
    NEW_PREFILL: ("self", "prefill_delayer_single_pass", "running_batch"),
    REPLAY_LEN: ("self", "req", "prefix_len"),
    "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority": (
        "self",
        "waiting_queue",
        "running_batch",
    ),
    MATCH: ("self", "key", "req", "result"),
    CHECKPOINT: ("self", "req", "up_to"),
    REPORT: ("self", "reqs", "return_logprob", "skip_req"),
    REPORT_ABORT: ("self", "abort_req", "req"),
    REQUEST_LEVEL: ("self", "key"),
    INTERNAL_STATE: ("self", "recv_req"),
    SLEEP_ON_IDLE: ("self",),
    LOAD_LORA: ("self", "lora_ref"),
    UNLOAD_LORA: ("self", "lora_ref"),
    PREPARE_LORA: ("self", "forward_batch"),
    CAN_SCHEDULE_LORA: ("self", "req", "running_loras"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
        "batch",
        "model_runner",
        "capture_hidden_mode",
        "return_hidden_states_before_norm",
    ),
    "sglang.srt.layers.layer_boundary.residual.batch.set_written": (
        "hidden_states",
        "forward_batch",
    ),
    "sglang.srt.layers.layer_boundary.residual.batch.start": ("forward_batch",),
    "sglang.srt.layers.layer_boundary.residual.batch.clear": ("forward_batch",),
    "sglang.srt.mem_cache.utils.get_storage_hash_str": ("key", "prior_hash", "page_size"),
    f"{_HICACHE}.HiCacheStorageConfig": (
        "tp_rank",
        "tp_size",
        "is_mla_model",
        "is_page_first_layout",
        "model_name",
        "extra_config",
    ),
    f"{_HICACHE}.HiCacheStorage.batch_exists": ("keys",),
    f"{_HICACHE}.HiCacheStorage.batch_get": ("keys", "target_locations"),
    f"{_HICACHE}.HiCacheStorage.batch_set": ("keys", "values"),
    f"{_HICACHE}.HiCacheStorage.batch_get_v1": ("keys", "host_indices"),
    f"{_HICACHE}.HiCacheStorage.batch_set_v1": ("keys", "host_indices"),
    f"{_HICACHE}.HiCacheStorage.register_mem_pool_host": ("mem_pool_host",),
    "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend": (
        "backend_name",
        "storage_config",
        "mem_pool_host",
    ),
}


def resolved(server_args: Any) -> Any:
    """The arguments as SGLang resolved them, by attribute."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def model_config(server_args: Any) -> Any:
    """What SGLang makes of the checkpoint and the arguments, before it reads any weight.

    Raises ConfigError where it makes nothing of them.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    try:
        return model_config_of(server_args)
    except ValueError as exc:
        raise ConfigError(f"SGLang cannot serve this checkpoint: {exc}") from exc


def place_hooks(hooks: Mapping[str, tuple[Callable[..., object], HookType]]) -> None:
    """Hook each target now; ConfigError where SGLang did not take one, which it only logs.

    What another plugin has hooked already SGLang would pass over in silence: it is hooked again.
    """
    for target, (hook, kind) in hooks.items():
        if target in HookRegistry._patched:
            HookRegistry._apply_target(target, [(kind, hook, None)])
        else:
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    for target in hooks:
        if target not in HookRegistry._patched:
            raise ConfigError(f"SGLang did not apply the hook on {target}; see the log above")


def require_supported() -> None:
    """Raise ConfigError where the installed SGLang is not the one this release was built for."""
    found = version("sglang")
    if found.split("+")[0] != SUPPORTED:
        raise ConfigError(
            f"sglang-droidspeak supports SGLang {SUPPORTED}, found {found}; "
            f"install 'sglang=={SUPPORTED}'"
        )
    for target, expected in _SIGNATURES.items():
        try:
            parameters = inspect.signature(inspect.unwrap(pkgutil.resolve_name(target))).parameters
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"SGLang {found} has no {target}; reinstall SGLang") from exc
        missing = [name for name in expected if name not in parameters]
        if missing:
            raise ConfigError(
                f"SGLang {found}: {target} has no parameter {', '.join(missing)}; reinstall SGLang"
            )
