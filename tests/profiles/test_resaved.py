"""If a newer transformers saves a checkpoint again, its identity stays the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from cachetree.checkpoint import first_difference, read_adapter, read_model_identity
from profiles.random_models import shape, write_models
from tools import config_defaults

TYPES = sorted(config_defaults.table())
SCALED: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen2": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "phi3": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
UNUSED = {"sliding_window": 4096, "max_window_layers": 3, "use_sliding_window": False}


def test_the_table_of_defaults_is_that_of_transformers():
    assert config_defaults.FILE.read_bytes() == config_defaults.text(), (
        "run `python -m tools.config_defaults`"
    )


def as_published(folder: Path, model_type: str, scaled: dict[str, Any] | None) -> None:
    """Write config.json as model hubs have it, with older names and without fields that have their
    default."""
    file = folder / "config.json"
    stated = json.loads(file.read_text())
    rope = stated.pop("rope_parameters")
    fields = {*config_defaults.table()[model_type], "layer_types", "head_dim", "mlp_only_layers"}
    defaults = type(shape(model_type, layers=3, hidden=64, heads=4, kv_heads=2))().to_dict()
    for key in fields & stated.keys():
        if stated[key] in (defaults.get(key), [], None) or key == "layer_types":
            del stated[key]
    if "num_local_experts" in stated and model_type == "qwen3_moe":
        stated["num_experts"] = stated.pop("num_local_experts")
    if rope["rope_type"] != "default":  # as of Apertus
        scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = {} if rope["rope_theta"] == 1e4 else {"rope_theta": rope["rope_theta"]}
    stated |= {"torch_dtype": stated.pop("dtype"), "rope_scaling": scaled, **theta}
    if model_type.startswith("qwen"):
        stated |= UNUSED
    file.write_text(json.dumps(stated))


@pytest.mark.parametrize(
    ("model_type", "scaled"), [*((it, None) for it in TYPES), *SCALED.items()], ids=str
)
def test_a_model_that_was_saved_again_is_the_same(model_type, scaled, tmp_path):
    config = shape(model_type, layers=3, hidden=64, heads=4, kv_heads=2)
    (base,) = write_models(tmp_path, config, ["base"])
    as_published(base, model_type, scaled)
    model = AutoModelForCausalLM.from_pretrained(base)
    again, tuned = tmp_path / "again", tmp_path / "tuned"
    model.save_pretrained(again)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[5, 7] += 1
    model.save_pretrained(tuned)
    for folder in (again, tuned):
        for file in base.glob("tokenizer*"):
            shutil.copy(file, folder)
    identity = read_model_identity(base)
    assert read_model_identity(again) == identity
    assert read_model_identity(tuned).model_id != identity.model_id
    assert (first_difference(base, again), first_difference(base, tuned)) == (3, 1)


def test_an_adapter_that_was_saved_again_is_the_same(tmp_path):
    shipped = Path(__file__).parents[2] / "examples/pairs/weights/sender_lora"
    again = Path(shutil.copytree(shipped, tmp_path / "again"))
    stated = json.loads((shipped / "adapter_config.json").read_text())
    whole = LoraConfig(task_type="CAUSAL_LM").to_dict() | stated | {"lora_alpha": 16}
    whole = {name: list(it) if isinstance(it, set) else it for name, it in whole.items()}
    (again / "adapter_config.json").write_text(json.dumps(whole))
    assert read_adapter(again, 12) == read_adapter(shipped, 12)
