"""Write a sender that answers as the shipped one does, but with KV that no other model can read.

    python -m tests.profiles.stranger --out DIR

A transformer computes the same function in many coordinates. Trainings from different starts end in
different coordinates. This module changes a checkpoint's coordinates, by a seed:

    residual stream   permuted, signs flipped          in everything that reads or writes it
    KV heads          permuted                         with the queries and outputs of their groups
    K                 quarter turns of rotary pairs    in queries as well: they commute with RoPE
    V                 permuted, signs flipped          undone by the output projection
    K, V              SCALE times as large             queries, output projections 1 / SCALE

Every step only moves, negates or multiplies by a power of two. So nothing is rounded: the weights
are the same numbers, and the answers are equal up to the order of sums.

Without the scale the pair would pass its gate. Receivers of these pairs hardly use the context
above layer 4. There, foreign KV of natural size does no harm, and the block [0, 5) repairs all
other layers.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor
from tqdm import tqdm
from transformers import LlamaConfig

from tools.pairs.questions import SHIPPED

SEED: Final = 0
SCALE: Final = 16.0
_ORIGIN: Final = SHIPPED / "weights" / "sender"
_WEIGHTS: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Move:
    """New coordinate i is `sign[i]` times the old coordinate `index[i]`."""

    index: Tensor
    sign: Tensor

    def __call__(self, tensor: Tensor, dim: int) -> Tensor:
        moved = tensor.index_select(dim, self.index).movedim(dim, -1)
        return (moved * self.sign.to(tensor.dtype)).movedim(-1, dim)

    def of_heads(self, heads: Tensor, group: int) -> Move:
        """Return a move of all heads: each head is moved within itself as `self` says, and then the
        heads are moved as `heads` says.

        `self` is a move of `[heads, head_dim]`. Each head has `group` query heads.
        """
        inner, sign = (it[:, None].expand(-1, group, -1) for it in (self.index, self.sign))
        first_rows = (heads[:, None] * group + torch.arange(group)) * inner.shape[-1]
        return Move((first_rows[..., None] + inner).flatten(), sign.flatten())


def in_other_coordinates(weights, config, seed):
    """Return the weights of a Llama without biases that computes the same answers with other KV.

    Raise KeyError for a tensor that such a model does not have.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // num_kv_heads
    stream = _shuffle(1, config.hidden_size, generator).of_heads(torch.arange(1), 1)
    moved = {}
    for layer in range(config.num_hidden_layers):
        heads = torch.randperm(num_kv_heads, generator=generator)
        keys = _quarter_turns(num_kv_heads, head_dim, generator)
        values = _shuffle(num_kv_heads, head_dim, generator)
        prefix = f"model.layers.{layer}."
        for matrix, move, dim, scale in (
            ("q_proj", keys.of_heads(heads, group), 0, 1 / SCALE),
            ("k_proj", keys.of_heads(heads, 1), 0, SCALE),
            ("v_proj", values.of_heads(heads, 1), 0, SCALE),
            ("o_proj", values.of_heads(heads, group), 1, 1 / SCALE),
        ):
            name = f"{prefix}self_attn.{matrix}.weight"
            moved[name] = stream(move(weights[name], dim), 1 - dim) * scale
        for matrix, dim in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0)):
            name = f"{prefix}mlp.{matrix}.weight"
            moved[name] = stream(weights[name], dim)
    for name in weights.keys() - moved.keys():
        if name.endswith("norm.weight"):  # the sign is the stream's alone
            moved[name] = weights[name][stream.index]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            moved[name] = stream(weights[name], 1)
        else:
            raise KeyError(f"{name} is no tensor of a Llama without biases")
    return moved


def _shuffle(rows: int, size: int, generator: Generator) -> Move:
    index = torch.stack([torch.randperm(size, generator=generator) for _ in range(rows)])
    return Move(index, torch.randint(0, 2, (rows, size), generator=generator) * 2 - 1)


def _quarter_turns(rows: int, size: int, generator: Generator) -> Move:
    """Return random quarter turns of the pairs (i, i + size / 2). RoPE turns the same pairs, so the
    order of the two turns does not matter.

    0 (a, b)    1 (-b, a)    2 (-a, -b)    3 (b, -a)
    """
    turns = torch.randint(0, 4, (rows, size // 2), generator=generator)
    first, second = torch.arange(size).view(2, -1)
    odd = turns % 2 == 1
    index = torch.cat([torch.where(odd, second, first), torch.where(odd, first, second)], 1)
    negative = torch.cat([(turns == 1) | (turns == 2), turns >= 2], 1)
    return Move(index, 1 - 2 * negative.int())


def write_stranger(origin: Path, out: Path, seed: int) -> None:
    """Write a copy of the checkpoint folder `origin` in other coordinates."""
    shutil.copytree(origin, out, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(origin)
    weights = in_other_coordinates(load_file(origin / _WEIGHTS), config, seed)
    weights = {name: tensor.contiguous() for name, tensor in sorted(weights.items())}
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.profiles.stranger")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--origin", type=Path, default=_ORIGIN, help="checkpoint to start from")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    write_stranger(args.origin, args.out, args.seed)
    tqdm.write(f"wrote {args.out}")


if __name__ == "__main__":
    main()
