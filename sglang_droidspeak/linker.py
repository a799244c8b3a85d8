"""The linker: SGLang's radix cache calls its methods. It makes all other objects, and places hooks.

when            method/hook   what it does                        who does it
waiting queue   new_prefill   plan, fetch, keep waiting           Queue → WaitingRequests
admission       lookup, load  promise pages, take slots           WaitingRequests → Load
batch start     start         copy layers into slots              Loader
forward         forward       partial prefill, or full prefill    BatchForward → PartialPrefill
batch end       finish        free the staging                    Loader
insertion       offload       copy new exact KV and E to host     Insertions → Offloader, HostEvents
answer          stream        hold back if asked; add the label   Replies, Labels
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from cachetree import Cache, MakeTier, ModelId, Part, with_names
from cachetree.checkpoint import Family, ModelIdentity, Weights, adapter_digest
from cachetree.memory import unregistered
from cachetree.metrics import StatusPage
from cachetree.planning import LineProfile
from cachetree.transport import parse_http, serve_spans, untraced
from sglang_droidspeak import engine
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.hooks import AdapterHooks
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import Hook, HookType, release, tracing
from sglang_droidspeak.engine.hashing import ensure_page_hashes
from sglang_droidspeak.engine.names import (
    CacheInitParams,
    ComponentType,
    LoRARef,
    PoolName,
    PoolTransfer,
    ServerArgs,
    UnifiedCacheLinker,
    get_observability,
    get_parallel,
)
from sglang_droidspeak.guard.service import PairsInService
from sglang_droidspeak.lines import Lines
from sglang_droidspeak.metrics import CacheMetrics, Metrics
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import meta_info
from sglang_droidspeak.request.answers import Answers
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.forward import BatchForward
from sglang_droidspeak.request.load import Copies, Loader
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.request.queue import Queue
from sglang_droidspeak.request.replies import Replies
from sglang_droidspeak.request.report import Labels
from sglang_droidspeak.request.source import Sources
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.start import refuse
from sglang_droidspeak.start.config import cache_config
from sglang_droidspeak.start.this_server import ThisServer, folder_of, name_of
from sglang_droidspeak.store.e_pool import attachment_of
from sglang_droidspeak.store.events import HostEvents
from sglang_droidspeak.store.insertions import Insertions, Offloader
from sglang_droidspeak.store.pool import PoolIndex
from sglang_droidspeak.store.rows import Coding, ServerPool, page_locked, rows_of
from sglang_droidspeak.weights import TYPES, WeightUpdates

log = logging.getLogger(__name__)


class DroidSpeakLinker(UnifiedCacheLinker):
    """Connect all parts of this package to SGLang. SGLang makes one linker in each scheduler
    process, and calls its methods on the scheduler thread."""

    def __init__(
        self,
        server_args: ServerArgs,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: dict[str, Any],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        refuse.check_tree_components({it.name for it in components})
        ensure_page_hashes()
        mark_log()
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        attachment = attachment_of(pool)
        server, runner = attachment.server, attachment.runner
        settings, identity = server.settings, server.identity
        if server.lines:
            refuse.check_stored_type(server.weights, TYPES[runner.dtype])
        num_slots = pool.size + pool.page_size

        self.pools = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self._on_cuda = runner.device == "cuda"
        self._meter = Meter(
            runner.device, pool.layer_num, engine.step_tokens(server_args), server.prefill_prior
        )
        parallel = get_parallel()
        self._ranks = Ranks(params.tp_cache_group if parallel.tp_size > 1 else None)
        has_metrics = get_observability().enable_metrics
        self._metrics = Metrics(enabled=has_metrics and self._ranks.is_first)
        self._started_with, self._started_as = server.senders, identity.model_id
        self._senders = dict(self._started_with)
        self._served = name_of(engine.resolved(server_args))
        self._cache = Cache(
            Family(
                **identity.shape,
                model_dtype=str(runner.dtype).removeprefix("torch."),
                kv_dtype=str(pool.dtype).removeprefix("torch."),
                page_size=params.page_size,
                codec=settings.codec,
                tp_size=parallel.tp_size,
                tp_rank=parallel.tp_rank,
            ),
            cache_config(settings, identity.model_id, parallel.tp_rank),
            tiers=_tiers(server, self._senders, self._metrics),
            register=page_locked if self._on_cuda else unregistered,
            note_served=serve_spans() if tracing.is_on() else untraced,
        )
        self._cache.names.call(identity.model_id, self._served)
        self._while_serving = contextlib.ExitStack()
        self._until_closed = contextlib.ExitStack()
        self._until_closed.callback(self._cache.close)
        if has_metrics:
            copying = CacheMetrics(self._cache.status, beside=self._tell_names)
            self._until_closed.callback(copying.close)
        coding = Coding(settings.codec, identity.head_dim)
        server_pool = ServerPool(rows_of(pool, coding), attachment.e_pool, coding, params.page_size)
        copies = Copies(forward_stream, runner.device)
        self._loader = Loader(pool.layer_num, copies)
        self.layer_done_counter = self._loader.counter
        self._offloader = Offloader(self._cache, server_pool, copies.another_stream())
        self._labels = Labels(self._metrics, self._cache.names)
        self._replies = Replies(
            self._cache, self._offloader, self._labels, settings.fetch_deadline_s
        )
        self._models = Models(identity, identity.num_layers, adapter_digest)
        self._activated = ActivatedAdapters(self._models)
        self._pool_index = PoolIndex(
            self._cache.tree,
            [Part(layer) for layer in server.transition_layers],
            params.page_size,
            num_slots,
            self._ranks,
        )
        self._pool_index.is_read = runner.lora_manager is not None
        self._planner = planner = Planner(
            server, self._cache, self._meter, self._models, self._activated, self._pool_index
        )
        self._metrics.tell_pairs(planner.profiles)
        for profile in (*planner.profiles.values(), *server.lines):
            self._cache.names.suppose(profile.names)
        if settings.http is not None and self._ranks.is_first:
            page = StatusPage(parse_http(settings.http), self._cache.status)
            self._until_closed.enter_context(page)
        self._guard = guard = PairsInService(
            planner,
            self._metrics,
            settings,
            self._cache.names,
            keeps_record=self._ranks.is_first,
        )
        self._lines = Lines(server.lines)
        self._lines.follow(identity, server.weights)
        self._waiting = WaitingRequests(
            Sources(server, self._cache, self._pool_index, server_pool),
            self._meter,
            self._labels,
            planner,
            Followers(self._cache.tree, planner, self._models, params.page_size),
            self._ranks,
        )
        self._forward = BatchForward(
            attachment, self._loader, self._meter, self._labels, self._ranks
        )
        self._forward.warm(forward_stream)
        self._insertions = Insertions(
            self._models, self._pool_index, self._offloader, params.page_size
        )
        self._offloader.is_stopped = not settings.host_gb
        adapters: Mapping[str, LoRARef] = {}
        if runner.lora_manager is not None:
            adapters = runner.lora_manager.lora_refs
        updates = WeightUpdates(
            server.weights, self._models, self._ranks, self._weights_change, self._weights_known
        )
        self._models.settle_base = updates.settle
        queue = Queue(self._waiting, self._replies, self._models, self._ranks)
        answers = Answers(
            self._cache, planner, self._labels, adapters, params.page_size, guard.answer
        )
        hooks = self._hooks(queue, answers) | updates.table()
        if runner.lora_manager is not None:
            hooks |= AdapterHooks(
                self._models, self._activated, self._ranks, self._pool_index.forget
            ).table()
        if params.enable_kv_cache_events:
            self._insertions.name = params.kv_event_lora_names.register
            if settings.host_gb:
                events = HostEvents(self._cache, self._offloader, adapters, self._metrics)
                self._while_serving.callback(events.close)
                self._insertions.about = events.about
                hooks[release.TAKE_EVENTS] = events.take, HookType.AFTER
        engine.place_hooks(hooks)
        self._models.known = lambda lora_id, model: self._cache.names.call(
            model, adapters[lora_id].lora_name
        )
        for lora_id, ref in adapters.items():
            self._models.add(lora_id, folder_of(ref.lora_path))
        if adapters:
            self._activated.require_room(runner.lora_manager)
        log.info(
            "droidspeak: model %s, E kept of layers %s, %d profiles, %g GiB of memory to store "
            "(host_gb), %g to fetch (staging_gb), serves at %s, peers: %s",
            with_names(identity.model_id, self._cache.names.now),
            list(server.transition_layers),
            len(server.profiles),
            settings.host_gb,
            settings.staging_gb,
            self._cache.address or "no address",
            ", ".join(it.address for it in self._cache.sources()) or "no peers",
        )

    def _hooks(self, queue: Queue, answers: Answers) -> dict[str, Hook]:
        return {
            release.NEW_PREFILL: (queue.new_prefill, HookType.AROUND),
            release.REPLAY_LEN: (queue.charge, HookType.AFTER),
            release.MATCH: (queue.match, HookType.AROUND),
            release.FORWARD: (self._forward.run_batch, HookType.AROUND),
            release.CHECKPOINT: (self._insertions.checkpoint, HookType.AROUND),
            release.REPORT: (self._replies.stream, HookType.AROUND),
            release.SLEEP_ON_IDLE: (self._replies.sleep, HookType.AROUND),
            release.REPORT_ABORT: (self._labels.aborted, HookType.BEFORE),
            release.REQUEST_LEVEL: (_is_request_level, HookType.AFTER),
            release.INTERNAL_STATE: (answers.add, HookType.AFTER),
        }

    def _tell_names(self) -> None:
        self._metrics.tell_names(self._cache.names.now)

    # Waiting and admission.

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        (transfer,) = transfers
        return list(range(1, self._waiting.num_restorable(rid, transfer.keys[0]) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        (transfer,) = transfers
        return self._waiting.take(rid, transfer.keys, transfer.device_indices)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._waiting.cancel(rid)

    # Loading, with its batch.

    def start_layer_wise_loading(self) -> int:
        requests = self._waiting.start()
        if not requests:
            return -1
        index = self._loader.start([it.load for it in requests])
        self._forward.expect(index, requests)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """End a batch. Return False if a copy into slots failed during the forward: SGLang then
        aborts the batch.

        After a failed fetch the result is True, because a full prefill has replaced the fetch
        before the forward.
        """
        self._loader.finish(counter_index)
        if not all(self._ranks.least([self._loader.is_alive])):
            self._retire("loader_failed", "the loader's thread of a rank has failed")
        return self._forward.done(counter_index)

    # Offloading.

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        ready = self.record_offload_ready if self._on_cuda else tuple
        return self._insertions.offload(transfers, ready)

    def num_completed_offloads(self) -> int:
        return self._offloader.num_results

    def pop_completed_offload(self) -> bool:
        return self._offloader.pop_result()

    # Life.

    def reset(self) -> None:
        """Forget all KV slots, because SGLang flushes its tree. Waits until no copy runs."""
        self._waiting.clear()
        self._offloader.reset()
        self._pool_index.clear()
        self._models.flushed()
        self._loader.counter.reset()

    def _weights_change(self) -> None:
        """Stop reuse before new weights are written. Waiting requests get new plans afterwards.

        Copies to the cache continue: the old weights computed their KV, and the copies are stored
        under the old model's id.
        """
        self._metrics.tell_pairs(self._planner.profiles, are_off=True)
        self._waiting.clear()
        self._pool_index.clear()
        self._cache.run(ModelId(""))

    def _weights_known(self, identity: ModelIdentity, weights: Weights, folder: str) -> None:
        model = identity.model_id
        name = folder or f"{self._served}+{self._models.generation}"
        if model not in self._cache.names.now:
            self._cache.names.call(model, name)
        heirs = self._ranks.share(self._lines.follow(identity, weights), list[LineProfile])
        self._guard.inherit(heirs)
        # The present model may find its own KV, and that of models from which it inherits.
        own = self._started_with[self._started_as]
        senders = {model: own} | self._started_with
        for heir in heirs:
            if heir.passed:
                sender = heir.sender.model_id
                senders[sender] = senders.get(sender, own) | heir.transition_layers()
        self._senders |= senders
        for former in self._senders.keys() - senders.keys():
            del self._senders[former]
        self._cache.run(model)
        self._metrics.tell_pairs(self._planner.profiles, are_off=bool(self._planner.off))
        log.info(
            "droidspeak: model %s is served after an update",
            with_names(model, self._cache.names.now),
        )

    def _retire(self, outcome: str, why: str) -> None:
        """Turn droidspeak off until the server restarts. All ranks call this in the same scheduler
        step. Repeated calls do nothing."""
        if self._planner.off:
            return
        log.warning("%s: droidspeak is off until this server restarts", why)
        self._planner.off, self._offloader.is_stopped = outcome, True
        self._metrics.tell_pairs(self._planner.profiles, are_off=True)
        self._waiting.clear()
        self._cache.stop_serving()
        self._while_serving.close()

    def close(self) -> None:
        self.reset()
        self._loader.close()
        self._offloader.close()
        self._while_serving.close()
        self._until_closed.close()


def mark_log() -> None:
    """Let the cache's log lines about peers begin with `droidspeak: ` in this server's log."""
    logging.getLogger("cachetree.peer").addFilter(_mark)


def _mark(record: logging.LogRecord) -> bool:
    record.msg = f"droidspeak: {record.msg}"
    return True


def _tiers(
    server: ThisServer, senders: Mapping[ModelId, frozenset[int]], metrics: Metrics
) -> list[MakeTier]:
    settings = server.settings
    if settings.hicache_backend is None:
        return []
    from sglang_droidspeak.hicache import hicache_tier

    name, config = settings.hicache_backend, settings.hicache_config
    return [hicache_tier(name, config, senders, metrics.count_hicache_objects)]


def _is_request_level(result: bool, _streamer: object, key: str) -> bool:
    return result or key == meta_info.KEY
