"""Bad configuration stops the server at start, with one line that names field, value and remedy."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
from enum import EnumType
from importlib.metadata import entry_points
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_origin

import huggingface_hub
import msgspec
import pytest
import torch
from engine_parts import ENV, profile_of
from huggingface_hub.utils import filter_repo_objects
from line_parts import line_of
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadFormat

from benchmarks.random_adapters import write_adapter
from cachetree.checkpoint import Codec, adapter_digest
from cachetree.checkpoint.identity import read_model_identity
from cachetree.corrections import Correction, maps_path, write_corrections
from cachetree.disk import Directory
from cachetree.errors import ConfigError
from cachetree.planning.profile import BlockQuality, write_profile
from cachetree.transport import write_key_pair
from profiles.random_models import shape, write_models
from sglang_droidspeak import engine
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.cli.serve import as_flags
from sglang_droidspeak.engine import Quantization, attention, probe
from sglang_droidspeak.fleet.servers import ServerFailed, ServerSpec, free_port, running
from sglang_droidspeak.plugin import _leave_recompute, check_front_end
from sglang_droidspeak.start import refuse, this_server
from sglang_droidspeak.start.config import (
    LINKER_MODULE,
    MIN_PAGE_SIZE,
    Settings,
    cache_config,
    is_configured,
    linker_options,
    parse_settings,
)
from sglang_droidspeak.start.this_server import folder_of, load_this_server, read_server
from sglang_droidspeak.store.e_pool import correction_bytes, e_bytes_per_token
from sglang_droidspeak.store.rows import temporary_bytes

HERE = "tcp://127.0.0.1:7001"
KEY = "ctpub-" + "0" * 64


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    config = shape("llama", layers=4, hidden=128, heads=2, kv_heads=2)
    (path,) = write_models(tmp_path_factory.mktemp("model"), config, ["model"])
    return path


def server_args(model: Path, extra: dict[str, Any], *flags: str) -> Any:
    from sglang.srt.arg_groups.lora_hook import check_lora_server_args
    from sglang.srt.server_args import prepare_server_args

    linker = {
        "linker": "DroidSpeakLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": extra,
    }
    fixed = "--device cpu --page-size 16 --enable-unified-cache-external-linker"
    fixed += " --unified-cache-external-linker-backend dynamic"
    config = ["--unified-cache-external-linker-config", json.dumps(linker)]
    args = prepare_server_args(["--model-path", str(model), *fixed.split(), *config, *flags])
    check_lora_server_args(args)  # As SGLang does before the extension looks.
    return args


def refusal(model: Path, extra: dict[str, Any], *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        check_front_end(server_args(model, extra, *flags))
    (line,) = str(stopped.value).splitlines()
    assert line.startswith("droidspeak: ")
    return line


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"push_to": [HERE]}, ["no push_to any more", "under cache.keeps in the worker's file"]),
        ({"lisen": "tcp://127.0.0.1:1"}, ["no key lisen; did you mean listen?"]),
        ({"gate": False}, ["$.gate`; it is one of enforce, none"]),  # As YAML reads off.
        ({"codec": "int2"}, ["'int2' - at `$.codec`; it is one of none, int8, int4"]),
        ({"host_gb": "much"}, ["host_gb", "float"]),
        ({"ttl_s": 0}, ["ttl_s is 0", "positive"]),
        ({"host_gb": -1}, ["host_gb is -1", "give 0 to 1000000"]),
        ({"host_gb": 1e300}, ["host_gb is 1e+300", "give 0 to 1000000"]),
        ({"staging_gb": inf}, ["staging_gb is inf", "give 0 to 1000000"]),
        ({"ttft_target_ms": -5}, ["ttft_target_ms is -5", "positive"]),
        ({"ttft_target_ms": nan}, ["ttft_target_ms is nan", "finite"]),
        ({"max_link_mb_s": 5}, ["max_link_mb_s is set and listen is None", "set listen"]),
        ({"insecure": True}, ["insecure is set and listen is None", "set listen"]),
        ({"shadow_deadline_s": 5}, ["shadow_deadline_s is set and guard_path is None"]),
        ({"fetch_deadline_s": inf}, ["fetch_deadline_s is inf", "finite"]),
        ({"fetch_deadline_s": 90}, ["fetch_deadline_s is 90", "at most 60"]),
        ({"peer_cooldown_s": nan}, ["peer_cooldown_s is nan", "finite"]),
        ({"max_link_mb_s": inf}, ["max_link_mb_s is inf", "finite"]),
        ({"listen": "127.0.0.1:7001"}, ["listen", "127.0.0.1:7001", "tcp://"]),
        ({"listen": "tcp://0.0.0.0:7001"}, ["listen", "tcp://0.0.0.0:7001", "insecure"]),
        ({"listen": "tcp://0.0.0.0:7001"}, ["key_file", "allowed_peers", "cachetree keygen"]),
        ({"listen": HERE, "key_file": "missing.key"}, ["missing.key", "allowed_peers is empty"]),
        ({"listen": HERE, "key_file": "missing.key", "allowed_peers": [KEY]}, ["missing.key"]),
        ({"listen": HERE, "allowed_peers": [KEY]}, ["allowed_peers", "set key_file"]),
        ({"allowed_peers": [KEY]}, ["allowed_peers", "set listen"]),
        ({"key_file": "missing.key"}, ["missing.key", "set peer_keys"]),
        ({"bulk_port": 7}, ["bulk_port is set", "set listen, or remove bulk_port"]),
        ({"peer_keys": {HERE: KEY}}, ["peer_keys", HERE, "not in peers"]),
        ({"peers": [HERE], "peer_keys": {HERE: KEY}}, ["set key_file"]),
        (
            {"peers": [HERE], "peer_keys": {HERE: "ctpub-1"}, "key_file": "missing.key"},
            ["peer_keys", "64 hexadecimal digits"],
        ),
        ({"peers": ["tcp://nowhere"]}, ["peers", "tcp://nowhere"]),
        ({"listen": HERE, "peers": [HERE]}, ["peers has tcp://127.0.0.1:7001", "remove it"]),
        ({"profiles": ["missing.json"]}, ["missing.json", "No such file"]),
        ({"lines": ["line.json"]}, ["lines is set and guard_path is None", "set guard_path"]),
        ({"lines": ["missing.json"], "guard_path": "g"}, ["missing.json", "No such file"]),
        ({"disk_path": "cache"}, ["disk_path is cache and disk_gb 0.0", "give both"]),
        ({"disk_path": "c", "disk_gb": 1, "host_gb": 0}, ["disk_path is set and host_gb is 0"]),
        ({"hicache_backend": "florp"}, ["hicache_backend is 'florp'", "file", "mooncake"]),
        ({"hicache_backend": "sim"}, ["hicache_backend is 'sim'", "choose another"]),
        ({"hicache_backend": "dynamic"}, ["hicache_config has no", "class_name"]),
        ({"hicache_backend": "file"}, ["file_storage_path is None", "only this user"]),
        ({"hicache_backend": "aibrix"}, ["'aibrix' and cannot be loaded", "install"]),
        ({"hicache_config": {"password": "secret"}}, ["hicache_config", "set hicache_backend"]),
        ({"config": "missing.yaml"}, ["missing.yaml", "No such file"]),
        ({"config": "missing.yaml", "host_gb": 1}, ["config", "host_gb", "move them"]),
        ({"capture_layers": [4]}, ["capture_layers", "4", "from 1 to 3"]),
        ({"gate": "ajar"}, ["gate", "ajar"]),
    ],
)
def test_bad_settings_are_refused_with_their_remedy(model, extra, words):
    line = refusal(model, extra)
    assert all(word in line for word in words), line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("device", "free", "is_well"), [("cuda", 6.0, False), ("cuda", 6.1, True), ("cpu", 0.1, True)]
)
def test_memory_that_all_ranks_page_lock_has_to_be_free(model, monkeypatch, device, free, is_well):
    """Without that memory, the system would end the server after the model was loaded."""
    resolved = engine.resolved
    monkeypatch.setattr(engine, "resolved", lambda it: Altered(resolved(it), "device", device))
    monkeypatch.setattr("profiles.environment.free_memory_bytes", lambda: int(free * (1 << 30)))
    extra, flags = {"host_gb": 2.5, "staging_gb": 0.5}, ("--tp-size", "2")
    if is_well:
        assert check_front_end(server_args(model, extra, *flags)).host_gb == 2.5
    else:
        line = refusal(model, extra, *flags)
        words = ["host_gb is 2.5", "staging_gb 0.5", "2 ranks 6.0 GiB", "6.0 GiB of host memory"]
        assert all(word in line for word in [*words, "lower host_gb"]), line


@pytest.mark.parametrize(
    ("memory_gb", "host_gb", "staging_gb"),
    [(4, 2.0, 1.0), (24, 2.0, 1.0), (100, 6.2, 3.1), (128, 8.0, 4.0), (2048, 16.0, 8.0)],
)
def test_memory_that_is_not_set_is_a_share_of_the_hosts(
    monkeypatch, memory_gb, host_gb, staging_gb
):
    monkeypatch.setattr("profiles.environment.memory_bytes", lambda: memory_gb << 30)
    settings = parse_settings({})
    assert (settings.host_gb, settings.staging_gb) == (host_gb, staging_gb)
    assert settings.taken_gb(8) <= max(0.75 * memory_gb, 8 * 3), "eight ranks fit"
    assert parse_settings({"host_gb": 0}).host_gb == 0
    disk: dict[str, Any] = {"disk_path": "/disk", "disk_gb": 1.5}
    assert parse_settings(disk).host_gb == 0.75, "a disk holds what memory holds too"
    assert parse_settings(disk | {"host_gb": 9}).host_gb == 9
    assert parse_settings(disk | {"disk_gb": 1e3}).host_gb == settings.host_gb


def test_each_rank_has_memory_for_its_columns_of_e_alone(model):
    def bytes_per_token(*flags: str) -> int:
        server = load_this_server(server_args(model, {"capture_layers": [1, 3]}, *flags))
        return e_bytes_per_token(server, torch.bfloat16)

    assert bytes_per_token() == 2 * 128 * 2
    assert bytes_per_token("--tp-size", "2") == 2 * 64 * 2


def test_what_copies_and_recomputes_work_with_is_left_out_of_the_kv_pool(model, monkeypatch):
    monkeypatch.setattr(attention, "attention_bytes", lambda *_: 0)
    hf_config = SimpleNamespace(architectures=())
    pool: Any = SimpleNamespace(
        server_args=server_args(model, {"codec": "int4"}, "--chunked-prefill-size", "1024"),
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_config=hf_config),
    )
    codec = temporary_bytes(Codec.INT4, torch.bfloat16, 2 * 2 * 64, 128)
    assert codec > 4096 * 128
    left_out = codec + 1024 * 128 * 2  # with E of a step's tokens
    assert _leave_recompute(1 << 30, pool) == (1 << 30) - left_out
    with pytest.raises(ConfigError, match="mem-fraction-static"):
        _leave_recompute(left_out, pool)


def test_what_stays_in_memory_reaches_the_cache(model):
    extra = {"ttl_s": 60}
    server = load_this_server(server_args(model, extra))
    config = cache_config(server.settings, server.identity.model_id)
    assert config.ttl_s == 60


@pytest.mark.parametrize(
    ("flags", "is_ours", "page_size"),
    [
        ([], True, 16),
        (["--page-size", "1"], True, 1),
        (["--page-size", "32"], True, 32),
        ([], False, 1),
    ],
)
def test_page_size_is_raised_where_no_option_sets_it(
    model, monkeypatch, capsys, flags, is_ours, page_size
):
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    engine.default_page_size(MIN_PAGE_SIZE, is_configured)
    words = as_flags(linker_options({})) if is_ours else ()
    args = prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags, *words])
    args.resolve_once()
    assert engine.resolved(args).page_size == page_size
    assert capsys.readouterr().err.count("page_size is 16: ") == int(is_ours and not flags)


def test_keys_reach_the_cache(model, tmp_path):
    _, key_file, public_file = write_key_pair(tmp_path, "here")
    extra = {
        "listen": "tcp://0.0.0.0:7002",
        "peers": [HERE],
        "key_file": str(key_file),
        "allowed_peers": [KEY],
        "peer_keys": {HERE: str(public_file)},
        "bulk_port": 7003,
    }
    server = load_this_server(server_args(model, extra))
    config = cache_config(server.settings, server.identity.model_id)
    assert (config.worker.key_file, config.worker.allowed_peers) == (str(key_file), (KEY,))
    assert config.worker.bulk_port == 7003
    peer = config.peer_at(HERE)
    assert (peer.key_file, peer.server_key) == (str(key_file), str(public_file))
    secret = key_file.read_text().split("ctsec-")[1].strip()
    assert secret not in f"{server} {config}"
    key_file.chmod(0o644)
    assert "others can read" in refusal(model, {**extra, "host_gb": 1.0})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--page-size", "8"], ["page_size", "8", "--page-size 16"]),
        (["--disaggregation-mode", "prefill"], ["disaggregation_mode", "prefill"]),
        (["--nnodes", "2", "--tp-size", "2"], ["nnodes", "2", "one host"]),
        (["--load-format", "dummy"], ["load_format", "dummy"]),
        (["--json-model-override-args", '{"rope_theta": 5}'], ["json_model_override_args"]),
        (["--dp-size", "2"], ["dp_size is 2", "one address"]),
        (["--quantization", "fp8"], ["quantization is 'fp8'", "have to be the checkpoint's"]),
        (["--kv-cache-dtype", "fp8_e4m3"], ["kv_cache_dtype is 'fp8_e4m3'", "scales"]),
    ],
)
def test_server_arguments_that_do_not_go_together(model, flags, words):
    line = refusal(model, {}, *flags)
    assert all(word in line for word in words), line


class Altered:
    """Arguments of SGLang with one value that SGLang would not accept on this machine or with this
    model."""

    def __init__(self, args: Any, field: str, value: object) -> None:
        self._args, self._altered = args, {field: value}
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return self._altered.get(name, getattr(self._args, name))


TWO = "attn_cp_size attn_dp_size dcp_size dp_size nnodes pp_size tokenizer_worker_num"
SWITCHES = """
    enable_attn_tp_input_scattered enable_deterministic_inference enable_hisparse
    enable_layernorm_sp enable_memory_saver enable_nvidia_megakernel enable_pdmux
    enable_return_routed_experts enable_torch_compile enable_two_batch_overlap enable_watermark
    is_embedding smg_grpc_mode use_ray
