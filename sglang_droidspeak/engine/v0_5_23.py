"""List the names of SGLang 0.5.23 that this package uses. Each other release gets a copy of this.

`probe` compares this file, and the JSON file beside it, with the source of another release. It
reports names that this release lacks, and functions that have changed.
"""

from collections.abc import Mapping

VERSION = "0.5.23"

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
NATIVE_HASH = "sglang.srt.mem_cache.utils.get_native_hash"
"""SGLang's function that hashes pages, by its name in the module that calls it: a hook has to
replace this name. `v0_5_23.json` names the module that defines the function."""

_MANAGERS = "sglang.srt.managers"
_CACHE = "sglang.srt.mem_cache"
_CORE = f"{_CACHE}.unified_cache"
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"
_TOKENIZERS = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_SCHEDULER = f"{SCHEDULER_MODULE}.Scheduler"
_STREAMER = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
_WEIGHT_UPDATER = f"{_COMPONENTS}.weight_updater.WeightUpdater"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_LORA_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
_POLICY = f"{_MANAGERS}.schedule_policy"
_BATCH = f"{_MANAGERS}.schedule_batch"
_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LINKER = f"{_CORE}.unified_cache_linker"
_TREE = f"{_CACHE}.unified_radix_cache.UnifiedRadixCache"
_HICACHE = f"{_CACHE}.hicache_storage"
_TRACE = "sglang.srt.observability.trace"
_STATS = "sglang.srt.observability.req_time_stats.ReqTimeStatsBase"
_SIZES = f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"
_CELLS = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"

CHECK_SERVER_ARGS = "sglang.srt.server_args.ServerArgs.check_server_args"
BEFORE_PAGE_SIZE = "handle_mxfp8_kv_cache_compatibility"
"""Step in SGLang's resolution of arguments. Right after it, SGLang sets its own default page
size."""
ALLOC_MEMORY_POOL = f"{_RUNNER}.alloc_memory_pool"
CELL_SIZE = f"{_CELLS}._compute_cell_size"
AVAILABLE_BYTES = f"{_SIZES}._profile_available_bytes"
GENERATE = f"{_TOKENIZERS}.generate_request"
FORWARD = f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation"
NEW_PREFILL = f"{_SCHEDULER}._get_new_batch_prefill_raw"
REPLAY_LEN = f"{_POLICY}.PrefillAdder._replay_len"
MATCH = f"{_LINKER}.UnifiedCacheLinkerWrapper.match"
CHECKPOINT = f"{_TREE}.checkpoint"
TAKE_EVENTS = f"{_TREE}.take_events"
REPORT = f"{_STREAMER}.stream_output"
REPORT_ABORT = f"{_SCHEDULER}.send_abort_output"
REQUEST_LEVEL = f"{_STREAMER}.is_request_level_customized_info_key"
INTERNAL_STATE = f"{_SCHEDULER}.get_internal_state"
SLEEP_ON_IDLE = f"{_SCHEDULER}.maybe_sleep_on_idle"
LOAD_LORA = f"{_LORA_MANAGER}.load_lora_adapter"
VALIDATE_LORA = f"{_LORA_MANAGER}.validate_new_adapter"
UNLOAD_LORA = f"{_LORA_MANAGER}.unload_lora_adapter"
PREPARE_LORA = f"{_LORA_MANAGER}.prepare_lora_batch"
FITS_LORA_GRAPH = f"{_LORA_MANAGER}.can_use_prefill_cuda_graph"
CAN_SCHEDULE_LORA = f"{_SCHEDULER}.can_schedule_lora_req"
UPDATE_FROM_DISK = f"{_WEIGHT_UPDATER}.update_weights_from_disk"
END_UPDATE = f"{_WEIGHT_UPDATER}.end_weight_update"
WEIGHTS_RESTORED = f"{_LOADER}.restore_weights_before_loading"
WEIGHTS_RESET = "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors"
UPDATES_BY_NAME = (
    f"{_WEIGHT_UPDATER}.load_weights_from_distributed",
    f"{_WEIGHT_UPDATER}.update_weights_from_tensor",
    f"{_WEIGHT_UPDATER}.update_weights_from_ipc",
)
"""Functions of SGLang that update weights by passing named tensors to `load_weights`."""

