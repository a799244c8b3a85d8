"""Compare LoRA adapters layer by layer, to find the first layer at which two models differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree.checkpoint.digests import Digests, digest_of, tensor_digests
from cachetree.checkpoint.rope import plain
from cachetree.checkpoint.safetensors_files import (
    layer_of,
    read_json,
    read_tensors,
    require_no_others,
    weight_files,
)
from cachetree.errors import ConfigError

_NOTES = """
    auto_mapping base_model_name_or_path bias exclude_modules inference_mode layers_pattern
    layers_to_transform lora_dropout modules_to_save peft_version revision target_modules
    task_type
"""
"""Fields of an adapter's config that do not change its computation: they state its origin or its
training, or name its tensors. All other fields are compared."""
_IGNORED: Final = ("use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Config keys that change what PEFT computes, but that SGLang 0.5.23 does not read."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "init_lora_weights": True,
    "lora_alpha": 8,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "r": 8,
}
"""PEFT's defaults of fields that some releases leave out of the config."""
_EMBEDS: Final = {"embed_tokens", "vocab_emb", "embeddings", "word_embeddings", "all"}
"""Values of `target_modules` with which SGLang also adapts the embeddings."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one adapter on a base.

    Every tensor counts as a change of its own layer. This is cautious for q_proj, o_proj and the
    MLP: such a tensor changes the KV of later layers only. Two things are not compared: the
    config's list of target modules, and the adapter's output head. SGLang gives an adapter a head
    of its own, even if the base ties its head to its embeddings.
    """

    applied: str
    """Digest of the config fields that decide how the tensors are scaled and applied."""
    layers: Mapping[int, str]
    """Digest of all tensors of a layer, for each layer that the adapter changes."""
    invocation: tuple[int, ...] = ()
    """Tokens that activate an activated LoRA: it acts from their last occurrence on. Empty: the
    adapter acts from the start."""

    def first_difference(self, other: Adapter, num_layers: int) -> int:
        """Return the first layer at which this adapter and another make different models of a base.

        Returns `num_layers` if they do not differ. The tensors A and B are compared, not their
        product. So an adapter with a product of 0 differs from the base, too.
        """
        ours, theirs = self.layers, other.layers
        touched = {*ours, *theirs}
        if self.applied == other.applied:
            touched = {it for it in touched if ours.get(it) != theirs.get(it)}
        return min(touched, default=num_layers)


NO_ADAPTER: Final = Adapter(applied="", layers={})
"""The base without an adapter."""


def read_adapter(path: Path, num_layers: int) -> Adapter:
    """Read the PEFT folder `path`, every byte of it. Raises ConfigError if it is not a LoRA on the
    base's own layers."""
    invocation = read_invocation(path)
    layers: dict[int, Digests] = {}
    for name, digest in tensor_digests(_weights(path)).items():
        layer = min(layer_of(name, num_layers), num_layers)
        if layer < num_layers:  # Tensors behind the layers do not change KV.
            layers.setdefault(layer, {})[name] = digest
    return Adapter(
        applied=_applied(path),
        layers={layer: digest_of(it) for layer, it in layers.items()},
        invocation=invocation,
    )


def read_invocation(path: Path) -> tuple[int, ...]:
    """Read `Adapter.invocation` from the PEFT folder `path`, without reading the tensors' bytes.
    Raises ConfigError like `read_adapter`."""
    tokens = _applying(path).get("alora_invocation_tokens", [])
    if not isinstance(tokens, list) or not all(type(it) is int and it >= 0 for it in tokens):
        raise ConfigError(
            f"{path / 'adapter_config.json'} has alora_invocation_tokens = {tokens!r}; a list of "
            "token ids is needed"
        )
    for name in read_tensors(_weights(path)) if tokens else ():
        if "lm_head" in name.split("."):
            raise ConfigError(
                f"{path} is an activated LoRA with {name}, which SGLang applies to whole prompts; "
                "train it without lm_head"
            )
    return tuple(tokens)