"""
WORDS = """
    decrypted_config_file other.json
    device npu xpu
    disaggregation_mode prefill decode
    dllm_algorithm LowConfidence
    download_dir models
    json_model_override_args {"rope_theta":5}
    kv_cache_dtype fp8_e4m3 fp8_e5m2 nvfp4
    kt_weight_path experts
    kv_canary log raise
    load_format dummy pt npcache mistral sharded_state presharded gguf expert_pack bitsandbytes
    load_format flash_rl remote remote_instance ipc_cache private
    model_config_parser mistral
    model_impl transformers mindspore
    modelopt_quant fp8
    moe_a2a_backend deepep flashinfer
    quantization w8a8_int8
    quantization_param_path scales.json
    rl_on_policy_target fsdp
    rl_quant_profile profile.json
    speculative_algorithm EAGLE NGRAM
    weight_cache_mode client daemon
"""
REFUSED: list[tuple[str, object]] = [
    *((field, 2) for field in TWO.split()),
    *((field, True) for field in SWITCHES.split()),
    *((line.split()[0], it) for line in WORDS.strip().splitlines() for it in line.split()[1:]),
    ("cpu_offload_gb", 1),
    ("moe_dense_tp_size", 1),
    ("page_size", 8),
    ("forward_hooks", [{"name": "h"}]),
]
"""Values to which SGLang resolves an argument, and with which a server refuses to start."""


@pytest.fixture(scope="module")
def accepted(model: Path) -> Any:
    """Return the arguments as SGLang resolved them."""
    parsed = server_args(model, {})
    parsed.resolve_once()
    args = engine.resolved(parsed)
    refuse.check_arguments(args, args, None, ())
    return args


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_sglang_resolved_is_refused_by_name(accepted, field, value):
    with pytest.raises(ConfigError, match=f"^{field} is {re.escape(repr(value))}: "):
        altered = Altered(accepted, field, value)
        refuse.check_arguments(altered, altered, None, ())


def test_who_asks_for_no_quantisation_by_name_is_accepted(model):
    args = server_args(model, {}, "--quantization", "unquant")
    args.resolve_once()
    assert load_this_server(args).identity == read_model_identity(model)


def test_repositories_of_adapters_are_looked_for_once(model, tmp_path, monkeypatch):
    adapter = write_adapter(tmp_path / "a", model)
    asked: list[str] = []
    find = this_server.folder_of
    monkeypatch.setattr(
        this_server, "folder_of", lambda path, *rest: asked.append(path) or find(path, *rest)
    )
    args = server_args(model, {}, "--enable-lora", "--lora-paths", f"late={adapter}")
    for _ in range(3):
        load_this_server(args)
    assert asked.count(str(adapter)) == 1


@pytest.mark.parametrize("value", ["auto", "safetensors", LoadFormat.RUNAI_STREAMER])
def test_formats_that_read_the_checkpoints_files_are_accepted(accepted, value):
    refuse.check_arguments(accepted, Altered(accepted, "load_format", value), None, ())


def test_every_argument_that_is_looked_at_is_tried(accepted):
    seen = Altered(accepted, "", None)
    refuse.check_arguments(seen, seen, None, ())
    assert seen.asked == {field for field, _ in REFUSED}


def test_a_quantisation_that_sglang_takes_from_the_checkpoint_is_not_the_flags(
    tmp_path, monkeypatch
):
    """On Blackwell, SGLang sets the argument itself for some models."""
    from sglang.srt.arg_groups.model_overrides import qwen3_moe

    config = shape("qwen3_moe", layers=2, hidden=64, heads=2, kv_heads=1)
    (path,) = write_models(tmp_path, config, ["model"])
    file = path / "config.json"
    stored = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    monkeypatch.setattr(qwen3_moe, "get_platform", lambda: SimpleNamespace(is_sm100=True))
    args = server_args(path, {"gpu_tested_weights": ["fp8"]})
    args.resolve_once()
    assert engine.resolved(args).quantization == "fp8"
    assert load_this_server(args).identity == read_model_identity(path)


class Pool:
    """Return SGLang's pool of plain rows, or a pool that is `altered`."""

    def __init__(self, **altered: object) -> None:
        plain = {"kv_cache_layout": "nhd", "dtype": torch.bfloat16}
        for name, value in (plain | altered).items():
            setattr(self, name, value)


