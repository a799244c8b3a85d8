"""Entry point that SGLang calls in each of its processes. `register` hooks SGLang's functions.

These hooks run only at start-up, or in the front end. The linker places the hooks that run in every
scheduler step. So a server that does not configure the linker runs SGLang's own code.

process    hooked function                hook
front end  the step before SGLang's       raises the default
           default of page_size
           ServerArgs.check_server_args   checks the configuration before anything loads;
                                          adds pages for operators and headers of answers;
                                          marks SGLang's warm-up; watches answers
scheduler  pool cell size                 adds the bytes of E to those of one token's KV
           alloc_memory_pool              allocates E, before CUDA graphs
           available bytes                subtracts the memory that recomputes and copies need
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachetree import CacheTreeError, ConfigError
from sglang_droidspeak import engine
from sglang_droidspeak.engine import HookRegistry, HookType, release
from sglang_droidspeak.start.config import (
    GIB,
    MIN_PAGE_SIZE,
    Settings,
    cache_config,
    is_configured,
)

if TYPE_CHECKING:
    from sglang_droidspeak.engine.names import ModelRunner, ServerArgs
    from sglang_droidspeak.start.this_server import ThisServer


def register() -> None:
    """Place the hooks of this process that run outside of the scheduler's steps."""
    engine.default_page_size(MIN_PAGE_SIZE, is_configured)
    HookRegistry.register(release.CHECK_SERVER_ARGS, _check_server_args, HookType.AFTER)
    # The front end and the detokenizer load plugins too, but have not imported the scheduler.
    # Importing it for its hooks would slow their start.
    if release.SCHEDULER_MODULE in sys.modules:
        for target, (hook, kind) in _SCHEDULER_HOOKS.items():
            HookRegistry.register(target, hook, kind)


def _check_server_args(_result: None, server_args: ServerArgs) -> None:
    if is_configured(engine.resolved(server_args)):
        from sglang_droidspeak.engine.asking import add_pages, mark_warm_up
        from sglang_droidspeak.engine.headers import LabelNotes
        from sglang_droidspeak.guard.shadows import Shadows
        from sglang_droidspeak.request.meta_info import KEY

        settings = check_front_end(server_args)
        add_pages(KEY)
        engine.place_hooks({release.GENERATE: (LabelNotes(KEY).generate, HookType.AROUND)})
        if settings.shadow_share or settings.lines:
            shadows = Shadows(settings)
            engine.place_hooks({release.GENERATE: (shadows.generate, HookType.AROUND)})
        engine.place_hooks({release.GENERATE: (mark_warm_up, HookType.BEFORE)})
        # A forked scheduler has only the hooks of this process.
        if multiprocessing.get_start_method(allow_none=True) == "fork":
            engine.place_hooks(_SCHEDULER_HOOKS)


def check_front_end(server_args: ServerArgs) -> Settings:
    """Check the configuration and return its settings. A configuration that cannot work ends the
    process with one line."""
    from cachetree.checkpoint import read_invocation
    from cachetree.disk import Directory
    from cachetree.transport import Address, bind_ports, open_port, parse_http
    from profiles.environment import free_memory_bytes
    from sglang_droidspeak.guard.service import check_record
    from sglang_droidspeak.start import refuse
    from sglang_droidspeak.start.this_server import folder_of, load_this_server

    args = engine.resolved(server_args)
    try:
        server = load_this_server(server_args)
        settings = server.settings
        if args.enable_lora:
            refuse.check_activated(
                args.lora_paths or (),
                lambda it: read_invocation(folder_of(it.lora_path)),
                args.max_loras_per_batch,
                args.lora_target_modules or (),
            )
        if args.device == "cuda":  # On CPUs memory is taken as it fills.
            refuse.check_memory(settings, args.tp_size, free_memory_bytes() / GIB)
        if settings.guard_path is not None:
            check_record(Path(settings.guard_path))
        with ExitStack() as held:
            # SGLang's own port. `sgl.Engine` opens none, and may run beside a server that has it.
            with suppress(ConfigError):
                held.enter_context(open_port(Address(args.host, args.port), field="port"))
            if settings.http is not None:
                held.enter_context(open_port(parse_http(settings.http), field="http"))
            for rank in range(args.tp_size):
                config = cache_config(settings, server.identity.model_id, rank)
                if config.serves:
                    bind_ports(config.worker, held)
                if config.disk_path:
                    Directory(config.disk_of(rank, args.tp_size), None).close()
    except CacheTreeError as exc:
        raise SystemExit(f"droidspeak: {exc}") from None
    return settings


def _count_e(cell_size: int, _configurator: object, kvc: Any, _num_layers: int) -> int:
    server = _server(kvc.server_args)
    if server is None:
        return cell_size
    from sglang_droidspeak.store.e_pool import e_bytes_per_token

    return cell_size + e_bytes_per_token(server, kvc.model_config.dtype)


def _leave_recompute(available: int, kvc: Any, *_args: object, **_kwargs: object) -> int:
    server, model = _server(kvc.server_args), kvc.model_config
    if server is None:
        return available
    from sglang_droidspeak.engine.attention import attention_bytes
    from sglang_droidspeak.store.rows import working_bytes

    choice = server.settings.recompute_attention
    num_bytes = attention_bytes(choice, model.hf_config.architectures)
    num_bytes += working_bytes(server, model.dtype, engine.step_tokens(kvc.server_args))
    if available <= num_bytes:
        raise ConfigError(
            f"recomputes and copies need {num_bytes >> 20} MiB of device memory, and only "
            f"{available >> 20} MiB are left for KV; raise --mem-fraction-static"
        )
    return available - num_bytes


def _attach(_result: None, runner: ModelRunner, *_args: object, **_kwargs: object) -> None:
    server = _server(runner.server_args)
    if server is not None:
        from sglang_droidspeak.store.e_pool import attach

        attach(runner, server)


def _server(args: ServerArgs) -> ThisServer | None:
    """Read and check this server's settings, model and profiles. None without our linker."""
    if not is_configured(engine.resolved(args)):
        return None
    from sglang_droidspeak.start.this_server import load_this_server

    return load_this_server(args)


_SCHEDULER_HOOKS = {
    release.CELL_SIZE: (_count_e, HookType.AFTER),
    release.AVAILABLE_BYTES: (_leave_recompute, HookType.AFTER),
    release.ALLOC_MEMORY_POOL: (_attach, HookType.AFTER),
}
