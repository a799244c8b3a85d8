"""One model of SGLang on a virtual device, with the extension's parts around it, in a fork.

SGLang keeps much per process, so nothing of it is built in the process that runs the tests: `fork`
calls a function in a child and brings back what it returns.
"""

from __future__ import annotations

import array
import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.unified_cache import unified_cache_linker
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.models import registry  # noqa: F401  (long to import: once for all forks)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from standins import loading
from virtual_cuda import Line, VirtualCuda, VirtualTensor

from benchmarks.oracle import KV
from cachetree.checkpoint.identity import read_weights
from cachetree.clock import Deadline
from cachetree.corrections import Correction
from cachetree.ids import Location, ModelId, PageHash, Span, Step
from cachetree.memory import Staging
from cachetree.planning.plan import Plan
from sglang_droidspeak import linker
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import (
    CacheInitParams,
    ComponentType,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    KVWriteLoc,
    PoolName,
    PoolTransfer,
    Req,
    ScheduleBatch,
    forward_context,
)
from sglang_droidspeak.request.source import InPool, Source, Staged
from sglang_droidspeak.start.config import Settings
from sglang_droidspeak.start.this_server import ThisServer
from sglang_droidspeak.store.e_pool import attach, attachment_of
from sglang_droidspeak.store.pool import PoolPages
from sglang_droidspeak.store.rows import KernelRows

T = TypeVar("T")

PAGE = 16
NUM_SLOTS = 512
CHUNK = 48
"""Tokens of one prefill, so that what is recomputed is cut, too."""
PEER = ModelId("peer")
MAP = "map"
"""Digest of the only map. It computes one and a half times E, plus a bias."""


def fork(function: Callable[[], T], kind: type[T]) -> T:
    """Call `function` in a child of this process; return its result, of a type that msgspec knows.

    Raises RuntimeError with the traceback of an error in the child.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 0
        try:
            message = msgspec.msgpack.encode(function())
        except BaseException:  # noqa: BLE001
            message, status = traceback.format_exc().encode(), 1
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(message)
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(message.decode())
    return msgspec.msgpack.decode(message, type=kind)


def load(model: Path, dtype: str = "float32", **options: Any) -> Any:
    """Make SGLang's model runner on the host. Call it in a fork."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(
        model_path=str(model),
        device="cpu",
        dtype=dtype,
        page_size=PAGE,
        context_length=256,
        max_total_tokens=NUM_SLOTS,
        max_running_requests=8,
        chunked_prefill_size=CHUNK,
        log_level="error",
        **options,
    )
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    port = PortArgs.init_new(args).nccl_port
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(config, 0.5, 0, port, args)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    return runner


@dataclass(frozen=True)
class Part:
    """One request of a batch. Its first tokens are on the device, or about to be loaded."""

    tokens: Sequence[int]
    slots: torch.Tensor
    prefix_len: int = 0
    rid: str = "r"

    @property
    def stop(self) -> int:
        return len(self.tokens)