class OtherPool(Pool):
    """A pool with rows of another kind."""


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (OtherPool(), "KV pool OtherPool with layout nhd"),
        (Pool(kv_cache_layout="hnd"), "KV pool Pool with layout hnd"),
        (Pool(dtype=torch.float8_e4m3fn), "KV is kept in torch.float8_e4m3fn: scales"),
    ],
)
def test_a_kv_pool_that_is_no_plain_rows_is_refused(pool, words):
    refuse.check_kv_pool(Pool(), Pool)
    with pytest.raises(ConfigError, match=words):
        refuse.check_kv_pool(pool, Pool)


def test_only_full_attention_has_a_tree_that_is_read():
    refuse.check_tree_components({"FULL"})
    with pytest.raises(ConfigError, match="tree components FULL, SWA are not supported"):
        refuse.check_tree_components({"SWA", "FULL"})


@pytest.mark.parametrize("name", refuse.VARIABLES)
def test_what_the_environment_switches_on_is_refused(model, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert f"{name} is set: {refuse.VARIABLES[name]}" in refusal(model, {})


def test_rocm_is_refused(model, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "ROCm" in refusal(model, {})


def quantised_as(config: dict[str, Any], model: Path, folder: Path) -> Path:
    quantised = Path(shutil.copytree(model, folder / "quantised"))
    stated = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(stated | {"quantization_config": config}))
    return quantised


FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "quant_method": "modelopt"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "awq"),
        ({"quant_method": "gptq_marlin", "bits": 4, "group_size": 128}, "gptq_marlin"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        (FP8, "modelopt"),
        (None, "modelopt"),
    ],
)
def test_quantised_checkpoint_is_refused(model, tmp_path, config, name):
    """The checkpoint states its quantisation in its config, or in a file beside it."""
    quantised = quantised_as(config or {}, model, tmp_path)
    if config is None:
        shutil.copy(model / "config.json", quantised)
        beside = {"producer": {"name": "modelopt"}, "quantization": FP8}
        (quantised / "hf_quant_config.json").write_text(json.dumps(beside))
    line = refusal(quantised, {})
    assert str(quantised) in line
    assert f"is quantised ({name}" in line


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def test_quantised_weights_are_served_where_they_were_tried(model, tmp_path):
    quantised = quantised_as(AWQ, model, tmp_path)
    line = refusal(quantised, {"gpu_tested_weights": ["gptq", "fp8"]})
    assert "make gpu" in line
    assert "gpu_tested_weights: [awq]" in line
    args = server_args(quantised, {"gpu_tested_weights": ["awq"]})
    served, plain = load_this_server(args), load_this_server(server_args(model, {}))
    assert served.identity.weights != plain.identity.weights
    assert "gpu_tested_weights" in refusal(model, {"gpu_tested_weights": ["modelopt"]})
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_quant_algo": "FP8"}
    with_fp8_kv = quantised_as(fp8, model, tmp_path / "fp8")
    assert "so is its KV (FP8)" in refusal(with_fp8_kv, {"gpu_tested_weights": ["fp8"]})


