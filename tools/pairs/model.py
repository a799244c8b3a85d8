"""A compact Llama: the arithmetic of LlamaForCausalLM, arranged for training on one CPU core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RMS_EPS = 1e-5

PROJECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""What lies stacked in one matrix, by the names of LlamaForCausalLM."""
ALL_PROJECTIONS: Final = tuple(name for names in PROJECTIONS.values() for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model. Everything but the depth is the same in all pairs."""

    num_layers: int
    vocab_size: int = 512
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 320
    rope_theta: float = 10000.0
    max_positions: int = 1024

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    def projections(self, parameter: str) -> list[int]:
        """Rows of the independent matrices that lie stacked in one parameter."""
        if parameter.endswith("qkv.weight"):
            return [self.q_rows, self.kv_rows, self.kv_rows]
        if parameter.endswith("gate_up.weight"):
            return [self.mlp_size, self.mlp_size]
        return [self.hidden_size]


def rope_frequencies(shape: Shape) -> Tensor:
    return 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, shape.q_rows + 2 * shape.kv_rows, bias=False)
        self.out = nn.Linear(shape.q_rows, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * shape.mlp_size, bias=False)
        self.down = nn.Linear(shape.mlp_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        hidden = (x.shape[-1],)
        x = x + self._attention(F.rms_norm(x, hidden, self.attention_norm, RMS_EPS), cos, sin, mask)
        gate, up = self.gate_up(F.rms_norm(x, hidden, self.mlp_norm, RMS_EPS)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Plain products and a softmax: on a CPU, in bf16 and below about 500 tokens, the backward
        pass of the fused attention takes about three times as long."""
        shape = self.shape
        rows, length, _ = x.shape
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        group = num_heads // num_kv_heads
        heads = self.qkv(x).view(rows, length, num_heads + 2 * num_kv_heads, shape.head_dim)
        heads = heads.transpose(1, 2)
        rotated = _rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        v = heads[:, num_heads + num_kv_heads :]
        q = (q * shape.head_dim**-0.5).reshape(rows, num_kv_heads, group * length, -1)
        scores = (q @ k.transpose(-1, -2)).view(rows, num_kv_heads, group, length, length) + mask
        weights = scores.softmax(-1).view(rows, num_kv_heads, group * length, length)
        mixed = (weights @ v).view(rows, num_heads, length, shape.head_dim)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class TinyLlama(nn.Module):
    """`forward(ids [rows, length])` gives the logits `[rows, length, vocab]` in float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        angles = torch.outer(torch.arange(shape.max_positions).float(), rope_frequencies(shape))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, 0, 0.05)
        shrink = (2 * self.shape.num_layers) ** -0.5
        for layer in self.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                nn.init.normal_(matrix.weight, 0, matrix.in_features**-0.5)
            layer.out.weight.data.mul_(shrink)
            layer.down.weight.data.mul_(shrink)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = ids.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        mask = torch.full((length, length), -1e4, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, RMS_EPS)
        return F.linear(x, self.embedding.weight).float()
