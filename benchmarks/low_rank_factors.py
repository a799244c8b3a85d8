"""A layer refreshed in low rank: the receiver's K and V from the sender's, both on one base.

With x the normalised residual stream that entered the sender's layer and W the base's matrix,

    sender's K before the rotation      W x + s_s B_s A_s x
    receiver's, from the same x         W x + s_r B_r A_r x
    so the receiver's                   sender's K + rotation of (s_r B_r A_r - s_s B_s A_s) x

because the rotation is linear; V is the same without it. The norm before the projection is the
base's. Per token and matrix that is (hidden + rows) (r_s + r_r) products in place of hidden rows,
and W is not read at all. Where both adapters have the same A, A x can be kept in place of E, as
LRAgent does: rank numbers per token in place of hidden, and the difference is (s_r B_r - s_s B_s)
of it.

Not for models that norm K after its projection (qwen3): there the difference is not linear in x.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from cachetree import ConfigError
from profiles.adapters import read_scale
from profiles.compute import KV


@dataclass(frozen=True, slots=True)
class Factors:
    """The product `b @ a` that is added to a matrix: `[rank, in]`, and `[out, rank]` scaled."""

    a: Tensor
    b: Tensor

    def reduce(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., rank]`: what may be kept in place of E."""
        return x @ self.a.T

    def expand(self, reduced: Tensor) -> Tensor:
        """`[..., rank]` -> `[..., out]`."""
        return reduced @ self.b.T


class AdapterFactors:
    """An adapter's factors by layer and projection, in float32; ConfigError for one that is not
    such a product."""

    def __init__(self, adapter: Path) -> None:
        self._scale = read_scale(adapter)
        self._tensors = load_file(adapter / "adapter_model.safetensors")

    def of(self, layer: int, projection: str) -> Factors | None:
        """None where the adapter leaves the matrix as it is."""
        module = f"model.layers.{layer}.self_attn.{projection}"
        a, b = (self._tensors.get(f"base_model.model.{module}.lora_{it}.weight") for it in "AB")
        if a is None or b is None:
            return None
        if f"base_model.model.{module}.lora_B.bias" in self._tensors:
            raise ConfigError(f"{module} has a bias in its adapter; refresh it by projection")
        return Factors(a.float(), self._scale(module, a.shape[0]) * b.float())


def change(sender: Factors | None, receiver: Factors | None) -> Factors | None:
    """What the receiver's matrix has more than the sender's; None where they are the same.

    Its rank is that of both together, or of one where the two share A.
    """
    if sender is None:
        return receiver
    if receiver is None:
        return Factors(sender.a, -sender.b)
    if torch.equal(sender.a, receiver.a):
        return Factors(receiver.a, receiver.b - sender.b)
    return Factors(torch.cat([receiver.a, sender.a]), torch.cat([receiver.b, -sender.b], 1))


def refresh(kv: KV, k: Tensor | None, v: Tensor | None, rotary: tuple[Tensor, Tensor]) -> KV:
    """The sender's KV, `[rows, kv_heads, tokens, head_dim]` each, with the expanded changes of K
    and V, `[rows, tokens, kv_heads * head_dim]`, added; `rotary` are cosine and sine,
    `[rows, tokens, head_dim]`."""
    keys, values = kv
    if k is not None:
        keys = keys + rotated(by_head(k, keys), *rotary)
    if v is not None:
        values = values + by_head(v, values)
    return keys, values


def by_head(changed: Tensor, like: Tensor) -> Tensor:
    """`[rows, tokens, kv_heads * head_dim]` in the form and dtype of K or V."""
    rows, heads, tokens, head_dim = like.shape
    return changed.view(rows, tokens, heads, head_dim).transpose(1, 2).to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of K, as Llama's."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
