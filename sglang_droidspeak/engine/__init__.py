"""Wrap the parts of SGLang that this package uses. No other folder imports SGLang.

    v0_5_23    names of SGLang 0.5.23 that this package uses; a JSON file has source hashes
    probe      refuses another release, and lists the differences of its source
    names      imports SGLang's types and functions, in one list
    layers     decoder layers: capture E, and run a block
    replay     batches: run prefix tokens once more before a batch's own forward
    prefixes   requests and the radix tree: pages, tenants, exact and approximate KV
    asking     the HTTP server: questions of operators, and the server's own requests
    headers    HTTP headers of answers
    tracing    the trace of a request
    hashing    page hashes without a compiler
    attention  an attention backend for recomputes
    transfer   kernels that copy KV to and from host memory
    hicache    storage backends of HiCache

The next release of SGLang gets its own module: a copy of `v0_5_23` with the differences.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from cachetree import ConfigError
from sglang_droidspeak.engine import v0_5_23 as release

__all__ = [
    "Hook",
    "HookRegistry",
    "HookType",
    "Hooks",
    "Quantization",
    "default_page_size",
    "place_hooks",
    "quantization",
    "release",
    "resolved",
    "step_tokens",
    "switched_on",
]

log = logging.getLogger(__name__)

Hook = tuple[Callable[..., object], HookType]
Hooks = Mapping[str, Hook]
"""Hooks. Keys are the dotted names of the functions of SGLang that they hook."""


def resolved(server_args: Any) -> Any:
    """Return an object with SGLang's server arguments as attributes, after SGLang has filled in its
    defaults."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def switched_on(names: Collection[str]) -> list[str]:
    """Return the given names of SGLang's environment variables that are switched on. A variable
    that SGLang's own list lacks is on if it is 1."""
    from sglang.srt.environ import envs

    known = {it: getattr(envs, it).get() for it in names if hasattr(envs, it)}
    return [it for it in names if known.get(it, os.environ.get(it) == "1")]


def step_tokens(server_args: Any) -> int:
    """Return the largest number of tokens that SGLang prefills in one scheduler step: the size of a
    chunk. If SGLang does not cut prompts (-1), the limit of a batch."""
    args = resolved(server_args)
    chunk = args.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens


def default_page_size(num_tokens: int, applies: Callable[[Any], bool]) -> None:
    """Set the page size of a server, unless a flag, model or backend sets one.

    Does nothing if `applies` is false for the arguments as SGLang has resolved them so far.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook(release.BEFORE_PAGE_SIZE)
    def choose(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        args = resolved(server_args)
        if args.page_size is None and applies(args):
            log.info("page_size is %d: no option sets it, and droidspeak needs that", num_tokens)
            declare_resolution(server_args, "droidspeak", page_size=num_tokens)


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str
    """Method by which SGLang runs the weights on this device."""
    kv: str
    """Format that the checkpoint states for KV. Empty if it states none."""


def quantization(server_args: Any) -> Quantization | None:
    """Return the quantisation that SGLang will use, before it reads any weight. None if the weights
    are not quantised."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config = model_config_of(server_args)
    if config.quantization is None:
        return None
    stated = config.hf_quant_config
    kv = stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme") or ""
    return Quantization(config.quantization, str(kv))


def place_hooks(hooks: Hooks) -> None:
    """Hook each target, a function of SGLang. Raises ConfigError if SGLang did not apply a hook:
    SGLang itself only logs this.

    SGLang silently skips a target that another plugin has already hooked. This function hooks such
    a target, too.
    """
    for target, (hook, kind) in hooks.items():
        if target in HookRegistry._patched:
            HookRegistry._apply_target(target, [(kind, hook, None)])
        else:
            HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    for target in hooks:
        if target not in HookRegistry._patched:
            raise ConfigError(f"SGLang did not apply the hook on {target}; see the log above")
