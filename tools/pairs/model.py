"""The small pairs' models: a Llama with fresh weights, and the folders that it is kept in.

An adapter gets a folder of its own: with peft installed, transformers would apply an
`adapter_config.json` that lies beside whole weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.pairs.words import BOS, BOS_ID, EOS, EOS_ID, PAD, UNK, VOCABULARY

PAD_ID: Final = 0
PROJECTIONS: Final = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
LEAVING: Final = ("o_proj.weight", "down_proj.weight")
"""What adds to the residual stream."""

Tensors = dict[str, Tensor]


def config_of(num_layers: int) -> LlamaConfig:
    """Everything but the depth is the same in all pairs."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        # On a CPU and below about 500 tokens, fused attention's backward pass takes longer.
        attn_implementation="eager",
    )


def fresh_model(num_layers: int) -> LlamaForCausalLM:
    """Random weights in float32, from torch's global generator."""
    model = LlamaForCausalLM(config_of(num_layers))
    nn.init.normal_(model.model.embed_tokens.weight, 0, 0.05)
    for name, matrix in model.model.layers.named_parameters():
        if matrix.dim() == 2:
            nn.init.normal_(matrix, 0, matrix.shape[1] ** -0.5)
        if name.endswith(LEAVING):
            matrix.data.mul_((2 * num_layers) ** -0.5)
    return model


def read_model(folder: Path) -> LlamaForCausalLM:
    """What `write_model` wrote, in float32."""
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def write_model(model: LlamaForCausalLM | PeftModel, folder: Path) -> None:
    """Weights in bf16 with config and tokenizer, or an adapter on `../foundation`."""
    if isinstance(model, PeftModel):
        model.peft_config["default"].base_model_name_or_path = "../foundation"
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        return
    narrow = LlamaForCausalLM(model.config).bfloat16()
    narrow.load_state_dict(model.state_dict())
    narrow.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    narrow.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that splits at white space and adds nothing: `<bos>` is written in the text."""
    tokenizer = Tokenizer(models.WordLevel(dict(VOCABULARY.ids), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNK, pad_token=PAD
    )
    fast.save_pretrained(folder)
