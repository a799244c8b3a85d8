"""Requests whose every token comes from the model's own distributions, and that may reuse KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang_droidspeak.engine.own import ANSWERED
from sglang_droidspeak.request.controls import parse_controls

_NEUTRAL: Final[Mapping[str, float]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": 1,
}
"""Sampling parameters that otherwise change its distributions, as these do;"""
_WITHOUT: Final = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark")
_UNASKED: Final = (
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "positional_embed_overrides",
    "session_params",
    "watermark",
    "custom_logit_processor",
    "max_thinking_tokens",
    "require_reasoning",
    "return_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)
"""and what else a request may bring or want that an exact run of it would not have."""


def plain_params(obj: Any, manager: Any) -> Mapping[str, Any] | None:
    """Sampling parameters of such a request, a GenerateReqInput for one answer, with those that the
    server of this TokenizerManager prefers; None of others."""
    if not hasattr(obj, "return_logprob"):
        return None  # An embedding.
    if not isinstance(obj.text, str) and not (obj.input_ids and isinstance(obj.input_ids[0], int)):
        return None
    params = {**(manager.preferred_sampling_params or {}), **(obj.sampling_params or {})}
    is_neutral = all(params.get(name) in (None, value) for name, value in _NEUTRAL.items())
    is_free = not any(params.get(name) for name in _WITHOUT)
    if not (is_neutral and is_free) or any(getattr(obj, it) for it in _UNASKED):
        return None
    if params.get("top_k") == 1 and params.get("temperature", 1) not in (0, 1):
        return None  # Greedy, and its log-probabilities are not.
    return params if _may_reuse(params.get("custom_params") or {}) else None


def _may_reuse(custom: Any) -> bool:
    if not isinstance(custom, dict) or ANSWERED in custom:
        return False
    try:
        return parse_controls(custom).mode != "off"
    except ValueError:  # Of which the scheduler says what.
        return False