@pytest.mark.parametrize(
    ("quantization", "tested", "words"),
    [
        (Quantization("awq_marlin", ""), ("awq",), ""),
        (Quantization("gptq_marlin", ""), ("gptq",), ""),
        (Quantization("fp8", ""), ("awq", "fp8"), ""),
        (Quantization("awq_marlin", ""), ("gptq", "fp8"), r"set gpu_tested_weights: \[awq\]"),
        (Quantization("fp8", "FP8"), ("fp8",), r"and so is its KV \(FP8\): scales"),
        (Quantization("modelopt_fp8", ""), ("fp8",), "only formats AWQ, GPTQ and FP8"),
        (Quantization("w8a8_fp8", ""), ("fp8",), "only formats AWQ, GPTQ and FP8"),
    ],
)
def test_weights_as_sglang_runs_them(quantization, tested, words):
    expected = pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext()
    with expected:
        refuse.check_weights("there", quantization, tested)


def test_each_rank_has_ports_of_its_own(model):
    extra = {
        "listen": "tcp://127.0.0.1:7001",
        "bulk_port": 7003,
        "peers": ["tcp://127.0.0.1:7101", "tcp://[::1]:7201"],
    }
    server = load_this_server(server_args(model, extra, "--tp-size", "2"))
    config = cache_config(server.settings, server.identity.model_id, tp_rank=1)
    assert (config.worker.listen, config.worker.bulk_port) == ("tcp://127.0.0.1:7002", 7004)
    assert config.peers == ("tcp://127.0.0.1:7102", "tcp://[::1]:7202")
    line = refusal(model, {**extra, "bulk_port": 7002}, "--tp-size", "2")
    assert "bulk_port is 7002" in line
    assert "at least 2 apart" in line
    line = refusal(model, {"listen": "tcp://127.0.0.1:65535"}, "--tp-size", "2")
    assert "listen is 'tcp://127.0.0.1:65536'" in line
    at_any = {"listen": "tcp://127.0.0.1:0"}
    check_front_end(server_args(model, at_any))
    line = refusal(model, at_any, "--tp-size", "2")
    assert "listen is tcp://127.0.0.1:0" in line and "name the first rank's" in line


