"""What SGLang is to this package: the only place that names it.

    v0_5_23    what of that release is hooked and read; its JSON file has hashes of what is used
    probe      refuses another SGLang, and tells from its source what moved in it
    names      its types and functions, in one list
    layers     its decoder layers: where E leaves them, and how a block of them is run
    replay     its batches: how prefix tokens are run once more, before a batch's own forward
    prefixes   its requests and its tree: pages, tenants, exact and approximate KV
    asking     its HTTP server: how an operator asks the scheduler; requests that no user has sent
    tracing    its trace of a request
    hashing, attention, hicache

The next release gets a module of its own, a copy of this release's with what moved.
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
"""By dotted name of a function of SGLang."""


def resolved(server_args: Any) -> Any:
    """The arguments as SGLang resolved them, by attribute."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def switched_on(names: Collection[str]) -> list[str]:
    """Which of these of its environment variables are; its list lacks some, which it compares with
    1 itself."""
    from sglang.srt.environ import envs

    known = {it: getattr(envs, it).get() for it in names if hasattr(envs, it)}
    return [it for it in names if known.get(it, os.environ.get(it) == "1")]


def step_tokens(server_args: Any) -> int:
    """Of the largest prefill in one step; SGLang says -1 where it does not cut prefills."""
    args = resolved(server_args)
    chunk = args.chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens


def default_page_size(num_tokens: int, applies: Callable[[Any], bool]) -> None:
    """Make this the page size of servers to which it applies, if no flag, model or backend has set
    one. `applies` takes the arguments as SGLang has resolved them so far."""
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
    """Of a checkpoint."""

    method: str
    """As what SGLang runs its weights here."""
    kv: str
    """How its KV is to be kept; empty where nothing is said of that."""


def quantization(server_args: Any) -> Quantization | None:
    """What SGLang makes of the checkpoint and the arguments, before it reads any weight."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    config = model_config_of(server_args)
    if config.quantization is None:
        return None
    stated = config.hf_quant_config
    kv = stated.get("kv_cache_quant_algo") or stated.get("kv_cache_scheme") or ""
    return Quantization(config.quantization, str(kv))


def place_hooks(hooks: Hooks) -> None:
    """Hook each target now; ConfigError where SGLang did not take one, which it only logs.

    What another plugin has hooked already SGLang would pass over in silence: it is hooked again.
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
