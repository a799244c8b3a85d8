"""Who a checkpoint is, by content: read from its folder without loading it.

Neither a path nor a name says anything here; a checkpoint that was renamed, moved or sharded anew
is the same model, and one that was trained further under the same name is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cachetree.checkpoint.adapters import NO_ADAPTER, adapter_digest, read_adapter
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.rope import canonical_rope
from cachetree.checkpoint.safetensors_files import (
    Tensor,
    have_equal_content,
    layer_of,
    read_json,
    read_tensors,
    sampled_digest,
    weight_files,
)
from cachetree.errors import UNREADABLE, ConfigError, written

Config = Mapping[str, Any]
"""A config.json as it was parsed; which keys it has is up to the model."""

_CACHE_VERSION = "4"
"""Part of every cache key; changes when the meaning of an identity does."""

_COMPUTING_KEYS = """
    attention_bias attention_multiplier attn_logit_softcapping clip_qkv decoder_sparse_step
    embedding_multiplier final_logit_softcapping first_k_dense_replace hidden_act
    hidden_activation intermediate_size layer_types logits_scaling max_window_layers mlp_bias
    mlp_only_layers moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts num_experts_per_tok num_local_experts qkv_bias
    quantization_config query_pre_attn_scalar residual_multiplier rms_norm_eps rope_is_neox_style
    routed_scaling_factor scale_emb shared_expert_intermediate_size sliding_window
    tie_word_embeddings topk_group use_qk_norm use_sliding_window vocab_size
"""
"""What a config says about the computation beside sizes and rope. Named one by one, because
everything else (versions, paths, generation defaults) differs between saves of one model."""

_TOKENIZER_RULES = ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")
_TOKENIZER_FILES = """
    tokenizer.model tiktoken.model vocab.json merges.txt vocab.txt added_tokens.json
"""
_TOKENIZER_SETTINGS = """
    add_bos_token add_eos_token add_prefix_space added_tokens_decoder do_lower_case legacy
