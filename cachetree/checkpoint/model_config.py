"""The fields of a config.json, with defaults for absent fields."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree.checkpoint.safetensors_files import read_json
from cachetree.errors import ConfigError

Config = Mapping[str, Any]
"""A config.json as `read_config` returns it; its keys depend on the model."""

RENAMED: Final = {"num_local_experts": "num_experts"}
"""Field names of different releases of transformers, each with the name that is used here."""


def read_config(path: Path) -> dict[str, Any]:
    """Read the language model's part of config.json in folder `path`, with `architectures`.

    Absent fields get the defaults of transformers' class for this `model_type`. They stay absent if
    the table `config_defaults.json` lacks the type. Raises ConfigError.
    """
    whole = read_json(path / "config.json")
    text = whole.get("text_config")
    stated = text if isinstance(text, dict) else whole
    architectures = whole.get("architectures") or stated.get("architectures")
    if not architectures:
        raise ConfigError(f"{path / 'config.json'} names no architectures; add the model class")
    stated = {RENAMED.get(key, key): value for key, value in stated.items()}
    table = files(__package__).joinpath("config_defaults.json").read_bytes()
    defaults = msgspec.json.decode(table, type=dict[str, dict[str, Any]])
    of_type = defaults.get(str(stated.get("model_type")), {})
    return {**of_type, **stated, "architectures": architectures}
