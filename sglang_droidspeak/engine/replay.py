"""Run some prefix tokens of an SGLang batch once more, before the batch's own forward.

This recomputes the block of loaded tokens, and prefills tokens in full after a failed load.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from cachetree import Span
from sglang_droidspeak.engine.names import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    ModelRunner,
    Req,
    SamplingParams,
    ScheduleBatch,
    async_h2d,
    forward_context,
    get_global_expert_distribution_recorder,
    get_model,
)


def replay_of(
    batch: ScheduleBatch, parts: Sequence[tuple[int, Span]], runner: ModelRunner
) -> ForwardBatch:
    """Make a ForwardBatch over parts of a batch. Each part is a row (request) and a span of its
    tokens. The tokens' KV slots have to be allocated."""
    return ForwardBatch.init_new(
        _extending(batch, parts, runner),
        runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )


@contextmanager
def on_padding(runner: ModelRunner, num_tokens: int) -> Iterator[ScheduleBatch]:
    """Make a batch of one prompt of at most a page, to warm up a forward. Its KV is written to the
    row and page that SGLang reserves for padding, which no request reads. Call it before the first
    request."""
    table = runner.req_to_token_pool.req_to_token
    req = Req(
        rid="warm",
        origin_input_text="",
        origin_input_ids=array("q", [0] * num_tokens),
        sampling_params=SamplingParams(),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    batch = ScheduleBatch.init_new(
        reqs=[req],
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=None,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=runner.spec_algorithm,
    )
    batch.req_pool_indices_cpu = torch.zeros(1, dtype=torch.int64)
    table[0, :num_tokens] = torch.arange(num_tokens, dtype=table.dtype, device=table.device)
    yield batch
    table[0, :num_tokens] = 0


@contextmanager
def prepared(forward_batch: ForwardBatch, runner: ModelRunner, attention: Any) -> Iterator[None]:
    """Prepare SGLang's state so that the `with` block can run the model's layers over a batch, with
    this attention backend. SGLang's recorder of experts ignores these runs."""
    with (
        torch.no_grad(),
        get_global_expert_distribution_recorder().disable_this_region(),
        get_model().override(shared_experts=runner.model.shared_experts_config),
        forward_context(ForwardContext(attn_backend=attention), forward_batch=forward_batch),
    ):
        runner._prepare_eager_forward_batch(forward_batch)
        attention.init_forward_metadata(forward_batch)
        yield


def run_as_sglang(forward_batch: ForwardBatch, runner: ModelRunner) -> None:
    """Run the model's forward over a batch as SGLang does, and drop its output."""
    with torch.no_grad():
        runner.forward(forward_batch)
    # The forward has set this event, after which the scheduler may overwrite the inputs. The
    # batch's own forward does not always set it again, and must not inherit this one.
    runner.shared_read_done_event = None


def _extending(
    batch: ScheduleBatch, parts: Sequence[tuple[int, Span]], runner: ModelRunner
) -> ScheduleBatch:
    """Make a batch that prefills the tokens of each part behind the earlier tokens of its row.
    SGLang's encoder-SWA replay does the same."""
    device = runner.device
    rows = [row for row, _ in parts]
    starts = [tokens.start for _, tokens in parts]
    stops = [tokens.stop for _, tokens in parts]
    lengths = [len(tokens) for _, tokens in parts]
    table_rows = batch.req_pool_indices_cpu[rows].tolist()
    req_to_token = runner.req_to_token_pool.req_to_token

    replay = copy(batch)
    replay.forward_mode = ForwardMode.EXTEND
    replay.reqs = [batch.reqs[row] for row in rows]
    tokens = [
        token
        for req, (_, span) in zip(replay.reqs, parts, strict=True)
        for token in req.full_untruncated_fill_ids[span.start : span.stop]
    ]
    replay.input_ids = async_h2d(tokens, dtype=torch.int64, device=device)
    replay.prefill_input_ids_cpu = None
    # Embeddings belong to other rows: a request with embeddings reuses nothing.
    replay.input_embeds = replay.replace_embeds = replay.replace_positions = None
    replay.req_pool_indices = async_h2d(table_rows, dtype=torch.int64, device=device)
    replay.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    replay.prefix_lens = starts
    replay.extend_lens = lengths
    replay.extend_num_tokens = sum(lengths)
    replay.seq_lens = async_h2d(stops, dtype=torch.int64, device=device)
    replay.seq_lens_cpu = torch.tensor(stops, dtype=torch.int64)
    replay.seq_lens_sum = sum(stops)
    replay.orig_seq_lens = replay.seq_lens
    replay.out_cache_loc = torch.cat(
        [
            req_to_token[row, start:stop]
            for row, start, stop in zip(table_rows, starts, stops, strict=True)
        ]
    ).long()
    replay.return_logprob = False
    replay.top_logprobs_nums = None
    replay.token_ids_logprobs = None
    replay.extend_logprob_start_lens = lengths
    replay.extend_input_logprob_token_ids = None
    replay.is_prefill_only = True
    replay.spec_info = None
    replay.sampling_info = None
    replay.has_grammar = False
    replay.multimodal_inputs = [None] * len(parts)
    return replay