"""


def read_model_identity(
    path: Path, cache_dir: Path | None = None, adapter: Path | None = None
) -> ModelIdentity:
    """The identity of the Hugging Face checkpoint in folder `path`, with a PEFT adapter's if given.

    Of the weights about 12 KiB of each layer's tensor are read, and all of the others, embeddings
    first of all: a little less than a second for each GB. Under `cache_dir` what was read of the
    checkpoint is kept by the path, size and modification time of every file; a broken cache is made
    anew. Raises ConfigError naming the file that is missing or wrong.
    """
    _require_folder("model", path, "checkpoint")
    identity = _read_base(path, cache_dir)
    return identity if adapter is None else adapted(identity, adapter)


def adapted(identity: ModelIdentity, adapter: Path) -> ModelIdentity:
    """What a PEFT adapter, of which a sample is read, makes of a model; raises ConfigError."""
    _require_folder("adapter", adapter, "PEFT")
    weights = hashlib.sha256(f"{identity.weights}{adapter_digest(adapter)}".encode())
    return msgspec.structs.replace(identity, weights=weights.hexdigest())


def _read_base(path: Path, cache_dir: Path | None) -> ModelIdentity:
    if cache_dir is None:
        return _compute(path)
    cached = cache_dir / f"{_cache_key(path)}.json"
    with contextlib.suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(cached.read_bytes(), type=ModelIdentity)
    identity = _compute(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds next time
        cache_dir.mkdir(parents=True, exist_ok=True)
        fresh = cached.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_bytes(msgspec.json.encode(identity))
        fresh.replace(cached)
    return identity


def first_difference(
    a: Path, b: Path, adapter_a: Path | None = None, adapter_b: Path | None = None
) -> int:
    """The first layer at which two models differ in any byte; the number of layers if in none.

    Below it their KV is bit-identical, and so is the residual stream that enters it: a block from
    there to the last layer is lossless. That is why a difference in q_proj, o_proj or the MLP
    counts at its own layer, though the KV of that layer is still the same.

    0 also where embeddings or what the config says about the computation differ. What comes after
    the layers (final norm, output head) does not count, but for a head tied to the embeddings.

    With adapters it is the bases' or the adapters', whichever is lower (see `Adapter`).

    Raises ConfigError where the models have different numbers of layers, or an adapter is not a
    LoRA on the base's own layers.
    """
    ours, theirs = (_text_config(read_json(it / "config.json")) for it in (a, b))
    num_layers = _number(ours, "num_hidden_layers", a)
    if _number(theirs, "num_hidden_layers", b) != num_layers:
        raise ConfigError(f"{a} and {b} have different num_hidden_layers; they are no pair")
    if canonical_rope(ours) != canonical_rope(theirs) or _computing(ours) != _computing(theirs):
        return 0
    our_tensors, their_tensors = read_tensors(weight_files(a)), read_tensors(weight_files(b))
    has_head = "lm_head.weight" in our_tensors or "lm_head.weight" in their_tensors
    is_tied = bool(ours.get("tie_word_embeddings")) or not has_head
    of_bases = _first_difference(our_tensors, their_tensors, num_layers, is_tied)
    one, other = (
        read_adapter(it, num_layers) if it else NO_ADAPTER for it in (adapter_a, adapter_b)
    )
    return min(of_bases, one.first_difference(other, num_layers))


def _first_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], num_layers: int, is_tied: bool
) -> int:
    def layer(name: str) -> int:
        is_embedding = is_tied and "lm_head" in name.split(".")
        return 0 if is_embedding else min(layer_of(name, num_layers), num_layers)

    for name in sorted({*ours, *theirs}, key=layer):
        if layer(name) == num_layers:
            break
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or not have_equal_content(one, other):
            return layer(name)
    return num_layers


def read_shape(path: Path) -> dict[str, Any]:
    """`ModelIdentity.shape` of the checkpoint in folder `path`, whose weights need not be there;
    raises ConfigError as `read_model_identity` does."""
    _require_folder("model", path, "checkpoint")
    whole = read_json(path / "config.json")
    config = _text_config(whole)
    architectures = whole.get("architectures") or config.get("architectures")
    if not architectures:
        raise ConfigError(f"{path / 'config.json'} names no architectures; add the model class")
    num_heads = _number(config, "num_attention_heads", path)
    hidden_size = _number(config, "hidden_size", path)
    return {
        "architecture": str(architectures[0]),
        "num_layers": _number(config, "num_hidden_layers", path),
        "hidden_size": hidden_size,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or hidden_size // num_heads,
        "rope": canonical_rope(config),
        "tokenizer": _tokenizer_digest(path),
    }


def _compute(path: Path) -> ModelIdentity:
    shape = read_shape(path)
    config = _text_config(read_json(path / "config.json"))
    weights = hashlib.sha256(sampled_digest(read_tensors(weight_files(path))).encode())
    weights.update(_canonical(_computing(config)))
    return ModelIdentity(
        **shape,
        num_attention_heads=_number(config, "num_attention_heads", path),
        weights=weights.hexdigest(),
    )


def _require_folder(what: str, folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"{what} folder {written(folder)} does not exist; give a local {kind} folder"
        )


def _tokenizer_digest(path: Path) -> str:
    """Of what decides which ids a text becomes; how ids become text again does not matter."""
    if (path / "tokenizer.json").is_file():
        stated = read_json(path / "tokenizer.json")
        rules = {key: stated.get(key) for key in _TOKENIZER_RULES}
        rules["model"] = _tokenizer_model(stated.get("model") or {})
        return hashlib.sha256(_canonical(rules)).hexdigest()
    files = [path / name for name in _TOKENIZER_FILES.split() if (path / name).is_file()]
    if not files:
        raise ConfigError(
            f"{path} has no tokenizer.json, tokenizer.model or vocabulary file; save the tokenizer "
            "beside the model"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    settings = path / "tokenizer_config.json"
    stated = read_json(settings) if settings.is_file() else {}
    digest.update(_canonical({k: stated[k] for k in _TOKENIZER_SETTINGS.split() if k in stated}))
    return digest.hexdigest()


def _tokenizer_model(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The same for what different releases write: options at their default, merges as pairs."""
    model = {key: value for key, value in stated.items() if value not in (None, False, "")}
    merges = stated.get("merges") or []
    model["merges"] = [it if isinstance(it, str) else " ".join(it) for it in merges]
    return model


def _cache_key(folder: Path) -> str:
    """Of the path, size and time of every file that an identity may be read from."""
    digest = hashlib.sha256(f"{_CACHE_VERSION}\0{folder.resolve()}".encode())
    for file in sorted(folder.iterdir()):
        if file.is_file():
            stat = file.stat()
            digest.update(f"\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _computing(config: Config) -> dict[str, Any]:
    return {key: config[key] for key in _COMPUTING_KEYS.split() if config.get(key) is not None}


def _text_config(config: Config) -> Config:
    """The language model's part, where a model has several."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _number(config: Config, key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"{path / 'config.json'} has {key} = {value!r}; a positive whole number is needed"
        )
    return value


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
