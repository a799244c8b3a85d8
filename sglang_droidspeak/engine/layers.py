"""Capture E from the decoder layers of a loaded model, and run a block of these layers.

The layers of supported models take `(positions, hidden_states, forward_batch)`, and keep the
residual stream in the batch. `start.refuse` lists the classes of these models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from cachetree import ConfigError, Span
from sglang_droidspeak.engine.names import (
    ForwardBatch,
    KVWriteLoc,
    get_token_to_kv_pool,
    residual_batch,
)

OnE = Callable[["ForwardBatch", torch.Tensor], None]
"""Callback that takes the batch and E, `[tokens or more, hidden]`. It has to copy E before it
returns, because the layer may overwrite E."""


class _BlockDone(Exception):
    """Signal to skip the rest of a block's last layer, once this layer has written its KV."""


class LayerStack:
    """The decoder layers of one model. Raises ConfigError with the class and signature of a layer
    that it cannot run."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._inner: Any = model.model
        self._layers = list(self._inner.layers)
        for layer in self._layers:
            _require_boundary(layer)

    def __len__(self) -> int:
        return len(self._layers)

    def on_e(self, layer: int, callback: OnE) -> None:
        """Call `callback` with E of `layer` in every forward from now on.

        A CUDA graph captures the callback's kernels once and replays them without its Python code.
        So this code must not decide anything that may differ between replays.
        """
        boundary = self._layers[layer].attn_boundary
        prepare = boundary.prepare

        def prepare_and_see(
            hidden_states: torch.Tensor, forward_batch: ForwardBatch, *, capture=None, **rest: Any
        ) -> torch.Tensor:
            def see(value: torch.Tensor, owned: bool = False) -> None:
                callback(forward_batch, value)
                if capture is not None:
                    capture(value, owned=owned)

            return prepare(hidden_states, forward_batch, capture=see, **rest)

        boundary.prepare = prepare_and_see

    def run(self, block: Span, e: torch.Tensor | None, forward_batch: ForwardBatch) -> None:
        """Run layers `[block.start, block.stop)` over the batch's tokens, only for their KV.

        `e` is `[tokens, hidden]`, the residual stream that enters layer `block.start`. None: the
        block starts from the embeddings, and `block.start` is 0. Call it inside `replay.prepared`.

        Stops right after the last layer has written its KV: its attention and MLP are not needed.
        """
        attention = self._layers[block.stop - 1].self_attn.attn
        stop = attention.register_forward_pre_hook(_write_kv_and_stop, with_kwargs=True)
        try:
            if e is None:
                residual_batch.start(forward_batch)
                hidden = self._inner.embed_tokens(forward_batch.input_ids)
            else:
                hidden = residual_batch.set_written(e, forward_batch)
            for layer in self._layers[block.start : block.stop]:
                hidden = layer(forward_batch.positions, hidden, forward_batch)
        except _BlockDone:
            pass
        finally:
            stop.remove()
            residual_batch.clear(forward_batch)


def _write_kv_and_stop(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _query, key, value, forward_batch = args
    if kwargs.get("save_kv_cache", True):
        get_token_to_kv_pool().set_kv_buffer(
            attention,
            KVWriteLoc.for_batch(forward_batch),
            key.view(-1, attention.tp_k_head_num, attention.qk_head_dim),
            value.view(-1, attention.tp_v_head_num, attention.v_head_dim),
        )
    raise _BlockDone


def _require_boundary(layer: torch.nn.Module) -> None:
    parameters = list(inspect.signature(layer.forward).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if hasattr(layer, "attn_boundary") and required == [
        "positions",
        "hidden_states",
        "forward_batch",
    ]:
        return
    raise ConfigError(
        f"layers of class {type(layer).__name__}({', '.join(p.name for p in parameters)}) are not "
        "supported: they do not state where attention begins"
    )