@pytest.mark.parametrize("field", ["listen", "bulk_port"])
def test_a_port_in_use_is_found_before_weights_are_loaded(model, field):
    free = free_port(4)
    with socket.create_server(("127.0.0.1", free + 1)):
        line = refusal(model, {"http": free + 1})
        assert f"http is 'http://127.0.0.1:{free + 1}', which cannot be bound" in line
        ports = {"listen": f"tcp://127.0.0.1:{free + 2}", "bulk_port": 0}
        ports[field] = f"tcp://127.0.0.1:{free}" if field == "listen" else free
        line = refusal(model, ports, "--tp-size", "2")
        assert f"{field} is 'tcp://127.0.0.1:{free + 1}', which cannot be bound" in line
        assert "choose another port" in line


def test_a_port_that_is_given_twice_is_found_before_weights_are_loaded(model):
    free = free_port(3)
    ports = {"listen": f"tcp://127.0.0.1:{free}", "http": str(free + 1)}
    check_front_end(server_args(model, ports))
    line = refusal(model, ports, "--tp-size", "2")
    assert f"listen is 'tcp://127.0.0.1:{free + 1}', which cannot be bound" in line
    line = refusal(model, {**ports, "bulk_port": free + 1})
    assert f"bulk_port is 'tcp://127.0.0.1:{free + 1}', which cannot be bound" in line
    line = refusal(model, ports, "--port", str(free))
    assert f"listen is 'tcp://127.0.0.1:{free}', which cannot be bound" in line
    line = refusal(model, ports, "--port", str(free + 1))
    assert f"http is 'http://127.0.0.1:{free + 1}', which cannot be bound" in line


