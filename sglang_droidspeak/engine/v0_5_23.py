"""SGLang 0.5.23, as far as this package depends on it: what a next release gets a copy of.

What is written here is compared with the installed source by `probe`, never imported: names that
another release has moved are told of, and so is a function that is still there and does something
else.
"""

from collections.abc import Mapping

VERSION = "0.5.23"

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
NATIVE_HASH = "sglang.srt.mem_cache.utils.get_native_hash"
"""Hooked where it is imported; `USED` has where it is defined."""

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
_EVENTS = "sglang.srt.disaggregation.kv_events"
_EXPERTS = "sglang.srt.eplb.expert_distribution"
_TRACE = "sglang.srt.observability.trace"
_STATS = "sglang.srt.observability.req_time_stats.ReqTimeStatsBase"
_STREAM = "sglang.srt.layers.layer_boundary.residual.batch"
_REPLAY = "sglang.srt.model_executor.encoder_swa_replay"
_SIZES = f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"
_ARGUMENTS = "sglang.srt.arg_groups.model_override_base"
_CONTEXT = "sglang.srt.model_executor.forward_context"
_HOOKS = "sglang.srt.plugins.hook_registry.HookRegistry"
_RUNTIME = "sglang.srt.runtime_context"
_LAYERS = "sglang.srt.layers"
_MODELS = "sglang.srt.models"
_CELLS = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"

WEIGHTS_WRITTEN: Mapping[str, str] = {
    f"{_LOADER}.restore_weights_before_loading": "96ab833d37d2",
    f"{_WEIGHT_UPDATER}.load_weights_from_distributed": "b3ad51e6967e",
    f"{_WEIGHT_UPDATER}.update_weights_from_tensor": "213ae088f3c6",
    f"{_WEIGHT_UPDATER}.update_weights_from_ipc": "b1fb5ec946f0",
    "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors": "bef8a4645594",
}
"""Each of them, and nothing else, goes before a write to weights that serve; what writes into
memory from outside (RDMA) does so after the first."""