def acting(path: Path) -> tuple[str, list[str]]:
    """Describe for people at which token the adapter in the PEFT folder `path` begins to act. Also
    return the keys of its config that SGLang ignores. Raises ConfigError if the config cannot be
    read."""
    config = read_json(path / "adapter_config.json")
    if invocation := config.get("alora_invocation_tokens"):
        where = f"acts from its invocation on, tokens {invocation}"
    else:
        where = "acts on whole prompts, as it names no alora_invocation_tokens"
    return where, [key for key in _IGNORED if config.get(key)]


def targets(path: Path) -> list[str]:
    """Return names, without layer numbers, of the matrices that the PEFT folder `path` changes."""
    return sorted({name.split(".lora_")[0].split(".")[-1] for name in read_tensors(_weights(path))})


def base_of(path: Path) -> Path | None:
    """Return the checkpoint folder that the PEFT folder `path` names as its base. None if this
    folder does not exist here."""
    named = read_json(path / "adapter_config.json").get("base_model_name_or_path")
    folders = (path / str(named), Path(str(named)))
    return next((it.resolve() for it in folders if named and (it / "config.json").is_file()), None)


def require_base(path: Path, base: Path) -> None:
    """Raise ConfigError if the adapter in folder `path` does not fit the checkpoint in folder
    `base`: a tensor fits no matrix, or the vocabulary lacks a token of the invocation."""
    weights = read_tensors(weight_files(base))
    for name, tensor in read_tensors(_weights(path)).items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        whole = weights.get(f"{module}.weight")
        axis = 1 if part.startswith("A.") else 0
        if part.startswith(("A.", "B.")) and (
            whole is None or whole.shape[axis] != tensor.shape[axis]
        ):
            of_base = "has none" if whole is None else f"is of shape {list(whole.shape)}"
            raise ConfigError(
                f"{path} has {name} of shape {list(tensor.shape)}, and {module} of {base} "
                f"{of_base}; give the base that it was trained on"
            )
    num_tokens = read_json(base / "config.json").get("vocab_size")
    unknown = [it for it in read_invocation(path) if num_tokens and it >= num_tokens]
    if unknown:
        raise ConfigError(
            f"{path} has invocation tokens {unknown}, and {base} a vocabulary of {num_tokens}: no "
            "prompt ever invokes it; give the base that it was trained on"
        )


def adapter_digest(path: Path) -> str:
    """Return the digest of all tensors of the PEFT folder `path` and of how they are applied.
    Raises ConfigError like `read_adapter`."""
    return digest_of(tensor_digests(_weights(path))) + _applied(path)


def _weights(path: Path) -> list[Path]:
    weights = path / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigError(f"adapter weights {weights} are missing; save them as safetensors")
    files = require_no_others([weights], path.glob("*.safetensors"))
    targets = read_json(path / "adapter_config.json").get("target_modules")
    if isinstance(targets, list) and _EMBEDS.isdisjoint(str(it).split(".")[-1] for it in targets):
        for name in read_tensors(files):
            if "embed_tokens.lora_" in name:
                raise ConfigError(
                    f"{weights} has {name}, which SGLang leaves out; name embed_tokens in the "
                    "config's target_modules, or save the adapter without it"
                )
    return files


def _applied(path: Path) -> str:
    return digest_of({key: plain(value) for key, value in _applying(path).items()})


def _applying(path: Path) -> dict[str, Any]:
    """Return the settings of an adapter's config that decide how its tensors are applied."""
    config = read_json(path / "adapter_config.json")
    if not config.get("peft_type"):
        raise ConfigError(
            f'{path / "adapter_config.json"} has no peft_type; set it to "LORA" if the adapter '
            "is a LoRA"
        )
    for key, accepted in (("peft_type", "LORA"), ("layer_replication", None)):
        if config.get(key) != accepted:
            raise ConfigError(
                f"{path / 'adapter_config.json'} has {key} = {config.get(key)!r}; which layers "
                "differ is known only of LoRA on the base's own layers, so merge it into its base"
            )
    return {
        key: value
        for key, value in config.items()
        if key not in _NOTES.split() and value and value != _DEFAULTS.get(key)
    }
