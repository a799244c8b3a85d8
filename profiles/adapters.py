"""Merge a LoRA adapter, as PEFT writes it, into its base: the result is a model like any other.

What is merged, by the names in `adapter_model.safetensors`:

    MODULE.lora_A.weight, .lora_B.weight      MODULE.weight += scale x B A
    MODULE.lora_embedding_A, _B               MODULE.weight += scale x (B A) transposed
    MODULE.lora_B.bias                        MODULE.bias += scale x that
    PARAMETER, MODULE.base_layer.PARAMETER    replaced: biases and whole modules that were trained

The names are those of the checkpoint's files, so the fused matrices of phi3 and the experts of
mixtral (`block_sparse_moe.experts.0.w1`) are matrices like others. Refused are variants that are no
such sum (DoRA, …), adapters that changed their base when they were made (PiSSA, …), factors of
whole stacks of experts (`target_parameters`) and changes of embeddings or head where the two are
tied: PEFT itself computes something else there before it merges than after.

`fan_in_fan_out` speaks of transposed weights; no family here stores any, and PEFT ignores it then.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cachetree import ConfigError
from cachetree.checkpoint import weight_files

ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_FACTOR: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|B\.bias|embedding_A|embedding_B)"
)
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

_UNDERSTOOD: Final = (
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
    *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha"),
    *("lora_bias", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
    *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "target_modules", "task_type", "use_rslora"),
)
"""Settings that are obeyed, that say which tensors there are, or without effect once trained."""
_HARMLESS_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base as it was."""
_REMEDY: Final = "merge it with peft itself (merge_and_unload) and give the result as the model"
_UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "bias": (None, "none"),
    **dict.fromkeys(
        ("alpha_pattern", "lora_bias", "modules_to_save", "rank_pattern", "use_rslora"),
        (None, False, {}, []),
    ),
}
"""Settings without effect in SGLang, by the values that PEFT does not obey either."""

Scale = Callable[[str, int], float]
"""The factor of a module's product, by the module's name and the rank of its factors."""


class _Stated(msgspec.Struct):
    """What of an adapter's config decides its scale."""

    lora_alpha: float
    r: int
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, int] | None = None
    use_rslora: bool | None = False


def _of_module(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends in, as PEFT looks it up."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_scale(adapter: Path) -> Scale:
    """How an adapter's factors are scaled.

    Raises ConfigError where its config is broken or asks for what cannot be merged.
    """
    file = adapter / ADAPTER_CONFIG
    try:
        raw = file.read_bytes()
        config = msgspec.json.decode(raw, type=dict[str, Any])
        _refuse_variants(file, config)
        stated = msgspec.json.decode(raw, type=_Stated)
        for key in (*(stated.alpha_pattern or ()), *(stated.rank_pattern or ())):
            re.compile(key)
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc.strerror}); give a folder that peft saved an adapter to"
        ) from exc
    except (msgspec.DecodeError, re.error) as exc:
        raise ConfigError(f"{file} is not a LoRA adapter's config: {exc}; save it again") from exc

    def scale(module: str, rank: int) -> float:
        if rank != (stated_rank := _of_module(stated.rank_pattern, module, stated.r)):
            raise ConfigError(
                f"{module} has factors of rank {rank} and the config says {stated_rank}; "
                "weights and config are not of one adapter"
            )
        alpha = _of_module(stated.alpha_pattern, module, stated.lora_alpha)
        return alpha / (rank**0.5 if stated.use_rslora else rank)

    return scale


def require_served(adapter: Path) -> None:
    """Raise ConfigError where SGLang serves another model than `with_adapter` makes; `read_scale`
    has read the config before."""
    file = adapter / ADAPTER_CONFIG
    config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    for key, idle in _UNSERVED.items():
        if (value := config.get(key)) not in idle:
            raise ConfigError(
                f"{file} has {key} = {value!r}, and SGLang applies lora_alpha / r to every matrix "
                "and nothing else; merge it with peft (merge_and_unload), and profile and serve "
                "the result"
            )


def _refuse_variants(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{file} has peft_type = {config.get('peft_type')!r}; only LORA is merged here, so "
            f"{_REMEDY}"
        )
    if (start := config.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise ConfigError(
            f"{file} has init_lora_weights = {start!r}, which changed the base; save the adapter "
            "with peft's path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if value and key not in _UNDERSTOOD:
            raise ConfigError(f"{file} has {key} = {value!r}, which is not merged here; {_REMEDY}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, whole or sharded; raises ConfigError."""
    return {name: t for file in weight_files(folder) for name, t in _load(file).items()}


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"{file} cannot be read ({exc}); it must be there and whole") from exc


def with_adapter(
    base: Mapping[str, Tensor], adapter: Path, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The base's weights with the adapter in folder `adapter` merged, as `merged` says.

    Raises ConfigError naming the adapter.
    """
    scale = read_scale(adapter)
    try:
        return merged(base, _load(adapter / _ADAPTER_WEIGHTS), scale, dtype)
    except ConfigError as exc:
        raise ConfigError(f"adapter {adapter}: {exc}") from exc


@torch.no_grad()
def merged(
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    scale: float | Scale,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The base's weights with an adapter's tensors merged: see the table above.

    Sums are made in float64, so that every machine rounds them to the same bytes, and come in
    `dtype`, or in that of the matrix; what the adapter does not touch is the base's own tensor.
    Raises ConfigError where the two do not fit.
    """
    result = dict(base)
    factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in adapter.items():
        name = key.removeprefix(_PREFIX)
        if found := _FACTOR.fullmatch(name):
            factors[found["module"]][found["part"]] = tensor
        else:
            name = name.replace(".base_layer.", ".")
            _require_fitting(base, name, tensor.shape)
            result[name] = tensor.to(dtype or base[name].dtype)
    for module, parts in factors.items():
        a, b = _factors(module, parts)
        factor = scale if isinstance(scale, float) else scale(module, a.shape[0])
        changes = {"weight": factor * b.double() @ a.double()}
        if "B.bias" in parts:
            changes["bias"] = factor * parts["B.bias"].double()
        for part, change in changes.items():
            name = f"{module}.{part}"
            _require_fitting(base, name, change.shape)
            result[name] = (result[name].double() + change).to(dtype or base[name].dtype)
    return result


def _factors(module: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of a matrix of `[out, in]`: `[rank, in]` and `[out, rank]`."""
    try:
        if "embedding_A" in parts:  # such a matrix is [tokens, hidden], B A the reverse
            return parts["embedding_B"].T, parts["embedding_A"].T
        return parts["A.weight"], parts["B.weight"]
    except KeyError as exc:
        raise ConfigError(f"lora_{exc.args[0]} of {module} is missing; save it again") from None


def _require_fitting(base: Mapping[str, Tensor], name: str, shape: torch.Size) -> None:
    """Raise ConfigError where the base has no tensor of this name and shape of its own."""
    if name in (_HEAD, _EMBEDDINGS) and (
        _HEAD not in base or (_EMBEDDINGS in base and torch.equal(base[_HEAD], base[_EMBEDDINGS]))
    ):
        raise ConfigError(
            f"it changes {name}, and the base's embeddings and head are one tensor: {_REMEDY}"
        )
    if name not in base:
        raise ConfigError(
            f"it has {name}, which the base lacks; give the base that it was trained on, "
            f"or {_REMEDY}"
        )
    if base[name].shape != shape:
        raise ConfigError(
            f"its {name} is of {list(shape)} and the base's of {list(base[name].shape)}; "
            "give the base that it was trained on"
        )
