"""Load the profiler's models: two models of one family, each possibly with a LoRA adapter.

An impossible pair is refused before any weights are read, with an error of one line.

SGLang pins one release of transformers. `check_layers` finds whether another release computes
differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from cachetree import ConfigError, Family, ModelIdentity
from cachetree.checkpoint import (
    first_difference,
    read_model_identity,
    tokenizer_difference,
    user_cache,
    varying_rope,
)
from profiles.adapters import ADAPTER_CONFIG, read_config, read_weights, with_adapter
from profiles.compute.layered import HOST
from profiles.compute.quantised import Quantization, check_quantization, matrices

ARCHITECTURES: Final[Mapping[str, type[PreTrainedModel]]] = {
    f"{family}ForCausalLM": getattr(transformers, f"{family}ForCausalLM")
    for family in (
        *("Arcee", "Glm4", "Glm4Moe", "Llama", "Mistral", "Mixtral", "Phi3"),
        *("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
    )
}
"""Supported model classes: their caches can be reused by a server."""
_FAMILY_FIELDS: Final = tuple(
    field for field in Family.__struct_fields__ if field in ModelIdentity.__struct_fields__
)
"""Properties of a model that servers compare in their handshake."""
_BEGINS_AS_STATED: Final = ("CodeLlamaTokenizer", "GemmaTokenizer", "LlamaTokenizer")
"""Tokenizer classes for which SGLang obeys the config's `add_bos_token`, which is true by default.
The same holds for their fast variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Folders of a model: its checkpoint, and the PEFT adapter on it, if any."""

    path: Path
    adapter: Path | None = None

    @property
    def name(self) -> str:
        """Name for messages: the adapter's folder, or else the checkpoint's folder."""
        return (self.adapter or self.path).resolve().name

    def __str__(self) -> str:
        return str(self.path) if self.adapter is None else f"{self.path} with {self.adapter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two loaded models that may exchange caches, and the tokenizer that they share."""

    sender: PreTrainedModel
    receiver: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sender_identity: ModelIdentity
    receiver_identity: ModelIdentity
    first_difference: int
    """First layer at which the models' tensors differ; see `cachetree.checkpoint.identity`."""

    @property
    def num_layers(self) -> int:
        return self.receiver_identity.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """A model that may be loaded: its files were checked, its weights not read yet."""

    source: ModelSource
    identity: ModelIdentity
    config: PretrainedConfig
    """The model's config without its quantisation."""
    quantization: Quantization | None

    def read_weights(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Read the base's weights. Quantised matrices are returned in `dtype`."""
        weights = read_weights(self.source.path)
        return matrices(weights, self.quantization, dtype) if self.quantization else weights


def load_pair(
    sender: ModelSource,
    receiver: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = HOST,
    sender_device: torch.device | None = None,
) -> Pair:
    """Load both models in `dtype`: the receiver on `device`, the sender on `sender_device` or else
    on `device`. A base that both share is read once.

    On the CPU, the models may share tensors that no adapter changes: write to neither model. Raises
    ConfigError with field, values and remedy if a model is not supported, or if the models are not
    of one family.
    """
    theirs, ours = look_at_pair(sender, receiver)
    differs_at = first_difference(
        sender.path, receiver.path, sender.adapter, receiver.adapter, user_cache()
    )
    weights = theirs.read_weights(dtype)
    sending = _build(theirs, weights, dtype, sender_device or device)
    if not receiver.path.samefile(sender.path):
        weights = ours.read_weights(dtype)
    return Pair(
        sender=sending,
        receiver=_build(ours, weights, dtype, device),
        tokenizer=load_tokenizer(receiver),
        sender_identity=theirs.identity,
        receiver_identity=ours.identity,
        first_difference=differs_at,
    )


def load_line(
    sources: Sequence[ModelSource], *, dtype: torch.dtype, device: torch.device
) -> list[Pair]:
    """Load each model of a line once, and return its pairs of consecutive models. Raises
    ConfigError like `load_pair`."""
    pairs = [load_pair(*sources[:2], dtype=dtype, device=device)]
    for sender, receiver in pairwise(sources[1:]):
        theirs, ours = look_at_pair(sender, receiver)
        pair = replace(
            pairs[-1],
            sender=pairs[-1].receiver,
            receiver=load_model(receiver, dtype=dtype, device=device),
            sender_identity=theirs.identity,
            receiver_identity=ours.identity,
            first_difference=first_difference(sender.path, receiver.path, cache_dir=user_cache()),
        )
        pairs.append(pair)
    return pairs


def load_model(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: torch.device = HOST
) -> PreTrainedModel:
    """Load a model in evaluation mode, its adapter merged in float64 and then cast to `dtype`.

    Raises ConfigError if the model is not supported.
    """
    model = look_at(source)
    return _build(model, model.read_weights(dtype), dtype, device)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer. An adapter does not change how a text is split into tokens."""
    try:
        return _tokenizer_of_server(source.path)
    except Exception as exc:  # tokenizers raises nothing narrower
        raise ConfigError(
            f"the tokenizer of {source.path} cannot be loaded: {_line(exc)}; save it again with "
            f"transformers {transformers.__version__}, or use the release that saved it"
        ) from exc


def look_at_pair(sender: ModelSource, receiver: ModelSource) -> tuple[Supported, Supported]:
    """Check everything that `load_pair` checks before it reads weights. Raises the same errors."""
    both = look_at(sender), look_at(receiver)
    _require_one_family(*both)
    if both[0].identity.num_layers == 1:
        raise ConfigError(
            f"{sender} and {receiver} have one layer only, so no plan recomputes a part of the "
            "layers; give larger models"
        )
    return both


def look_at(source: ModelSource) -> Supported:
    """Check a model's files without reading weights. Raises ConfigError if it is not supported."""
    _require_plain_folder(source.path)
    identity = read_model_identity(source.path, user_cache(), source.adapter)
    if identity.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model class {identity.architecture} of {source.path} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    file = source.path / "config.json"
    if rope := varying_rope(identity.rope):
        raise ConfigError(
            f"{file} has rope_type {rope}: the rotation depends on more than a token's position, "
            "and differs from SGLang's; such models cannot be profiled, so give others"
        )
    try:
        config = ARCHITECTURES[identity.architecture].config_class.from_pretrained(source.path)
    except (OSError, ValueError, TypeError, StrictDataclassError) as exc:
        raise ConfigError(f"{file} cannot be used: {_line(exc)}; save it again") from exc
    require_plain_layers(file, config)
    quantization = config.__dict__.pop("quantization_config", None)
    if quantization is not None:
        check_quantization(file, quantization)
    if source.adapter is not None:
        read_config(source.adapter)
    return Supported(source=source, identity=identity, config=config, quantization=quantization)


def _tokenizer_of_server(path: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and mend it as SGLang's `get_tokenizer` does. For some folders,
    transformers 5 makes another class than the folder states, ignores `add_bos_token`, or adds
    parts that tokenizer.json lacks."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    name = config.get("tokenizer_class") or ""
    stated = getattr(transformers, name, None)
    general = None, TokenizersBackend, PreTrainedTokenizer, PreTrainedTokenizerBase
    if type(tokenizer) is TokenizersBackend and stated not in general:
        with suppress(OSError, ValueError, TypeError, ImportError):
            tokenizer = stated.from_pretrained(path)
    whole_file = path / "tokenizer.json"
    if isinstance(tokenizer, TokenizersBackend) and whole_file.is_file():
        ours, whole = tokenizer.backend_tokenizer, Tokenizer.from_file(str(whole_file))
        kinds = {type(it.pre_tokenizer) for it in (ours, whole)} - {NoneType}
        if len(kinds) == 2:
            ours.pre_tokenizer, ours.decoder = whole.pre_tokenizer, whole.decoder
    begins = config.get("add_bos_token") is not False
    if name.removesuffix("Fast") in _BEGINS_AS_STATED and tokenizer.add_bos_token != begins:
        tokenizer.add_bos_token = begins
    return tokenizer


def _require_plain_folder(path: Path) -> None:
    """Raise ConfigError if a model's folder also has an adapter, or has only an adapter. If peft is
    installed, transformers would apply the adapter."""
    if not (path / ADAPTER_CONFIG).is_file():
        return
    if (path / "config.json").is_file():
        raise ConfigError(
            f"model folder {path} also holds {ADAPTER_CONFIG}; move the adapter to a folder of its "
            "own, and name that too if the adapter is meant"
        )
    raise ConfigError(
        f"model folder {path} holds an adapter and no model; give its base as the model and this "
        "folder as the adapter"
    )


def require_plain_layers(file: Path, config: PretrainedConfig) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if window or kinds:  # Qwen2-MoE's config says 0 if it has no window.
        raise ConfigError(
            f"{file} has sliding_window = {window} and layer_types {kinds}; only full attention is "
            "supported: where all prompts fit the window, state sliding_window as null"
        )


def _require_one_family(theirs: Supported, ours: Supported) -> None:
    for field in _FAMILY_FIELDS:
        their_value, our_value = (getattr(it.identity, field) for it in (theirs, ours))
        if field == "tokenizer" and their_value != our_value:
            one, other = theirs.source.path, ours.source.path
            words = tokenizer_difference(one, other) or "their files differ"
            raise ConfigError(
                f"the tokenizers of {one} and {other} are not the same: {words}; if one of the "
                f"models was trained from the other, copy {one / 'tokenizer.json'} to {other}, or "
                "the other way round"
            )
        if their_value != our_value:
            raise ConfigError(
                f"sender {theirs.source} and receiver {ours.source} are not of one family: {field} "
                f"is {their_value!r} and {our_value!r}; give two fine-tunes of one base"
            )


def _build(
    model: Supported, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build a model from its base's weights and its adapter. Another model may share these
    weights."""
    path, adapter = model.source.path, model.source.adapter
    if adapter is not None:
        weights = with_adapter(weights, adapter, dtype)
    try:
        built, info = ARCHITECTURES[model.identity.architecture].from_pretrained(
            None,
            config=model.config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except RuntimeError as exc:
        raise ConfigError(
            f"the weights of {path} do not fit its config.json: {_line(exc)}; download both again"
        ) from exc
    if info["missing_keys"]:  # transformers would fill them with random numbers
        raise ConfigError(
            f"{path} lacks {', '.join(sorted(info['missing_keys']))}; download or save it again"
        )
    if (path / "generation_config.json").is_file():
        built.generation_config = GenerationConfig.from_pretrained(path)
    return built.to(device)


def _line(exc: Exception) -> str:
    return " ".join(str(exc).split())