def test_a_port_that_sglang_may_not_take_may_be_taken(model):
    """`sglang.Engine` has no HTTP server, but its default port is the same as a server's."""
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        check_front_end(server_args(model, {}, "--port", str(taken.getsockname()[1])))


def test_a_folder_in_use_is_found_before_weights_are_loaded(model, tmp_path):
    extra = {"disk_path": str(tmp_path), "disk_gb": 3}
    check_front_end(server_args(model, extra, "--tp-size", "2"))
    with contextlib.closing(Directory(tmp_path / "rank1", None)):
        line = refusal(model, extra, "--tp-size", "2")
    assert f"disk path is '{tmp_path}/rank1', which process" in line
    assert "is using; give each process a directory of its own" in line
    (tmp_path / "rank0" / "entry-6-01234567-000000000001").touch()
    assert "of another family or release" in refusal(model, extra, "--tp-size", "2")


def test_settings_of_a_file_are_those_of_the_server(model, tmp_path):
    path = tmp_path / "droidspeak.yaml"
    for text, words in (
        ("host_gb: [1", "not YAML"),
        ("host_gb: 1\nports: 3", "ports"),
        ("push_to: [tcp://127.0.0.1:7009]", "no push_to any more"),
    ):
        path.write_text(text)
        assert words in refusal(model, {"config": str(path)})
    path.write_text("host_gb: 1.5\n")
    assert load_this_server(server_args(model, {"config": str(path)})).settings.host_gb == 1.5


def test_no_choice_is_another_value_in_yaml(tmp_path):
    """An unquoted `off` would be false in YAML."""
    path = tmp_path / "droidspeak.yaml"
    choices = {
        it.name: getattr(it.type, "__args__", None) or list(it.type)
        for it in msgspec.structs.fields(Settings)
        if get_origin(it.type) is Literal or isinstance(it.type, EnumType)
    }
    assert {"gate", "e_correction", "codec"} <= choices.keys()
    for name, values in choices.items():
        for value in values:
            path.write_text(f"{name}: {value}\n")
            assert getattr(parse_settings({"config": str(path)}), name) == value