USED: Mapping[str, str] = {
    # what is hooked (it has a name), called or done in its place: hash of its source, where it is
    # defined
    (CHECK_SERVER_ARGS := "sglang.srt.server_args.ServerArgs.check_server_args"): "276dad463132",
    (ALLOC_MEMORY_POOL := f"{_RUNNER}.alloc_memory_pool"): "137d126a5372",
    (CELL_SIZE := f"{_CELLS}._compute_cell_size"): "dde0e084641d",
    (AVAILABLE_BYTES := f"{_SIZES}._profile_available_bytes"): "f24122e2e55f",
    (GENERATE := f"{_TOKENIZERS}.generate_request"): "ece7e86e4de3",
    (FORWARD := f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation"): "587f48042174",
    (NEW_PREFILL := f"{_SCHEDULER}._get_new_batch_prefill_raw"): "9eb870ca66bd",
    (REPLAY_LEN := f"{_POLICY}.PrefillAdder._replay_len"): "de5d2dd3bf21",
    (MATCH := f"{_LINKER}.UnifiedCacheLinkerWrapper.match"): "8899b550249a",
    (CHECKPOINT := f"{_TREE}.checkpoint"): "e02e3cb069e4",
    (TAKE_EVENTS := f"{_TREE}.take_events"): "da36681d48c4",
    f"{_EVENTS}.BlockStored": "7bc3f8b2dde0",
    f"{_EVENTS}.BlockRemoved": "e8542884a77c",
    f"{_EVENTS}.kv_event_namespace_seed": "ac315f522f10",
    f"{_EVENTS}.namespaced_block_hash": "230cd7f870d8",
    f"{_CACHE}.events.KvEventLoraNames.register": "5ab5cfc99442",
    (REPORT := f"{_STREAMER}.stream_output"): "d201d904f804",
    (REPORT_ABORT := f"{_SCHEDULER}.send_abort_output"): "970832854ce1",
    (REQUEST_LEVEL := f"{_STREAMER}.is_request_level_customized_info_key"): "723097c2a9ab",
    (INTERNAL_STATE := f"{_SCHEDULER}.get_internal_state"): "3ea0012568df",
    (SLEEP_ON_IDLE := f"{_SCHEDULER}.maybe_sleep_on_idle"): "7b4ae7392209",
    (LOAD_LORA := f"{_LORA_MANAGER}.load_lora_adapter"): "546088693f0a",
    f"{_LORA_MANAGER}._load_lora_adapter": "14f96263af61",
    f"{_LORA_MANAGER}._load_lora_adapter_from_tensors": "2a78612132cb",
    (VALIDATE_LORA := f"{_LORA_MANAGER}.validate_new_adapter"): "4a008f47fec8",
    f"{_LORA_MANAGER}.create_lora_update_result": "c563c2981d10",
    "sglang.srt.lora.lora_registry.LoRARegistry.get_all_adapters": "2f904a742e77",
    (UNLOAD_LORA := f"{_LORA_MANAGER}.unload_lora_adapter"): "014090d3f36c",
    (PREPARE_LORA := f"{_LORA_MANAGER}.prepare_lora_batch"): "fd8e07ca37f2",
    (FITS_LORA_GRAPH := f"{_LORA_MANAGER}.can_use_prefill_cuda_graph"): "7f649d5d8ea6",
    (CAN_SCHEDULE_LORA := f"{_SCHEDULER}.can_schedule_lora_req"): "01d82aee17c4",
    "sglang.srt.lora.lora_overlap_loader.LoRAOverlapLoader.try_overlap_load_lora": "7a5d1bb04e66",
    f"{_CACHE}.cpp_utils.native_hash.get_native_hash": "bfd2899789f5",
    **WEIGHTS_WRITTEN,
    (UPDATE_FROM_DISK := f"{_WEIGHT_UPDATER}.update_weights_from_disk"): "9f9182986460",
    f"{_POLICY}.SchedulePolicy.calc_priority": "03c6cd9f1d76",
    f"{_FORWARD_BATCH}.init_new": "53f9f0da3b38",
    f"{_RUNNER}._prepare_eager_forward_batch": "b866c35b5396",
    f"{_EXPERTS}.get_global_expert_distribution_recorder": "d6b44d3d0a89",
    f"{_EXPERTS}.ExpertDistributionRecorder.disable_this_region": "d9499a20f57f",
    f"{_RUNNER}.forward": "a9579bc20fe6",
    f"{_COMPONENTS}.attention_backend_setup._build_backend_from_str": "1c1999c3ea92",
    f"{_CACHE}.kv_index_translator.KVIndexTranslator.bind_and_verify_backends": "729d481ab4e6",
    f"{_BATCH}.ScheduleBatch.init_new": "d6a2e1be3af9",
    "sglang.srt.layers.layer_boundary.stage.StageBoundary.prepare": "2d4ed99d0cb8",
    f"{_STREAM}.set_written": "623684bac1ab",
    f"{_STREAM}.start": "9a6bd2ccd13c",
    f"{_STREAM}.clear": "6f53a759b0ce",
    f"{_CACHE}.utils.get_storage_hash_str": "935ba38bc914",
    f"{_TREE}.match_prefix": "de3b1bba99db",
    f"{_CORE}.unified_tree_core.UnifiedTreeCore.match_full_device_prefix": "af53c0d58366",
    f"{_CACHE}.rust_tree_core.adapter.RustUnifiedTreeCore.match_full_device_prefix": "b928d768b7fb",
    f"{_TREE}.path_device_indices": "1d4dfdec35ff",
    f"{_TREE}.lock": "2b4e6dcdd0f8",
    f"{_TREE}.unlock": "5d69668e0592",
    f"{_BATCH}.Req.refresh_fill_ids": "9b69fb0a2274",
    f"{_BATCH}.Req._compute_max_prefix_len": "42e8ad450757",
    f"{_LINKER}.UnifiedCacheLinker": "3e9927cdd47d",
    f"{_LINKER}.UnifiedCacheLinkerWrapper": "6d14b33d924c",
    f"{_LINKER}.LayerWiseLoadCounter": "0862a44133ca",
    f"{_HICACHE}.HiCacheStorageConfig": "2e963b98c778",
    f"{_HICACHE}.HiCacheStorage": "8fc32fc49198",
    f"{_CACHE}.storage.backend_factory.StorageBackendFactory.create_backend": "829a1c15017b",
    f"{_REPLAY}._build_replay_batch": "2a9514cbe7a5",
    f"{_REPLAY}.run_encoder_swa_replay": "6678ec61cd40",
    f"{_CACHE}.memory_pool.MHATokenToKVPool.set_kv_buffer": "896c2fd0838b",
    f"{_STATS}.trace_slice": "a6619f570a83",
    f"{_TRACE}.TraceReqContext.trace_set_thread_attrs": "f674873d9d8f",
    f"{_TRACE}.get_global_tracing_enabled": "fae878f2e990",
    f"{_BATCH}.Req.__init__": "8f6a1d75a169",
    f"{_BATCH}.Req.finished": "fca2b5c55aed",
    f"{_SCHEDULER}.get_num_allocatable_reqs": "ac17099c123c",
    f"{_SCHEDULER}._add_request_to_queue": "3d8ef2b7187e",
    f"{_GRAMMARS}.has_waiting_grammars": "75cedb2c25d3",
    f"{_GRAMMARS}.get_ready_grammar_requests": "42517bbabc48",
    f"{_POLICY}.PrefillAdder.ceil_paged_tokens": "a1187601613e",
    f"{_POLICY}.PrefillAdder.preempt_to_schedule": "500ca0df5a5d",
    f"{_LORA_MANAGER}.fetch_new_loras": "27e4fd8b6196",
    f"{_TOKENIZERS}.auto_create_handle_loop": "8600182f28e1",
    f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state": "2c5d6aa388c7",
    f"{_MANAGERS}.io_struct.GetInternalStateReq": "86c3861c2513",
    f"{_MANAGERS}.utils.is_health_check_generate_req": "d4691819bab3",
    f"{_LAYERS}.attention.flashinfer_backend.FlashInferAttnBackend.__init__": "c06d4e3fa14e",
    f"{_ARGUMENTS}.model_config_of": "c7924f24595b",
    f"{_ARGUMENTS}.resolving_view": "bd596bd0a1f3",
    "sglang.srt.distributed.communication_op.tensor_model_parallel_all_gather": "ef63a20af272",
    "sglang.srt.entrypoints.http_server.get_global_state": "cb19f9ecfaa5",
    "sglang.srt.utils.auth.auth_level": "50044cf4bcaf",
    f"{_CACHE}.base_prefix_cache.MatchPrefixParams": "6120b2069f62",
    f"{_CACHE}.memory_pool.KVWriteLoc.for_batch": "731092f252d7",
    f"{_CACHE}.radix_cache.RadixKey.__init__": "a2e44b1f070d",
    f"{_CACHE}.storage.nixl.nixl_utils.NixlBackendConfig.__init__": "062e47eae8af",
    f"{_CONTEXT}.ForwardContext": "b1cd263485f3",
    f"{_CONTEXT}.forward_context": "736b538c7613",
    f"{_CONTEXT}.get_token_to_kv_pool": "d87f580e09c2",
    "sglang.srt.observability.req_time_stats.RequestStageConfig": "f2ecf208b7e9",
    f"{_HOOKS}._apply_target": "af7a4b8240ea",
    f"{_HOOKS}.apply_hooks": "ef90946138d9",
    f"{_HOOKS}.register": "8a3db1a98090",
    f"{_RUNTIME}.attention_backends": "a1dfebff065a",
    f"{_RUNTIME}.get_model": "3ad09800d585",
    f"{_RUNTIME}.get_observability": "7a283ff84df7",
    f"{_RUNTIME}.get_parallel": "91a0bf3a5864",
    "sglang.srt.sampling.sampling_params.SamplingParams": "7abb59270caf",
    "sglang.srt.utils.common.async_h2d": "74b80f8604c7",
    # what is done in their place where some of their layers are run
    f"{_LAYERS}.radix_attention.RadixAttention.forward": "5c81a93b907c",
    f"{_MODELS}.arcee.ArceeDecoderLayer.forward": "43a4d5a54e98",
    f"{_MODELS}.arcee.ArceeModel.forward": "b3db4efefde5",
    f"{_MODELS}.glm4.Glm4DecoderLayer.forward": "43a4d5a54e98",
    f"{_MODELS}.glm4.Glm4Model.forward": "340ece6f5e0e",
    f"{_MODELS}.glm4_moe.Glm4MoeDecoderLayer.forward": "6c13b955c0af",
    f"{_MODELS}.glm4_moe.Glm4MoeModel.forward": "3e1190392570",
    f"{_MODELS}.llama.LlamaDecoderLayer.forward": "2bfcaac1eadf",
    f"{_MODELS}.llama.LlamaModel.forward": "b3db4efefde5",
    f"{_MODELS}.mixtral.MixtralDecoderLayer.forward": "87eab9466a5a",
    f"{_MODELS}.mixtral.MixtralModel.forward": "f1478c9a0d2b",
    f"{_MODELS}.qwen2.Qwen2DecoderLayer.forward": "2bfcaac1eadf",
    f"{_MODELS}.qwen2.Qwen2Model.forward": "340ece6f5e0e",
    f"{_MODELS}.qwen2_moe.Qwen2MoeDecoderLayer.forward": "e80180044882",
    f"{_MODELS}.qwen2_moe.Qwen2MoeModel.forward": "db8b05485ec9",
    f"{_MODELS}.qwen3.Qwen3DecoderLayer.forward": "c02af35022ed",
    f"{_MODELS}.qwen3.Qwen3Model.forward": "9ce5715f2157",
    f"{_MODELS}.qwen3_moe.Qwen3MoeDecoderLayer.forward": "3a0e146bc59b",
}

FIELDS: Mapping[str, str] = {
    # of these classes what is read or written
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
        "truncation_align_size page_size "
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
