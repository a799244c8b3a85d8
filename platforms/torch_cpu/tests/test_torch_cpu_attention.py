"""Compare the CPU backend with SGLang's `torch_native` backend, on the same pool and batch."""

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang_torch_cpu.attention import (
    QUERY_BLOCK,
    TorchCpuAttention,
    _causal_bias,
    blocks_of,
    sequences_of,
)

NUM_SLOTS, PAGE, CONTEXT, HEAD_DIM = 4096, 16, 1024, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Pool:
    """Keys and values of one layer, read like SGLang's pool. It counts the reads."""

    def __init__(self, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.key = torch.randn(NUM_SLOTS, num_kv_heads, HEAD_DIM).to(dtype)
        self.value = torch.randn(NUM_SLOTS, num_kv_heads, HEAD_DIM).to(dtype)
        self.num_reads = 0

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self.num_reads += 1
        return self.key

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self.num_reads += 1
        return self.value

    def set_kv_buffer(self, layer, loc, key, value) -> None:
        self.key[loc.loc] = key.view(-1, *self.key.shape[1:])
        self.value[loc.loc] = value.view(-1, *self.value.shape[1:])


class Case:
    """A random batch (order of pages, prefixes, lengths), on which both backends run."""

    def __init__(self, seed: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        choose = random.Random(seed)
        _, num_kv_heads = heads
        self.pool = Pool(num_kv_heads, dtype)
        self.runner = SimpleNamespace(
            device="cpu",
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.zeros(8, CONTEXT, dtype=torch.int32)
            ),
        )
        self.num_reqs = choose.randint(1, 4)
        self.prefixes = [choose.choice([0, 0, 16, 48, 300]) for _ in range(self.num_reqs)]
        self.new = [choose.choice([1, 7, 50, 290, 530]) for _ in range(self.num_reqs)]
        self.rows = choose.sample(range(8), self.num_reqs)
        pages = list(range(1, NUM_SLOTS // PAGE))
        if seed % 2:
            choose.shuffle(pages)
        for row, prefix, new in zip(self.rows, self.prefixes, self.new, strict=True):
            need = -(-(prefix + new) // PAGE)
            mine, pages = torch.tensor(pages[:need]), pages[need:]
            slots = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()
            self.runner.req_to_token_pool.req_to_token[row, : prefix + new] = slots[: prefix + new]
        self.heads, self.dtype = heads, dtype

    def layer(self, window: int | None) -> SimpleNamespace:
        return SimpleNamespace(
            layer_id=0,
            tp_q_head_num=self.heads[0],
            tp_k_head_num=self.heads[1],
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            scaling=0.2,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            sliding_window_size=-1 if window is None else window,
        )

    def batch(self, *, decode: bool) -> SimpleNamespace:
        new = [1] * self.num_reqs if decode else self.new
        lengths = [p + n for p, n in zip(self.prefixes, new, strict=True)]
        table = self.runner.req_to_token_pool.req_to_token
        written = [
            table[row, length - count : length]
            for row, length, count in zip(self.rows, lengths, new, strict=True)
        ]
        return SimpleNamespace(
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(lengths),
            extend_prefix_lens=torch.tensor(self.prefixes),
            extend_seq_lens=torch.tensor(new),
            encoder_lens=None,
            out_cache_loc=torch.cat(written).long(),
        )

    def run(self, backend_class: type, *, decode: bool, window: int | None) -> torch.Tensor:
        torch.manual_seed(7)
        batch = self.batch(decode=decode)
        count = batch.out_cache_loc.numel()
        query, key, value = (
            torch.randn(count, heads * HEAD_DIM).to(self.dtype)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        backend = backend_class(self.runner)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decode else backend.forward_extend
        return forward(query, key, value, self.layer(window), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 0, 40, 400])
@pytest.mark.parametrize("decode", [False, True], ids=["extend", "decode"])
def test_equals_the_stock_backend(dtype: torch.dtype, window: int | None, decode: bool) -> None:
    for seed in range(8):
        heads = [(4, 4), (8, 2), (6, 1)][seed % 3]
        case = Case(seed, heads, dtype)
        stock = case.run(TorchNativeAttnBackend, decode=decode, window=window)
        ours = case.run(TorchCpuAttention, decode=decode, window=window)
        torch.testing.assert_close(
            ours, stock, rtol=0, atol=TOLERANCE[dtype], msg=lambda m, s=seed: f"seed {s}: {m}"
        )


def test_nothing_of_a_forward_outlives_it() -> None:
    """SGLang changes `seq_lens` in place between decode steps, so a backend has to read it anew."""
    case = Case(2, (4, 4), torch.float32)
    batch = case.batch(decode=True)
    backend = TorchCpuAttention(case.runner)
    query = torch.randn(case.num_reqs, 4 * HEAD_DIM)
    outputs = []
    for _ in range(2):
        backend.init_forward_metadata(batch)
        outputs.append(backend.forward_decode(query, None, None, case.layer(None), batch))
        batch.seq_lens.sub_(1)
    stock = TorchNativeAttnBackend(case.runner)
    batch.seq_lens.add_(1)
    expected = stock.forward_decode(query, None, None, case.layer(None), batch)
    torch.testing.assert_close(outputs[1], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1])


def test_every_layer_asks_the_pool_for_its_buffers() -> None:
    """SGLang waits for a layer's load inside `get_key_buffer` and `get_value_buffer`."""
    case = Case(1, (4, 4), torch.float32)
    batch = case.batch(decode=True)
    backend = TorchCpuAttention(case.runner)
    backend.init_forward_metadata(batch)
    for _ in range(3):
        query = torch.randn(case.num_reqs, 4 * HEAD_DIM)
        backend.forward_decode(query, None, None, case.layer(None), batch)
    assert case.pool.num_reads == 6


@pytest.mark.parametrize(
    ("prefix", "new", "window", "most"),
    [
        (2000, 50, None, 2050 * 50),
        (0, 2000, None, 2000 * 2000),  # one call: SDPA's causal path skips masked keys
        (1000, 1000, None, 1500 * 1000 + 1000 * QUERY_BLOCK),
        (2000, 500, 100, 500 * (100 + QUERY_BLOCK)),
    ],
)
def test_cost_is_new_rows_times_visible_keys(prefix, new, window, most) -> None:
    table = torch.arange(prefix + new, dtype=torch.int32).unsqueeze(0)
    (sequence,) = sequences_of(
        table, torch.tensor([0]), torch.tensor([prefix + new]), torch.tensor([prefix])
    )
    rows, keys = zip(*blocks_of(sequence, window), strict=True)
    assert [it.start for it in rows[1:]] == [it.stop for it in rows[:-1]]
    assert (rows[0].start, rows[-1].stop, keys[-1].stop) == (0, new, prefix + new)
    sizes = zip(rows, keys, strict=True)
    assert sum((a.stop - a.start) * (b.stop - b.start) for a, b in sizes) <= most


@pytest.mark.parametrize("window", [None, 300])
def test_blocks_of_many_lengths_share_a_mask(window: int | None) -> None:
    """A long prompt has blocks of many sizes. One mask for each size would fill the memory."""
    places = set()
    for num_keys in range(1100, 2000, 64):
        for num_rows in (1, 100, QUERY_BLOCK):
            bias = _causal_bias(num_rows, num_keys, window, torch.float32)
            row = torch.arange(num_keys - num_rows, num_keys)[:, None]
            key = torch.arange(num_keys)[None, :]
            seen = (key <= row) & (key >= row - (window or num_keys))
            assert torch.equal(bias == 0, seen) and torch.equal(bias == -torch.inf, ~seen)
            places.add(bias.untyped_storage().data_ptr())
    assert len(places) == 1
