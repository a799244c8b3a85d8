"""Write cachetree/checkpoint/config_defaults.json: `python -m tools.config_defaults`.

The table has the defaults of transformers' config classes for fields that a config.json leaves out.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec
import transformers

import cachetree.checkpoint
from cachetree.checkpoint.identity import COMPUTING_KEYS
from cachetree.checkpoint.model_config import RENAMED
from sglang_droidspeak.start.refuse import ARCHITECTURES, EXACT_ONLY

FILE: Final = Path(cachetree.checkpoint.__file__).with_name("config_defaults.json")
_OTHERS: Final = {
    *("head_dim", "max_position_embeddings", "num_key_value_heads"),
    *("original_max_position_embeddings", "partial_rotary_factor", "rope_theta"),
}


def table() -> dict[str, dict[str, Any]]:
    """Defaults of fields that change what a model computes, by model type and field."""
    names = ARCHITECTURES | EXACT_ONLY
    classes = [getattr(transformers, name).config_class for name in names]
    return {it.model_type: _defaults(it) for it in classes}


def text() -> bytes:
    """Encode the table as the file's content."""
    return msgspec.json.format(msgspec.json.encode(table(), order="sorted")) + b"\n"


def _defaults(config_class: Any) -> dict[str, Any]:
    # Defaults of the class: an instance also fills fields that follow from others, such as
    # head_dim.
    stated = {it.name: it.default for it in fields(config_class)}
    rope = config_class().rope_parameters
    named = {RENAMED.get(name, name): it for name, it in {**stated, **rope}.items()}
    return {
        name: value
        for name, value in named.items()
        if name in _OTHERS.union(COMPUTING_KEYS.split()) and isinstance(value, str | int | float)
    }


if __name__ == "__main__":
    FILE.write_bytes(text())
