"""Attention on the CPU that computes only new tokens: its cost is new queries × visible keys.

SGLang's `torch_native` backend computes a row (one token's attention) for every token, and discards
the rows of the cached prefix. So a 50-token question behind a 2,000-token prefix costs as much as
2,050 tokens. This backend computes only the new rows, in blocks. A block reads few keys that it has
to mask:

    # keys     [0 .......... first | first .. row_stop | row_stop ..... seq_len)
    # one block:    not read       |   SDPA over these |    not read
    #   first    = 0, or the oldest key in the window of the block's first row
    #   row_stop = prefix_len + the block's last new row + 1

Keys and values still pass through `get_key_buffer` / `get_value_buffer`, once per layer, because
SGLang waits for a layer's load inside that call.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256  # rows per SDPA call that needs a mask; measured in README.md


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request of a batch: its slots in the KV pool, and how many of its tokens are cached."""

    slots: torch.Tensor | slice  # of all tokens, in order; a slice if they are one run
    prefix_len: int
    seq_len: int

    def gather(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return keys or values, `[1, heads, seq_len, head_dim]`, without a copy if possible."""
        is_run = isinstance(self.slots, slice)
        rows = cache[self.slots] if is_run else cache.index_select(0, self.slots)
        return rows.transpose(0, 1).unsqueeze(0).to(dtype)


def sequences_of(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor | None,
) -> list[Sequence]:
    """Describe the requests of one forward. Without `prefix_lens` the forward decodes: each request
    has one new token, its last."""
    lengths = seq_lens.tolist()
    prefixes = [n - 1 for n in lengths] if prefix_lens is None else prefix_lens.tolist()
    return [
        Sequence(_as_run(req_to_token[row, :n]), prefix, n)
        for row, n, prefix in zip(req_pool_indices.tolist(), lengths, prefixes, strict=True)
    ]


def _as_run(slots: torch.Tensor) -> torch.Tensor | slice:
    """Return consecutive slots as a slice, which is read without a copy. The slots of a fresh
    request usually are consecutive. Return other slots as int64."""
    if slots.numel() and bool((slots.diff() == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots.long()


def blocks_of(sequence: Sequence, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Cut the new rows into blocks, so that few masked positions are computed. Yield a block's
    rows, counted from the first new row, and the keys that they can see."""
    prefix_len, num_new = sequence.prefix_len, sequence.seq_len - sequence.prefix_len
    whole = prefix_len == 0 and window is None  # SDPA's own causal path skips masked keys
    step = num_new if whole else QUERY_BLOCK
    for start in range(0, num_new, step or 1):
        stop = min(start + step, num_new)
        oldest = 0 if window is None else max(0, prefix_len + start - window)
        yield slice(start, stop), slice(oldest, prefix_len + stop)


def _causal_bias(
    num_rows: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the additive mask of a block. The block's last row is the token of the last key. The
    mask is a view of a larger mask, which blocks of other sizes share in all layers."""
    num_cached = 1 << (num_keys - 1).bit_length()
    bias = _largest_bias(num_cached, window, dtype)
    return bias[QUERY_BLOCK - num_rows :, num_cached - num_keys :]


@lru_cache(maxsize=4)
def _largest_bias(num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Build the mask that blocks share, with QUERY_BLOCK rows: 1 KiB per key in float32."""
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
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Compute the attention of one block. Its last row is the token of the last key. All tensors
    are `[1, heads, rows or keys, head_dim]`."""
    rows, keys = query.shape[2], key.shape[2]
    square = rows == keys and window is None
    sees_all = rows == 1 and (window is None or keys <= window + 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if square or sees_all else _causal_bias(rows, keys, window, query.dtype),
        is_causal=square and not sees_all,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class TorchCpuAttention(TorchNativeAttnBackend):
    """The backend `--attention-backend torch_cpu`. Encoders, cross attention and split
    sliding-window pools use SGLang's own code."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.forward_metadata = None  # lengths change in place between forwards

    # The stock class passes its tensors to both by position, and the options by name.

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
        """Fill `output`, `[tokens, heads, head_dim]`, for the new rows of every sequence."""
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *_ = tensors
        if self.forward_metadata is None or self.forward_metadata[0] is not seq_lens:
            sequences = sequences_of(req_to_token, req_pool_indices, seq_lens, prefix_lens)
            self.forward_metadata = (seq_lens, sequences)  # for all layers
        scale, window = options["scaling"], options["sliding_window_size"]
        rows = query.transpose(0, 1).unsqueeze(0)
        offset = 0
        for sequence in self.forward_metadata[1]:
            key = sequence.gather(k_cache, query.dtype)
            value = sequence.gather(v_cache, query.dtype)
            for new, seen in blocks_of(sequence, window):
                at = slice(offset + new.start, offset + new.stop)
                block = rows[:, :, at], key[:, :, seen], value[:, :, seen]
                output[at] = attend(*block, scale=scale, window=window)[0].transpose(0, 1)
            offset += sequence.seq_len - sequence.prefix_len
        return output
