"""Attention on the CPU whose cost is new queries x visible keys.

The stock `torch_native` backend computes every position of a sequence and throws the cached
prefix's rows away, so a 50-token question behind a 2,000-token prefix costs as much as the whole
2,050 tokens. Here only the new rows are computed, in blocks that never see keys they must mask:

    # keys     [0 .......... first | first .. row_stop | row_stop ..... seq_len)
    # one block:    not read       |   SDPA over these |    not read
    #   first    = 0, or the oldest key in the window of the block's first row
    #   row_stop = prefix_len + the block's last new row + 1

Keys and values still come from `get_key_buffer` / `get_value_buffer`, once per layer, because that
call is where SGLang waits for a layer that is being loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256  # rows per SDPA call where a mask is needed; measured in README.md


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One request of the batch: where its keys are and which of its rows are new."""

    slots: torch.Tensor | slice  # of all its tokens, in order; a slice where they are one run
    prefix_len: int
    seq_len: int

    def gather(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[1, heads, seq_len, head_dim]`: a view where the slots are one run, else a copy."""
        rows = (
            cache[self.slots]
            if isinstance(self.slots, slice)
            else cache.index_select(0, self.slots)
        )
        return rows.transpose(0, 1).unsqueeze(0).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The sequences of one forward, read off the device tensors once for all layers."""

    seq_lens: torch.Tensor  # the batch's own tensor: says whether this layout is still the batch's
    sequences: tuple[Sequence, ...]


def layout_of(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
) -> BatchLayout:
    """Without `prefix_lens` every sequence has one new row, its last (decode)."""
    lengths = seq_lens.tolist()
    prefixes = [n - 1 for n in lengths] if prefix_lens is None else prefix_lens.tolist()
    return BatchLayout(
        seq_lens=seq_lens,
        sequences=tuple(
            Sequence(slots=_as_run(req_to_token[row, :n]), prefix_len=prefix, seq_len=n)
            for row, n, prefix in zip(req_pool_indices.tolist(), lengths, prefixes, strict=True)
        ),
    )


def _as_run(slots: torch.Tensor) -> torch.Tensor | slice:
    """A fresh request usually owns consecutive slots; reading those needs no copy."""
    if slots.numel() == 0:
        return slice(0, 0)
    first, last = int(slots[0]), int(slots[-1])
    if last - first == slots.numel() - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, last + 1)
    return slots.long()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """New rows `[start, stop)` (counted from the first new one) and the keys they can see."""

    start: int
    stop: int
    first_key: int
    stop_key: int


def blocks_of(sequence: Sequence, window: int | None) -> Iterator[Block]:
    """Cut the new rows so that little is computed only to be masked."""
    num_new = sequence.seq_len - sequence.prefix_len
    whole = sequence.prefix_len == 0 and window is None  # SDPA's own causal path skips by itself
    step = num_new if whole else QUERY_BLOCK
    for start in range(0, num_new, step or 1):
        stop = min(start + step, num_new)
        oldest = 0 if window is None else max(0, sequence.prefix_len + start - window)
        yield Block(
            start=start,
            stop=stop,
            first_key=oldest,
            stop_key=sequence.prefix_len + stop,
        )


def _causal_bias(
    num_rows: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask of a block whose last row sees its last key: the last rows and keys of one that
    blocks of several lengths share, in all layers."""
    num_cached = 1 << (num_keys - 1).bit_length()
    bias = _largest_bias(num_cached, window, dtype)
    return bias[QUERY_BLOCK - num_rows :, num_cached - num_keys :]


@lru_cache(maxsize=4)
def _largest_bias(num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """1 KiB per key in float32."""
    position = torch.arange(num_keys - QUERY_BLOCK, num_keys).unsqueeze(1)
    key = torch.arange(num_keys).unsqueeze(0)
    hidden = key > position
    if window is not None:
        hidden |= key < position - window
    return torch.zeros(QUERY_BLOCK, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: Block,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """`[1, heads, rows, head_dim]` of one block; query is `[1, heads, rows, head_dim]`."""
    rows, keys = block.stop - block.start, block.stop_key - block.first_key
    square = rows == keys and window is None
    sees_all = rows == 1 and (window is None or keys <= window + 1)
    return scaled_dot_product_attention(
        query,
        key[:, :, block.first_key : block.stop_key],
        value[:, :, block.first_key : block.stop_key],
        attn_mask=None if square or sees_all else _causal_bias(rows, keys, window, query.dtype),
        is_causal=square and not sees_all,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class TorchCpuAttention(TorchNativeAttnBackend):
    """`--attention-backend torch_cpu`. Encoders, cross attention and split sliding-window pools
    keep the stock path."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.forward_metadata = None  # lengths change in place between forwards

    # The stock calls both with its tensors in order, and the options by name.

    def _run_sdpa_forward_extend(self, *tensors, **options):
        *_, prefix_lens, _extend_lens, encoder_lens = tensors
        if not options["causal"] or encoder_lens is not None or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_extend(*tensors, **options)
        return self._run(tensors, prefix_lens, options)

    def _run_sdpa_forward_decode(self, *tensors, **options):
        *_, encoder_lens = tensors
        is_cross = options["is_cross_attn"] or encoder_lens is not None
        if is_cross or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_decode(*tensors, **options)
        return self._run(tensors, None, options)

    def _run(self, tensors, prefix_lens, options) -> torch.Tensor:
        """Fill the output, `[tokens, heads, head_dim]`, for the new rows of every sequence."""
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *_ = tensors
        layout = self.forward_metadata
        if layout is None or layout.seq_lens is not seq_lens:
            layout = layout_of(req_to_token, req_pool_indices, seq_lens, prefix_lens)
            self.forward_metadata = layout
        scale, window = options["scaling"], options["sliding_window_size"]
        rows = query.transpose(0, 1).unsqueeze(0)
        offset = 0
        for sequence in layout.sequences:
            key = sequence.gather(k_cache, query.dtype)
            value = sequence.gather(v_cache, query.dtype)
            for block in blocks_of(sequence, window):
                start, stop = offset + block.start, offset + block.stop
                part = attend(rows[:, :, start:stop], key, value, block, scale=scale, window=window)
                output[start:stop] = part[0].transpose(0, 1)
            offset += sequence.seq_len - sequence.prefix_len
        return output
