"""Merge a LoRA adapter, as PEFT writes it, into its base. The result is an ordinary model.

Tensors are merged by their names in `adapter_model.safetensors`:

    MODULE.lora_A.weight, .lora_B.weight      MODULE.weight += alpha / r x B A
    MODULE.lora_embedding_A, _B               MODULE.weight += alpha / r x (B A) transposed
    MODULE.base_layer.weight                  the base's own embedding, which PEFT also saves

The names are those of the checkpoint's files. So the fused matrices of phi3 and the experts of
mixtral (`block_sparse_moe.experts.0.w1`) are merged like any other matrix.

Two kinds of adapters are refused. First, adapters with a config that changes more than the scale:
SGLang applies alpha / r to every matrix, and ignores the rest. Second, adapters that change
embeddings or head of a model in which both are one tensor: merging would change both.

`fan_in_fan_out` is allowed: PEFT ignores it for all model classes that this project supports.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
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
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_FACTOR: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|embedding_A|embedding_B)"
)
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

_WITHOUT_EFFECT: Final = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config"),
    *("megatron_config", "megatron_core", "peft_version", "qalora_group_size", "r", "revision"),
    *("target_modules", "task_type"),
)
"""Settings of an adapter that may have any value: they name tensors, set the scale, or matter only
in training."""
_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # These leave the base as it was.
}
"""Allowed values of a few more settings. Any setting beyond both lists must be empty or false."""
_REMEDY: Final = "merge it with peft (merge_and_unload), and profile and serve the result"


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an adapter's config that decide its scale."""

    peft_type: str
    lora_alpha: float
    r: int


def read_config(adapter: Path) -> LoraConfig:
    """Read an adapter's config. Raises ConfigError if it is broken, or has settings that SGLang
    would ignore."""
    file = adapter / ADAPTER_CONFIG
    try:
        raw = file.read_bytes()
        config = msgspec.json.decode(raw, type=dict[str, Any])
        for key in ("peft_type", *config):
            value = config.get(key)
            if value and key not in _WITHOUT_EFFECT and value not in _HARMLESS.get(key, ()):
                raise ConfigError(
                    f"{file} has {key} = {value!r}, and SGLang applies lora_alpha / r to every "
                    f"matrix and nothing else; {_REMEDY}"
                )
        return msgspec.json.decode(raw, type=LoraConfig)
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc.strerror}); give a folder that peft saved an adapter to"
        ) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{file} is not a LoRA adapter's config: {exc}; save it again") from exc


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint folder, from one file or several; raises ConfigError."""
    return {name: t for file in weight_files(folder) for name, t in _load(file).items()}


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"{file} cannot be read ({exc}); it must be there and whole") from exc


def with_adapter(
    base: Mapping[str, Tensor], adapter: Path, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the base's weights with the adapter in folder `adapter` merged.

    Raises ConfigError naming the adapter.
    """
    config = read_config(adapter)
    try:
        return merged(base, _load(adapter / ADAPTER_WEIGHTS), config, dtype)
    except ConfigError as exc:
        raise ConfigError(f"adapter {adapter}: {exc}") from exc


@torch.no_grad()
def merged(
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    config: LoraConfig,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the base's weights with an adapter's tensors merged. The module's docstring has the
    formulas.

    Sums are made in float64, so every machine rounds them to the same bytes. A result is in
    `dtype`, or in its matrix's own dtype if `dtype` is None. Tensors that the adapter does not
    change are not copied. Raises ConfigError if the adapter does not fit the base.
    """
    result = dict(base)
    factors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in adapter.items():
        name = key.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(name):
            factors[match["module"]][match["part"]] = tensor
        else:
            name = name.replace(".base_layer.", ".")
            _require_fitting(base, name, tensor.shape)
            if not torch.equal(base[name].to(tensor.dtype), tensor):
                raise ConfigError(f"its {name} is not the base's, and no LoRA factor; {_REMEDY}")
    for module, parts in factors.items():
        a, b = _factors(module, parts)
        if len(a) != config.r:
            raise ConfigError(
                f"{module} has factors of rank {len(a)} and the config says {config.r}; weights "
                "and config are not of one adapter"
            )
        change = config.lora_alpha / config.r * b.double() @ a.double()
        name = f"{module}.weight"
        _require_fitting(base, name, change.shape)
        result[name] = (base[name].double() + change).to(dtype or base[name].dtype)
    return result


def _factors(module: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return an adapter's factors A `[rank, in]` and B `[out, rank]` for a matrix `[out, in]`."""
    try:
        if "embedding_A" in parts:  # such a matrix is [tokens, hidden], and B A its transpose
            return parts["embedding_B"].T, parts["embedding_A"].T
        return parts["A.weight"], parts["B.weight"]
    except KeyError as exc:
        raise ConfigError(f"lora_{exc.args[0]} of {module} is missing; save it again") from None


def _require_fitting(base: Mapping[str, Tensor], name: str, shape: torch.Size) -> None:
    """Raise ConfigError if the base has no tensor of this name and shape, or if the tensor is both
    embeddings and head."""
    if name in (_HEAD, _EMBEDDINGS) and (
        _HEAD not in base or (_EMBEDDINGS in base and torch.equal(base[_HEAD], base[_EMBEDDINGS]))
    ):
        raise ConfigError(
            f"it changes {name}, and the base's embeddings and head are one tensor; {_REMEDY}"
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