def test_of_a_repository_only_what_is_served_is_loaded(tmp_path, monkeypatch):
    served = """
        config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model
        vocab.json merges.txt chat_template.jinja model.safetensors.index.json
        model-00001-of-00002.safetensors model-00002-of-00002.safetensors
        adapter_config.json adapter_model.safetensors
    """
    others = """
        original/consolidated.00.pth original/params.json original/model.safetensors
        consolidated.safetensors consolidated.safetensors.index.json pytorch_model.bin
        model-Q4_K_M.gguf onnx/model.onnx onnx/model.safetensors tf_model.h5 README.md
    """
    loaded: list[str] = []

    def snapshot_download(_name: str, revision: str | None, **patterns: Any) -> str:
        assert revision == "main"
        loaded[:] = filter_repo_objects([*served.split(), *others.split()], **patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert folder_of("acme/reader", "main") == tmp_path
    assert loaded == served.split()


def test_rotations_by_the_whole_batch(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    file = copy / "config.json"
    config = json.loads(file.read_text())
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    for longest, remedy in ((128, ""), (129, "start the server without droidspeak")):
        changes = {"rope_parameters": rope, "max_position_embeddings": longest}
        file.write_text(json.dumps(config | changes))
        identity = read_model_identity(copy)
        with pytest.raises(ConfigError, match=remedy) if remedy else contextlib.nullcontext():
            refuse.check_model(identity, str(copy))


def test_profile_of_another_pair(model, tmp_path):
    own = read_model_identity(model)
    other = replace(own, weights="other")
    third = replace(own, weights="third")
    path = tmp_path / "pair.json"
    write_profile(profile_of(other, third), path)
    line = refusal(model, {"profiles": [str(path)]})
    assert str(path) in line
    assert own.model_id in line
    assert f"weights is {own.weights!r}, and 'other' in the profile's sender" in line
    # A folder may hold the profiles of a whole fleet: those of others are passed over.
    write_profile(profile_of(own, other), tmp_path / "mine.json")
    server = load_this_server(server_args(model, {"profiles": [str(tmp_path)]}))
    assert [profile.receiver for profile in server.profiles] == [other]


def test_two_profiles_of_one_pair(model, tmp_path):
    """Both profiles are named, or the folder in which they are. The same profile named twice counts
    as one."""
    own = read_model_identity(model)
    for passed in (True, False):
        folder = tmp_path / str(passed)
        folder.mkdir()
        files = [folder / it for it in ("pair-400.json", "pair.json")]
        for file, has_passed in zip(files, (True, passed), strict=True):
            write_profile(profile_of(replace(own, weights="other"), own, passed=has_passed), file)
        for paths in (files, [folder]):
            extra = {"profiles": [*map(str, paths)], "gate": "none"}
            if passed:
                assert len(load_this_server(server_args(model, extra)).profiles) == 2
                continue
            line = refusal(model, extra)
            assert f"{files[0]} and {files[1]} are of one pair" in line and "move one" in line


def test_transition_layers_come_from_passed_profiles(model, tmp_path):
    own = read_model_identity(model)
    other = replace(own, weights="other")
    for passed, layers in ((True, (2,)), (False, ())):
        folder = tmp_path / f"{passed}"
        folder.mkdir()
        write_profile(profile_of(own, other, passed=passed), folder / "pair.json")
        on_disk = {"disk_path": str(tmp_path / "disk"), "disk_gb": 0.1}
        for is_read in ({"listen": HERE}, on_disk):
            extra = {"profiles": [str(folder)], **is_read}
            server = load_this_server(server_args(model, extra))
            assert server.transition_layers == layers, is_read
        server = load_this_server(server_args(model, {"profiles": [str(folder)]}))
        assert server.transition_layers == (), "no other server can read from this one"


def test_senders_are_those_of_usable_profiles_and_the_model_itself(model, tmp_path):
    own = read_model_identity(model)
    good, bad = (replace(own, weights=it) for it in ("good", "bad"))
    for sender, passed in ((good, True), (bad, False)):
        write_profile(profile_of(sender, own, passed=passed), tmp_path / f"{sender.weights}.json")
    write_profile(profile_of(own, bad), tmp_path / "sends.json")
    server = load_this_server(server_args(model, {"profiles": [str(tmp_path)]}))
    assert server.senders == {own.model_id: frozenset(), good.model_id: frozenset({2})}


def test_an_adapter_is_of_the_base_that_is_served(model, tmp_path):
    """The base counts as it was when it was loaded, even if its folder was overwritten or is
    gone."""
    base = shutil.copytree(model, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    identity = load_this_server(server_args(base, {})).identity
    models = Models(identity, identity.num_layers, adapter_digest)
    served = read_model_identity(base, None, adapter).model_id
    weights = base / "model.safetensors"
    save_file({name: it + 1 for name, it in load_file(weights).items()}, weights)
    assert read_model_identity(base, None, adapter).model_id != served
    models.add("a", adapter)
    shutil.rmtree(base)
    models.add("b", adapter)
    assert models.of("a") == models.of("b") == served


def test_adapters_that_cannot_be_served_are_refused_before_weights_are_loaded(model, tmp_path):
    adapter = write_adapter(tmp_path / "a", model)
    flags = ("--enable-lora", "--lora-paths", f"judge={adapter}", "--max-loras-per-batch", "1")
    check_front_end(server_args(model, {}, *flags))
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    stated = json.loads(config.read_text())

    def refused(**settings: object) -> str:
        read_server.cache_clear()
        config.write_text(json.dumps(stated | settings))
        return refusal(model, {}, *flags)

    assert "has layer_replication = " in refused(layer_replication=[[0, 4]])
    assert "has alora_invocation_tokens = 7" in refused(alora_invocation_tokens=7)
    assert "judge takes two slots of a batch" in refused(alora_invocation_tokens=[7])
    flags = (*flags[:-1], "2", "--lora-target-modules", "all")
    assert "judge cannot be served if adapters may" in refused(alora_invocation_tokens=[7])
    weights.unlink()
    assert f"adapter weights {weights} are missing" in refused()


def test_a_named_profile_has_to_have_passed(model, tmp_path):
    own = read_model_identity(model)
    path = tmp_path / "pair.json"
    other = replace(own, weights="other")
    write_profile(profile_of(own, other, passed=False), path)
    line = refusal(model, {"profiles": [str(path)]})
    assert f"{path} did not pass its gate: made up" in line
    server = load_this_server(server_args(model, {"profiles": [str(path)], "gate": "none"}))
    assert [profile.passed for profile in server.profiles] == [False], "for measurements"


def test_maps_of_e_are_read_where_plans_with_them_are_used(model, tmp_path):
    own = read_model_identity(model)
    other, path = replace(own, weights="other"), tmp_path / "pair.json"
    width = own.hidden_size
    correction = Correction(torch.ones(width), torch.zeros(width, width))
    best = BlockQuality(start=1, stop=2, quality=0.9, e_map=correction.named(1))
    plain = profile_of(other, own)
    paired = replace(plain, blocks=(best, *plain.blocks), recommended=best)
    write_profile(paired, path)
    write_corrections(paired, {best.e_map.sha256: correction}, path)
    extra = {"profiles": [str(path)]}
    server = load_this_server(server_args(model, extra))
    assert server.profiles == (paired,)
    assert torch.equal(server.corrections[best.e_map.sha256].bias, correction.bias)
    assert correction_bytes(server, torch.bfloat16) == 2 * (width + width * width)
    assert server.senders[other.model_id] == {1}

    without = extra | {"e_correction": "none"}
    off = load_this_server(server_args(model, without))
    assert off.profiles == (replace(plain, recommended=plain.blocks[0]),)
    assert not off.corrections, "nobody would use them"
    other_it = Correction(2 * torch.ones(width), torch.zeros(width, width))
    write_corrections(paired, {best.e_map.sha256: other_it}, path)
    read_server.cache_clear()
    line = refusal(model, extra)
    assert f"{maps_path(path)}: layer 1 is float32 of sha256 " in line
    assert "set e_correction: none" in line
    write_profile(replace(paired, blocks=(best,)), path)
    read_server.cache_clear()
    line = refusal(model, without)
    assert "all of its plans correct E; set e_correction to profile" in line


def test_a_line_names_a_model_of_this_server(model, tmp_path):
    own, path = read_model_identity(model), tmp_path / "line.json"
    extra = {"lines": [str(path)], "guard_path": str(tmp_path / "guard.json")}
    others = [replace(own, weights=it) for it in ("one", "two")]
    write_profile(profile_of(*others), path)
    assert f"{path} is of one pair, and of no line of models; make one" in refusal(model, extra)
    read_server.cache_clear()
    write_profile(line_of(others, proven=(0.1,) * 5), path)
    line = refusal(model, extra)
    assert f"{path} is of the line v1 → v2, and this server's model, {own.model_id}" in line
    read_server.cache_clear()
    write_profile(line_of([*others, own], proven=(0.1,) * 5, passed=False), path)
    assert f"{path} did not pass its gate" in refusal(model, extra)
    read_server.cache_clear()
    broken = line_of([own, *others], proven=(0.1,) * 5)
    broken = replace(broken, line=replace(broken.line, distances=((0.1,) * 3,)))
    write_profile(broken, path)
    assert f"{path} has a line of 3 models with 1 rows of distances" in refusal(model, extra)
    read_server.cache_clear()
    write_profile(line_of([own, *others], proven=(0.1,) * 5), path)
    server = load_this_server(server_args(model, extra))
    assert server.weights.distances_from(server.weights) == (0.0,) * 5
    plain = load_this_server(server_args(model, {}))
    assert plain.weights.sketches is None and plain.lines == (), "no line, no work"


def test_unreadable_profile(model, tmp_path):
    path = tmp_path / "pair.json"
    path.write_text('{"version": 99}')
    assert "version 99" in refusal(model, {"profiles": [str(path)]})
    path.write_text("{")
    assert "not a pair profile" in refusal(model, {"profiles": [str(path)]})


def test_unsupported_model_class(tmp_path):
    config = shape("llama", layers=2, hidden=128, heads=2, kv_heads=2)
    (path,) = write_models(tmp_path, config, ["mpt"])
    raw = json.loads((path / "config.json").read_text())
    raw["architectures"] = ["OlmoForCausalLM"]
    raw["model_type"] = "olmo"
    (path / "config.json").write_text(json.dumps(raw))
    line = refusal(path, {})
    assert "OlmoForCausalLM" in line
    assert "LlamaForCausalLM" in line and "GraniteForCausalLM" in line


def test_another_sglang_is_refused_by_name(monkeypatch):
    probe.require_supported()
    monkeypatch.setattr(probe, "version", lambda _name: "0.5.99")
    with pytest.raises(ConfigError, match=r"supports SGLang 0\.5\.23, found 0\.5\.99"):
        probe.require_supported()


@pytest.mark.server
@pytest.mark.parametrize(
    ("key", "words"), [("lisen", "no key lisen"), ("listen", "which cannot be bound")]
)
def test_launch_server_ends_with_one_line_before_it_reads_weights(model, tmp_path, key, words):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as taken:
        extra = {key: f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        spec = ServerSpec(model=model, options={"device": "cpu"}, droidspeak=extra)
        with pytest.raises(ServerFailed) as failed, running(spec, folder=tmp_path, env=ENV):
            pass
    assert str(failed.value).startswith("server ended with 1:")
    said = (tmp_path / "server.log").read_text().splitlines()
    assert [it for it in said if it.startswith("droidspeak: ")] == said[-1:]
    assert words in said[-1]
    assert not any("Traceback" in it or "Load weight" in it for it in said)


def test_plugin_is_installed_as_an_entry_point():
    plugins = [it.value for it in entry_points(group="sglang.srt.plugins")]
    assert "sglang_droidspeak.plugin:register" in plugins