class Engine:
    """A model runner that has been moved to the device, with this package's hooks.

    SGLang has two streams. On `schedule` the scheduler's thread prepares batches, and on `forwards`
    the model computes them.
    """

    def __init__(self, runner, model, e_layers, cuda, recompute):
        self.cuda, self.runner = cuda, runner
        self.made: list[Any] = []
        """Instances of plain attention that the product had SGLang make."""
        self._rows = itertools.count(1)
        self.waits: list[Line] = []
        self.schedule, self.forwards = torch.cuda.Stream(), torch.cuda.Stream()
        _move(runner, cuda)
        runner.attn_backend = plain_attention(runner)
        runner.forward = self._forward_of_runner
        runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "plain"
        server = _server(model, e_layers, recompute)
        attach(runner, server)
        pool = runner.token_to_kv_pool
        attachment = attachment_of(pool)
        self.stack, self.e_pool = attachment.stack, attachment.e_pool
        self.model, self.num_layers = server.identity.model_id, server.identity.num_layers
        self.schedule.wait_stream(cuda.default_stream)  # What comes later, SGLang orders no more.
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            page_size=PAGE,
        )
        with (
            patch.dict(ATTENTION_BACKENDS, {"plain": self._another}),
            # This class calls what is hooked, and SGLang looks through all modules for each.
            patch.object(linker.engine, "place_hooks"),
        ):
            self.linker = linker.DroidSpeakLinker(
                runner.server_args,
                params,
                components={ComponentType.FULL},
                extra_config={},
                forward_stream=self.forwards,
            )
        pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.loader, self.pass_ = self.linker._loader, self.linker._forward
        self.cache, self.meter = self.linker._cache, self.linker._meter
        self.labels, self.pool = self.linker._labels, self.linker._offloader._pool

    def _another(self, runner: Any) -> Any:
        self.made.append(plain_attention(runner))
        self.made[-1].has_own_workspace = runner.init_new_workspace
        return self.made[-1]

    # What SGLang's scheduler does.

    def slots(self, first: int, num: int) -> torch.Tensor:
        """Return slots of whole pages, as the scheduler's thread hands them out."""
        return torch.arange(first, first + num, device="cuda")

    def batch(self, *parts: Part, index: int = -1) -> Any:
        """Requests that were just admitted, each in a row of its own."""
        runner = self.runner
        rows = [next(self._rows) for _ in parts]
        for row, part in zip(rows, parts, strict=True):
            runner.req_to_token_pool.req_to_token[row, : part.stop] = part.slots[: part.stop].int()
        batch = ScheduleBatch.init_new(
            reqs=[_request(it) for it in parts],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=SimpleNamespace(page_size=PAGE),
            model_config=runner.model_config,
            enable_overlap=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.forward_mode = ForwardMode.EXTEND
        new = [token for it in parts for token in it.tokens[it.prefix_len :]]
        batch.input_ids = torch.tensor(new, device="cuda")
        batch.req_pool_indices = torch.tensor(rows, device="cuda")
        batch.req_pool_indices_cpu = torch.tensor(rows)
        batch.prefix_lens = [it.prefix_len for it in parts]
        batch.extend_lens = [it.stop - it.prefix_len for it in parts]
        batch.extend_num_tokens = len(new)
        batch.extend_logprob_start_lens = batch.extend_lens
        batch.seq_lens_cpu = torch.tensor([it.stop for it in parts])
        batch.seq_lens = batch.orig_seq_lens = batch.seq_lens_cpu.to("cuda")
        batch.seq_lens_sum = sum(it.stop for it in parts)
        batch.out_cache_loc = torch.cat([it.slots[it.prefix_len : it.stop] for it in parts])
        batch.multimodal_inputs = [None for _ in parts]
        batch.hicache_consumer_index = index
        return batch

    def run(self, batch: Any) -> torch.cuda.Event:
        """Run one batch on the forward stream, through the product's hook. Return the event of its
        end.

        `waits` are the lines of the product that make the host wait meanwhile.
        """
        num_before = len(self.cuda.stalls)
        with torch.cuda.stream(self.forwards):
            self.forwards.wait_stream(self.schedule)
            self.pass_.run_batch(self._forward, None, batch)
            done = torch.cuda.Event()
            done.record()
        self.waits += [it.line for it in self.cuda.stalls[num_before:] if it.line is not None]
        return done

    def _forward(self, _worker: None, batch: Any) -> None:
        runner = self.runner
        self.loader.counter.set_consumer(batch.hicache_consumer_index)
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        assert runner.shared_read_done_event is None, "what it says is not of this forward"
        with torch.no_grad():
            runner.forward(forward)
        runner.shared_read_done_event = None  # The scheduler's thread takes it.

    def _forward_of_runner(self, forward: ForwardBatch) -> None:
        """Compute a batch in place of `ModelRunner.forward`, without CUDA graphs."""
        runner = self.runner
        context = ForwardContext(attn_backend=runner.attn_backend)
        with forward_context(context, forward_batch=forward):
            runner._prepare_eager_forward_batch(forward)
            runner.attn_backend.init_forward_metadata(forward)
            runner.model.forward(forward.input_ids, forward.positions, forward)
        runner.shared_read_done_event = torch.cuda.Event()

    def run_with(self, requests, *parts, meanwhile=lambda: None):
        """Run a batch as SGLang does: loads start with it and end after it. Return their
        outcomes."""
        index = self.loader.start([it.load for it in requests])
        self.pass_.expect(index, requests)
        meanwhile()
        batch = self.batch(*parts, index=index)
        for request in requests:
            (request.req,) = (req for req in batch.reqs if req.rid == request.req.rid)
        self.run(batch)
        assert self.linker.finish_layer_wise_loading(index)
        self.labels.report(batch.reqs)
        return [req.customized_info["droidspeak"][0]["outcome"] for req in batch.reqs]

    def differences(self, slots: torch.Tensor, expected: Sequence[torch.Tensor]) -> list[float]:
        """Return, for each layer, how far the KV in these slots is from `[tokens, (K, V), heads,
        head_dim]`."""
        torch.cuda.synchronize()
        pool, distances = self.runner.token_to_kv_pool, []
        for layer, kv in enumerate(expected):
            rows = [buffer[layer][slots].cpu() for buffer in (pool.k_buffer, pool.v_buffer)]
            distances.append(float((torch.stack(rows, 1) - kv[: len(slots)]).abs().max()))
        return distances

    def store(self, tokens: Sequence[int], slots: torch.Tensor) -> list[PageHash]:
        """Insert these tokens as SGLang does into its tree, then offload the new node. Return its
        pages; all of them are stored."""
        req = _request(Part(tokens, slots))
        pages = prefixes.pages_of(req, len(slots), PAGE)
        keys = [it.hex() for it in pages]
        transfer = PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)

        def insert(_tree: None, _req: Req, **_: int) -> None:
            with patch.object(unified_cache_linker, "device_module", torch.cuda):
                assert self.linker.offload([transfer])

        self.linker._insertions.checkpoint(insert, None, req, up_to=len(slots))
        while not self.linker.num_completed_offloads():
            time.sleep(0.001)
        assert self.linker.pop_completed_offload()
        return pages

    # What the extension is given.

    def loading(self, slots, block, pages_of, sender=None, rid="r", e_map=""):
        """Return a load of all pages of `slots`, from staged memory or from the pool. Without a
        sender this model is the sender: its own KV is not approximate."""
        pages = Span(0, len(slots) // PAGE)
        plan = Plan(
            sender=sender or self.model,
            receiver=self.model,
            location=Location("tcp://peer"),
            pages=pages,
            block=block,
            num_layers=self.num_layers,
            e_map=e_map,
        )
        if isinstance(pages_of, PoolPages):
            source: Source = InPool(plan, self.pool, lambda: pages_of)
            assert source.admit()
        else:
            sizes = {
                step: len(pages) * self.cache.family.page_bytes(step.kind) for step in plan.steps
            }
            views, at = {}, 0
            for step, size in sizes.items():
                views[step] = [pages_of[at : at + size]]
                at += size
            source = Staged(plan, self.pool, Staging(sizes, Deadline.after(300), views))
        return loading(plan, source, Span(0, len(slots)), slots, SimpleNamespace(rid=rid))

    def close(self) -> None:
        self.linker.close()


def _server(model: Path, e_layers: Sequence[int], recompute: str) -> ThisServer:
    settings = Settings(
        host_gb=2**-6,
        staging_gb=2**-10,
        capture_layers=tuple(e_layers),
        forward_wait_s=300.0,
        recompute_attention=recompute,
    )
    weights = read_weights(model)
    hidden = weights.started_as.hidden_size
    half = Correction(torch.full((hidden,), 0.25), torch.eye(hidden) / 2)
    return ThisServer(
        settings=settings,
        weights=weights,
        profiles=(),
        lines=(),
        page_size=PAGE,
        e_width=hidden,
        adapters=None,
        corrections={MAP: half},
    )


def _request(part: Part) -> Req:
    ids = array.array("q", part.tokens)
    req = Req(
        rid=part.rid, origin_input_text="", origin_input_ids=ids, sampling_params=SamplingParams()
    )
    req.full_untruncated_fill_ids, req.extend_end = ids, len(ids)
    return req


def land(staging: Staging, values: Mapping[Step, torch.Tensor] | None = None) -> None:
    """Fill the staging as a transport's thread does: with `values`, or with ones for all steps."""
    if values is None:
        values = {it: torch.ones(staging.sizes[it] // 4) for it in staging.steps}
    for step, tensor in values.items():
        staging.write(step, 0, memoryview(tensor.contiguous().numpy()).cast("B"))


def stored(kv: KV) -> torch.Tensor:
    """Return KV as cachetree stores it: `[tokens, (K, V), heads, head_dim]`."""
    return torch.stack([it[0].transpose(0, 1) for it in kv], dim=1)


@contextmanager
def on_device(runner, model, e_layers, cuda, recompute="server"):
    """`recompute` is the setting that chooses the attention of a partial prefill."""
    logging.getLogger("sglang_droidspeak").setLevel(logging.CRITICAL)
    with (
        cuda,
        patch.object(forward_batch_info, "compute_position", _positions),
        # The device watches each place that the product counts in advance.
        patch.object(KernelRows, "most_tokens", NUM_SLOTS),
    ):
        engine = Engine(runner, model, e_layers, cuda, recompute)
        with torch.cuda.stream(engine.schedule):
            yield engine


def _move(runner: Any, cuda: VirtualCuda) -> None:
    """Move the model to the device, as if it had been loaded there. No operation writes
    parameters."""

    def there(tensor: torch.Tensor) -> VirtualTensor:
        return VirtualTensor(tensor.detach().clone(), cuda)

    for module in runner.model.modules():
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is not None:
                    named[name] = there(tensor)
                    named[name].host.is_constant = True
    for module in runner.model.modules():  # A router's bias is named in its settings too.
        if hasattr(module, "gate") and hasattr(getattr(module, "topk", None), "topk_config"):
            module.topk.topk_config.correction_bias = getattr(
                module.gate, "e_score_correction_bias", None
            )
    parts = ("token_to_kv_pool", "req_to_token_pool", "token_to_kv_pool_allocator")
    for part in (getattr(runner, name) for name in parts):
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                setattr(part, name, there(value))
            elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                setattr(part, name, [there(it) for it in value])
            elif str(value) == "cpu":
                setattr(part, name, "cuda")
    runner.device = "cuda"


def _positions(_backend: str, prefix_lens: Any, lens: Any, total: int) -> tuple[Any, Any]:
    """Replace SGLang's kernel. Like the kernel, this code never makes the host wait."""
    starts = lens.cumsum(0) - lens
    shift = (prefix_lens - starts).repeat_interleave(lens, output_size=total)
    return torch.arange(total, device="cuda") + shift, starts


def plain_attention(runner: Any) -> Any:
    """Replace SGLang's kernels: plain attention on the device, in which nothing makes the host
    wait."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Attention(AttentionBackend):
        def __init__(self) -> None:
            self.fails = False
            self.runs: list[list[int]] = []
            """Number of tokens before each prompt's new tokens, for each layer that ran on this
            backend."""
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.req_to_token_pool = runner.req_to_token_pool
            self.indptr = torch.zeros(NUM_SLOTS, dtype=torch.int64, device="cuda")

        def init_forward_metadata(self, batch: ForwardBatch) -> None:
            """Write into the metadata that SGLang made with this backend, as FlashInfer's backend
            does."""
            self.indptr[1 : batch.batch_size + 1] = batch.seq_lens.cumsum(0)

        def forward_extend(self, q, k, v, layer, batch, save=True, **_):
            if self.fails:
                raise RuntimeError("no kernel for this device")
            self.runs.append(list(batch.extend_prefix_lens_cpu))
            pool, heads = self.token_to_kv_pool, layer.tp_k_head_num
            if save:
                k, v = (it.view(-1, heads, layer.qk_head_dim) for it in (k, v))
                pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v)
            keys, values = (
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
            )
            table, outs, first = runner.req_to_token_pool.req_to_token, [], 0
            rows, stops = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
            for row, stop, num in zip(rows, stops, batch.extend_seq_lens_cpu, strict=True):
                at = table[row, :stop]
                query = q[first : first + num].view(num, heads, -1, layer.qk_head_dim)
                scores = torch.einsum("thgd,shd->hgts", query, keys[at]) * layer.scaling
                hidden = torch.ones(num, stop, dtype=torch.bool, device="cuda").triu(stop - num + 1)
                weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
                out = torch.einsum("hgts,shd->thgd", weights, values[at])
                outs.append(out.reshape(num, -1))
                first += num
            return torch.cat(outs)

    return Attention()