WEIGHTS_WRITTEN = (WEIGHTS_RESTORED, *UPDATES_BY_NAME, WEIGHTS_RESET)
"""Functions of SGLang, one of which runs before every write to the served weights. Other processes
(RDMA) write only after WEIGHTS_RESTORED and before END_UPDATE."""

FIELDS: Mapping[str, str] = {
    # class: its attributes that this package reads or writes
    f"{_BATCH}.Req": (
        "rid lora_id extra_key cache_salt origin_input_ids origin_input_ids_unpadded output_ids "
        "full_untruncated_fill_ids kv prefix_len extend_end sampling_params customized_info "
        "finished_output finished_reason to_finish is_retracted skip_radix_cache_insert "
        "multimodal_inputs input_embeds positional_embed_overrides session time_stats "
        "return_logprob cached_tokens cached_tokens_host retracted_stain priority"
    ),
    _TOKENIZERS: (
        "incremental_streaming_output preferred_sampling_params rid_to_state lora_registry "
        "server_status"
    ),
    _STATS: "trace_ctx",
    f"{_TRACE}.TraceReqContext": "tracing_enable root_span_context",
    f"{_BATCH}.ScheduleBatch": (
        "forward_mode reqs input_ids prefill_input_ids_cpu req_pool_indices "
        "req_pool_indices_cpu prefix_lens extend_lens extend_num_tokens seq_lens "
        "seq_lens_cpu seq_lens_sum orig_seq_lens out_cache_loc return_logprob "
        "top_logprobs_nums token_ids_logprobs extend_logprob_start_lens "
        "extend_input_logprob_token_ids is_prefill_only spec_info sampling_info "
        "has_grammar multimodal_inputs input_embeds replace_embeds replace_positions "
        "hicache_consumer_index"
    ),
    _FORWARD_BATCH: (
        "input_ids positions out_cache_loc forward_mode rids lora_ids batch_size "
        "seq_lens_cpu extend_seq_lens extend_seq_lens_cpu residual_stream"
    ),
    _RUNNER: (
        "model dtype device server_args attn_backend prefill_attention_backend_str "
        "decode_attention_backend_str init_new_workspace kv_index_translator model_config "
        "spec_algorithm token_to_kv_pool_allocator lora_manager req_to_token_pool token_to_kv_pool "
        "is_draft_worker shared_read_done_event"
    ),
    _SCHEDULER: (
        "waiting_queue chunked_req grammar_manager tree_cache policy "
        "enable_priority_scheduling enable_priority_preemption "
        "priority_scheduling_preemption_threshold schedule_low_priority_values_first "
        "truncation_align_size page_size server_args "
        "enable_lora_overlap_loading lora_overlap_loader"
    ),
    _GRAMMARS: "grammar_queue",
    f"{_POLICY}.PrefillAdder": "rem_chunk_tokens can_run_list running_batch",
    _TREE: "page_size tree_core",
    f"{_CACHE}.memory_pool.MHATokenToKVPool": "k_buffer v_buffer size kv_cache_layout",
    f"{_CACHE}.memory_pool.KVCache": "dtype page_size layer_num",
    f"{_CACHE}.cache_init_params.CacheInitParams": (
        "req_to_token_pool token_to_kv_pool_allocator page_size tp_cache_group "
        "enable_kv_cache_events kv_event_lora_names"
    ),
    f"{_HICACHE}.PoolTransfer": "keys device_indices",
    "sglang.srt.lora.lora_registry.LoRARef": "lora_id lora_name lora_path pinned",
    _LORA_MANAGER: "lora_refs max_loras_per_batch target_modules",
}
