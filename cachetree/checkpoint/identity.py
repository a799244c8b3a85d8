"""Identity of a checkpoint by its content, read from its folder without loading it.

Neither a path nor a name counts. A checkpoint that was renamed, moved or sharded anew is the same
model. A checkpoint that was trained further under the same name is another model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cachetree.checkpoint.adapters import NO_ADAPTER, adapter_digest, read_adapter
from cachetree.checkpoint.digests import Digests, kept, tensor_digests
from cachetree.checkpoint.family import ModelIdentity
from cachetree.checkpoint.model_config import Config, read_config
from cachetree.checkpoint.rope import canonical_rope, plain
from cachetree.checkpoint.safetensors_files import layer_of, weight_files
from cachetree.checkpoint.tokenizer import tokenizer_digest
from cachetree.checkpoint.weights import Weights, loaded, of_folder
from cachetree.errors import ConfigError, written

COMPUTING_KEYS: Final = """
    attention_bias attention_multiplier attn_logit_softcapping clip_qkv decoder_sparse_step
    embedding_multiplier final_logit_softcapping first_k_dense_replace hidden_act
    hidden_activation intermediate_size layer_types logits_scaling max_window_layers mlp_bias
    mlp_only_layers moe_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts num_experts_per_tok qkv_bias
    quantization_config query_pre_attn_scalar residual_multiplier rms_norm_eps rope_is_neox_style
    routed_scaling_factor scale_emb shared_expert_intermediate_size sliding_window
    tie_word_embeddings topk_group use_qk_norm use_sliding_window vocab_size
"""
"""Config fields about the computation, besides sizes and rope. They are listed one by one, because
all other fields (versions, paths, generation defaults) differ between saves of one model."""
_WINDOW_KEYS: Final = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


def read_model_identity(
    path: Path, cache_dir: Path | None = None, adapter: Path | None = None
) -> ModelIdentity:
    """Return the identity of the Hugging Face checkpoint in folder `path`, with a PEFT adapter if
    given.

    All bytes of the weights are read, unless `cache_dir` has their digests of an earlier call (see
    `digests.kept`). Raises ConfigError naming the file that is missing or wrong.
    """
    identity = read_weights(path, cache_dir).started_as
    return identity if adapter is None else adapted(identity, adapter)


def read_weights(path: Path, cache_dir: Path | None = None) -> Weights:
    """Return the weights of the checkpoint in folder `path`, which include the model's identity.
    Reads and raises as `read_model_identity` does."""
    config = _config(path)
    identity = ModelIdentity(
        **_shape(path, config, cache_dir),
        num_attention_heads=_number(config, "num_attention_heads", path),
        weights="",
    )
    weights = of_folder(path, identity, _computing(config), cache_dir)
    assert weights.identity is not None, "every tensor was read"
    return replace(weights, started_as=weights.identity)


def adapted(identity: ModelIdentity, adapter: Path) -> ModelIdentity:
    """Return the identity of a model with a PEFT adapter; raises ConfigError."""
    _require_folder("adapter", adapter, "PEFT")
    return identity.with_adapter(adapter_digest(adapter))


def first_difference(
    a: Path,
    b: Path,
    adapter_a: Path | None = None,
    adapter_b: Path | None = None,
    cache_dir: Path | None = None,
) -> int:
    """Return the first layer at which two models differ in any byte; the number of layers if there
    is no difference.

    Below this layer their KV is bit-identical, and so is the residual stream that enters it. So a
    block from this layer to the last one is lossless. A difference in q_proj, o_proj or the MLP
    counts at its own layer: the KV of that layer is equal, but the residual stream behind it is
    not.

    Returns 0 if embeddings or config fields that change the computation differ. Modules after the
    layers (final norm, output head) do not count, except a head tied to the embeddings.

    With adapters, return the lower of two layers: the first at which the bases differ, and the
    first at which the adapters differ (see `Adapter`).

    Raises ConfigError if the models have different numbers of layers, or an adapter is not a LoRA
    on the base's own layers.
    """
    ours, theirs = _config(a), _config(b)
    num_layers = _number(ours, "num_hidden_layers", a)
    if _number(theirs, "num_hidden_layers", b) != num_layers:
        raise ConfigError(f"{a} and {b} have different num_hidden_layers, so they cannot be a pair")
    if canonical_rope(ours) != canonical_rope(theirs) or _computing(ours) != _computing(theirs):
        return 0
    of_a, of_b = _loaded(a, cache_dir), _loaded(b, cache_dir)
    is_tied = bool(ours.get("tie_word_embeddings"))
    of_bases = min(
        (
            0 if is_tied and "lm_head" in name.split(".") else layer_of(name, num_layers)
            for name in {*of_a, *of_b}
            if of_a.get(name) != of_b.get(name)
        ),
        default=num_layers,
    )
    one, other = (
        read_adapter(it, num_layers) if it else NO_ADAPTER for it in (adapter_a, adapter_b)
    )
    return min(of_bases, num_layers, one.first_difference(other, num_layers))


def read_shape(path: Path) -> dict[str, Any]:
    """Return `ModelIdentity.shape` of the checkpoint in folder `path`. Its weights may be absent.
    Raises ConfigError as `read_model_identity` does."""
    return _shape(path, _config(path), None)


def _shape(path: Path, config: Config, cache_dir: Path | None) -> dict[str, Any]:
    num_heads = _number(config, "num_attention_heads", path)
    hidden_size = _number(config, "hidden_size", path)
    return {
        "architecture": str(config["architectures"][0]),
        "num_layers": _number(config, "num_hidden_layers", path),
        "hidden_size": hidden_size,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or hidden_size // num_heads,
        "rope": canonical_rope(config),
        "tokenizer": _tokenizer(path, cache_dir),
    }


def _tokenizer(path: Path, cache_dir: Path | None) -> str:
    file = path / "tokenizer.json"
    if not file.is_file():
        return tokenizer_digest(path)
    return kept(cache_dir, "tokenizer", file, lambda _: {"": tokenizer_digest(path)})[""]


def _loaded(path: Path, cache_dir: Path | None) -> Digests:
    return loaded(tensor_digests(weight_files(path), cache_dir))


def _config(path: Path) -> Config:
    _require_folder("model", path, "checkpoint")
    return read_config(path)


def _require_folder(what: str, folder: Path, kind: str) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"{what} folder {written(folder)} does not exist; give a local {kind} folder"
        )


def _number(config: Config, key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"{path / 'config.json'} has {key} = {value!r}; a positive whole number is needed"
        )
    return value


def _computing(config: Config) -> dict[str, Any]:
    """Return the config fields that change the computation. Forms of a config that mean the same
    give equal results."""
    keys = {*COMPUTING_KEYS.split()} - (set() if _has_window(config) else _WINDOW_KEYS)
    return {key: plain(config[key]) for key in sorted(keys) if config.get(key) not in (None, [])}


def _has_window(config: Config) -> bool:
    """Return whether some layer's attention is limited to a window, or of another special type."""
    types = set(config.get("layer_types") or ())
    if types:
        return types != {"full_attention"}
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
