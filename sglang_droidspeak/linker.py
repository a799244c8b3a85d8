"""The linker that SGLang's radix cache drives, and the hot hooks around it.

waiting queue   new_prefill   plan, stage, hold            WaitingRequests
admission       lookup, load  promise pages, take the job  WaitingRequests → Job
batch start     start         copy layers into slots       Loader
forward         forward       partial prefill, fall back   PartialPrefill, Provenance
batch end       finish        free the staging
insertion       offload       copy new exact KV and E out  Offloader
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from cachetree import Cache, ConfigError, MakeTier
from cachetree.checkpoint import Family
from cachetree.memory import pageable
from sglang_droidspeak import engine
from sglang_droidspeak.adapters.activated import Activated
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import HookType
from sglang_droidspeak.engine.hashing import ensure_page_hashes
from sglang_droidspeak.engine.names import (
    CacheInitParams,
    ComponentType,
    PoolName,
    PoolTransfer,
    UnifiedCacheLinker,
    get_observability,
    get_parallel,
)
from sglang_droidspeak.engine.prefixes import (
    is_approximate,
    namespace_of,
    own_pages_of,
    page_hash,
    pages_of,
    place_of,
    refusal,
)
from sglang_droidspeak.metrics import CacheMetrics, Metrics
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import meta_info
from sglang_droidspeak.request.forward import ForwardPass, largest_forward
from sglang_droidspeak.request.job import Job
from sglang_droidspeak.request.labels import Labels
from sglang_droidspeak.request.leaders import Leaders
from sglang_droidspeak.request.loader import Copies, Loader
from sglang_droidspeak.request.low_rank import LowRank
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.request.replies import Replies
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.start import peers
from sglang_droidspeak.start.config import cache_config
from sglang_droidspeak.start.site import folder_of
from sglang_droidspeak.store.capture import Provenance, attachment_of
from sglang_droidspeak.store.offloader import Offload, Offloader
from sglang_droidspeak.store.pool import PoolIndex
from sglang_droidspeak.store.rows import Coding, rows_of

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import (
        LoRARef,
        PrefillAdder,
        Req,
        ScheduleBatch,
        Scheduler,
        ServerArgs,
    )
    from sglang_droidspeak.start.site import Site

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.001


class DroidSpeakLinker(UnifiedCacheLinker):
    """Constructed by SGLang in each scheduler process. Scheduler thread only, like its base."""

    def __init__(
        self,
        server_args: ServerArgs,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        if components != {ComponentType.FULL}:
            names = ", ".join(sorted(component.name for component in components))
            raise ConfigError(f"tree components {names} are not supported; only FULL is")
        ensure_page_hashes()
        peers.mark_log()
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        attachment = attachment_of(pool)
        site, runner = attachment.site, attachment.runner
        settings = site.settings
        num_slots = pool.size + pool.page_size

        self.pools = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self._site = site
        self._page_size = params.page_size
        self._req_to_token = params.req_to_token_pool.req_to_token
        self._on_cuda = runner.device == "cuda"
        self._provenance = Provenance(num_slots, runner.device)
        self._meter = Meter(
            runner.device, pool.layer_num, largest_forward(runner), site.prefill_prior
        )
        parallel = get_parallel()
        self._ranks = Ranks(params.tp_cache_group if parallel.tp_size > 1 else None)
        has_metrics = get_observability().enable_metrics
        self._metrics = Metrics(enabled=has_metrics and self._ranks.is_first)
        self._cache = Cache(
            Family.of(
                site.identity,
                model_dtype=str(runner.dtype).removeprefix("torch."),
                kv_dtype=str(pool.dtype).removeprefix("torch."),
                page_size=params.page_size,
                codec=settings.codec,
                tp_size=parallel.tp_size,
                tp_rank=parallel.tp_rank,
            ),
            cache_config(settings, site.identity.model_id, parallel.tp_rank),
            tiers=_tiers(site, self._metrics),
            allocate=_page_locked if self._on_cuda else pageable,
        )
        self._cache_metrics = CacheMetrics(self._cache.status) if has_metrics else None
        coding = Coding(settings.codec, site.identity.head_dim)
        rows = rows_of(pool, coding)
        self._loader = Loader(pool.layer_num, rows, Copies(forward_stream, runner.device))
        self.layer_done_counter = self._loader.counter
        self._offloader = Offloader(self._cache, rows, attachment.e_pool, coding, self._provenance)
        self._replies = Replies(self._cache, self._offloader, settings.fetch_deadline_s)
        identity = site.identity
        self._models = Models(identity.model_id, identity.num_layers, site.identify)
        self._activated = Activated(self._models)
        self._pool_index = PoolIndex(
            self._cache.tree, attachment.e_pool, self._provenance, params.page_size, num_slots
        )
        low_rank = LowRank(attachment, self._models, largest_forward(runner))
        planner = Planner(site, self._cache, self._meter, self._models, self._pool_index, low_rank)
        self._labels = Labels(self._metrics)
        self._waiting = WaitingRequests(
            site,
            self._cache,
            self._meter,
            self._labels,
            planner,
            self._pool_index,
            self._activated,
            Leaders(self._cache.tree, planner, self._models, params.page_size),
            self._ranks,
        )
        self._forward = ForwardPass(
            attachment,
            self._loader,
            low_rank,
            coding,
            self._provenance,
            self._meter,
            self._metrics,
            self._labels,
            self._ranks,
        )
        self._queued: dict[str, Job] = {}
        self._inserting: tuple[Req, int] | None = None
        self._stores = settings.host_gb > 0
        self._is_retired = False
        engine.place_hooks(
            {
                engine.NEW_PREFILL: (self._new_prefill, HookType.AROUND),
                engine.REPLAY_LEN: (self._charge, HookType.AFTER),
                engine.MATCH: (self._match, HookType.AROUND),
                engine.FORWARD: (self._forward.around, HookType.AROUND),
                engine.CHECKPOINT: (self._checkpoint, HookType.AROUND),
                engine.REPORT: (self._labels.report, HookType.BEFORE),
                engine.REPORT_ABORT: (self._labels.aborted, HookType.BEFORE),
                engine.REQUEST_LEVEL: (_is_request_level, HookType.AFTER),
                engine.INTERNAL_STATE: (self._add_peers, HookType.AFTER),
            }
        )
        engine.place_hooks(  # Around the label, which is made of what is sent.
            {
                engine.REPORT: (self._replies.stream, HookType.AROUND),
                engine.SLEEP_ON_IDLE: (self._replies.sleep, HookType.AROUND),
            }
        )
        engine.place_hooks(
            dict.fromkeys(engine.WEIGHTS_WRITTEN, (self._weights_change, HookType.BEFORE))
        )
        if runner.lora_manager is not None:
            for lora_id, ref in runner.lora_manager.lora_refs.items():
                self._models.add(lora_id, folder_of(ref.lora_path))
                self._activated.loaded(lora_id)
            engine.place_hooks(
                {
                    engine.LOAD_LORA: (self._load_lora, HookType.AROUND),
                    engine.UNLOAD_LORA: (self._unload_lora, HookType.AFTER),
                }
            )
        log.info(
            "droidspeak: model %s, E kept of layers %s, %d profiles, serves at %s, peers: %s",
            site.identity.model_id,
            list(site.transition_layers),
            len(site.profiles),
            self._cache.address or "no address",
            ", ".join(settings.peers) or "no peers",
        )

    # Waiting and admission.

    def _new_prefill(
        self, original: Any, scheduler: Scheduler, *, running_batch: ScheduleBatch, **rest: Any
    ) -> Any:
        """Hide held requests from SGLang while it builds a batch, and those whose grammar is being
        compiled: it would admit them at sight. Outside it the queues are whole."""
        self._replies.release()
        self._models.settle(self._ranks)
        grammars = scheduler.grammar_manager
        if grammars.has_waiting_grammars():
            for req in grammars.get_ready_grammar_requests():
                scheduler._add_request_to_queue(req)
        queue, compiling = scheduler.waiting_queue, grammars.grammar_queue
        if scheduler.enable_priority_scheduling:
            # SGLang would sort who is not held alone; planning and waiting go by the same order.
            scheduler.policy.calc_priority(queue, running_batch)
        is_decoding = not running_batch.is_empty()
        held = self._waiting.look(queue, scheduler.tree_cache, is_decoding=is_decoding)
        scheduler.waiting_queue = [req for req in queue if req.rid not in held] if held else queue
        grammars.grammar_queue = []
        is_in_chunks = scheduler.chunked_req is not None
        try:
            batch, running = original(scheduler, running_batch=running_batch, **rest)
        finally:
            grammars.grammar_queue = compiling
            left = {id(req) for req in scheduler.waiting_queue}
            if held:
                scheduler.waiting_queue = _rejoined(queue, held, scheduler.waiting_queue)
        if held and not is_in_chunks and (batch is not None or not running.batch_is_full):
            # Nothing that came before these is being prefilled, and there was room for one.
            ahead = takewhile(lambda req: req.rid in held or id(req) in left, queue)
            self._waiting.pass_over(req.rid for req in ahead if req.rid in held)
        if batch is not None:
            self._waiting.admitted(batch.reqs)
        elif held and running.is_empty():
            # Nothing can run until a fetch gets on: leave the processor to the thread that fetches.
            time.sleep(IDLE_WAIT_S)
        return batch, running

    def _charge(self, replayed: int, adder: PrefillAdder, req: Req, prefix_len: int) -> int:
        """Take recomputed layers off the tokens of a step, as SGLang does what it replays itself.

        The first of a step is never refused: what remains is a page for it to go on with, or where
        nobody decodes all of its new tokens.
        """
        charge = self._waiting.step_tokens(req.rid, prefix_len - req.prefix_len)
        if adder.rem_chunk_tokens is not None and not adder.can_run_list:
            num_new = len(req.full_untruncated_fill_ids) - prefix_len
            is_decoding = not adder.running_batch.is_empty()
            kept = self._page_size if is_decoding else adder.ceil_paged_tokens(num_new)
            charge = min(charge, max(0, adder.rem_chunk_tokens - kept))
        return replayed + charge

    def _match(self, original: Any, wrapper: Any, key: Any, req: Req, result: Any) -> Any:
        """Spare SGLang the hashing of a prompt for which nothing is staged."""
        if not self._waiting.has_staging(req.rid):
            return result
        return original(wrapper, key, req, result)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        (transfer,) = transfers
        return list(range(1, self._waiting.num_restorable(rid, transfer.keys[0]) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        (transfer,) = transfers
        job = self._waiting.take(rid, transfer.keys, transfer.device_indices)
        if job is None:
            return False
        self._queued[rid] = job
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        job = self._queued.pop(rid, None)
        if job is None:
            return False
        job.staging.release()
        return True

    # Loading, with its batch.

    def start_layer_wise_loading(self) -> int:
        jobs = list(self._queued.values())
        self._queued.clear()
        if not jobs:
            return -1
        index = self._loader.start(jobs)
        self._forward.expect(index, jobs)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """True but where a copy into slots broke under the forward: SGLang then aborts the batch.

        A fetch that failed has been replaced by a full prefill before the forward.
        """
        self._loader.finish(counter_index)
        return self._forward.done(counter_index)

    # Offloading.

    def _checkpoint(self, original: Any, tree: Any, req: Req, *, up_to: int, **rest: Any) -> None:
        """Tell `offload`, which SGLang calls from inside, whose tokens are being inserted."""
        self._inserting = (req, up_to)
        try:
            original(tree, req, up_to=up_to, **rest)
        finally:
            self._inserting = None
        if self._ranks.is_first and len(self._models) > 1 and not req.skip_radix_cache_insert:
            self._note(req, up_to)

    def _note(self, req: Req, up_to: int) -> None:
        """What SGLang's tree now has of this request is there for the other models, too."""
        part = self._models.part_of(req)
        if part is None or refusal(req) or is_approximate(req):
            return
        pages = part.of(pages_of(req, up_to, self._page_size), self._page_size)
        self._pool_index.note(namespace_of(req), part.model, pages)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        if self._inserting is None or not self._stores:
            return False
        req, up_to = self._inserting
        part = self._models.part_of(req)
        if refusal(req) or part is None:
            return False
        (transfer,) = transfers
        first = page_hash(transfer.keys[0])
        own_path = own_pages_of(req, up_to, self._page_size)
        if first not in own_path:
            return False
        index = own_path.index(first)
        path = pages_of(req, up_to, self._page_size) if place_of(req) else own_path
        pages = part.of(path, self._page_size)[index : index + len(transfer.keys)]
        if not pages:
            return False
        slots = transfer.device_indices[: len(pages) * self._page_size]
        context = slots
        if self._provenance.any_approximate:
            context = self._req_to_token[req.kv.req_pool_idx, :up_to].long()
        return self._offloader.put(
            Offload(
                model=part.model,
                parent=path[index - 1] if index else None,
                pages=pages,
                slots=slots,
                context=context,
                ready=self.record_offload_ready() if self._on_cuda else (),
            )
        )

    def num_completed_offloads(self) -> int:
        return self._offloader.num_results

    def pop_completed_offload(self) -> bool:
        return self._offloader.pop_result()

    # Life.

    def reset(self) -> None:
        """SGLang flushes its tree: nothing may be in flight, and no slot means anything now."""
        self._waiting.clear()
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._offloader.reset()
        self._provenance.reset()
        self._pool_index.clear()
        self._loader.counter.reset()

    def _weights_change(self, *_args: object, **_kwargs: object) -> None:
        """From here on the loaded model may not be the one whose content was read: store, serve
        and reuse nothing more, whether the update works or not.

        What is being stored was computed before, and what is stored is the KV of the model that it
        names.
        """
        if self._is_retired:
            return
        log.warning("weights are updated in place: droidspeak is off until this server restarts")
        self._is_retired, self._stores = True, False
        self._waiting.retire()
        self._cache.stop_serving()

    def _load_lora(self, original: Any, manager: Any, lora_ref: LoRARef) -> None:
        lora_id = lora_ref.lora_id
        folder = folder_of(lora_ref.lora_path)
        self._models.load(lora_id, folder, lambda: original(manager, lora_ref))
        self._activated.loaded(lora_id)

    def _unload_lora(self, result: Any, _manager: object, lora_ref: LoRARef) -> None:
        if result.success:
            self._models.drop(lora_ref.lora_id)
            self._pool_index.forget(lora_ref.lora_id)

    def _add_peers(self, output: Any, *_: object) -> None:
        """To SGLang's answer about its scheduler's state."""
        output.internal_state[peers.KEY] = peers.told(self._cache.sources())

    def close(self) -> None:
        self.reset()
        self._loader.close()
        self._offloader.close()
        if self._cache_metrics is not None:
            self._cache_metrics.close()
        self._cache.close()


def _rejoined(queue: Sequence[Req], held: set[str], left: Sequence[Req]) -> list[Req]:
    """The queue in its order without what was admitted, and then what SGLang has put back."""
    still, known = {id(req) for req in left}, {id(req) for req in queue}
    return [
        *(req for req in queue if req.rid in held or id(req) in still),
        *(req for req in left if id(req) not in known),
    ]


def _tiers(site: Site, metrics: Metrics) -> list[MakeTier]:
    settings = site.settings
    if settings.hicache_backend is None:
        return []
    from sglang_droidspeak.hicache import hicache_tier

    return [
        hicache_tier(
            settings.hicache_backend,
            settings.hicache_config,
            site.senders,
            metrics.count_hicache_objects,
        )
    ]


def _page_locked(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def _is_request_level(result: bool, _streamer: object, key: str) -> bool:
    return result or key == meta_info.KEY
