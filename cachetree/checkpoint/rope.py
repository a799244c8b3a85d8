"""Describe a rotary embedding in one string, in whatever form a config states it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_DEFAULT_THETA = 10000.0
_ALIASES = {"su": "longrope", "mrope": "default"}
_USES_ORIGINAL_LENGTH = frozenset({"dynamic", "llama3", "longrope", "yarn"})
"""Types of rotary embeddings with frequencies that depend on the model's original context
length."""
_USES_LENGTH = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings that rotate a token by its position and by a length: the length of the
prompt, or the longest that the model allows."""


def canonical_rope(config: Mapping[str, Any]) -> str:
    """Return canonical JSON of all that changes the rotary embedding.

    Old style: `rope_theta`, `partial_rotary_factor` and `rope_scaling` (with `type` or `rope_type`)
    at the top level. New style: everything in `rope_parameters`, possibly once per type of layer.
    Equal strings mean equal rotations; head_dim is compared elsewhere.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if stated and all(isinstance(value, dict) for value in stated.values()):
        per_type = {name: _canonical(config, value) for name, value in stated.items()}
        return _encode(per_type)
    canonical = _canonical(config, stated)
    if config.get("rope_local_base_freq") is not None:
        canonical["rope_local_base_freq"] = float(config["rope_local_base_freq"])
    return _encode(canonical)


def varying_rope(rope: str) -> str:
    """Return the type in `rope` (from `canonical_rope`) if it rotates by more than the position.
    Empty for all others, and for longrope if no context may be longer than in pre-training."""
    canonical = msgspec.json.decode(rope)
    for embedding in (canonical, *canonical.values()):
        name = embedding.get("rope_type") if isinstance(embedding, dict) else None
        if name not in _USES_LENGTH:
            continue
        longest, original = (
            embedding["max_position_embeddings"],
            embedding["original_max_position_embeddings"],
        )
        if name != "longrope" or longest is None or original is None or longest > original:
            return str(name)
    return ""


def _canonical(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    top = {
        "rope_theta": config.get("rope_theta", _DEFAULT_THETA),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }
    both = top | {key: value for key, value in stated.items() if value is not None}
    old_name = both.pop("type", "default")
    name = both.get("rope_type", old_name)
    both["rope_type"] = name = _ALIASES.get(name, name)
    length = config.get("max_position_embeddings")
    if name in _USES_ORIGINAL_LENGTH:
        original = config.get("original_max_position_embeddings", length)
        both.setdefault("original_max_position_embeddings", original)
    if name in _USES_LENGTH:
        both["max_position_embeddings"] = length
    return {key: plain(value) for key, value in both.items()}


def plain(value: Any) -> Any:
    """Convert each number to a float, so that 10000 and 10000.0 are equal in a digest."""
    if isinstance(value, bool) or not isinstance(value, (int, float, list)):
        return value
    return [plain(item) for item in value] if isinstance(value, list) else float(value)


def _encode(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
