"""SGLang's own radix tree without a server, and what it is asked with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine_parts import PAGE
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from cachetree.ids import ModelId


@dataclass(frozen=True)
class Named:
    """A base that is a name. An adapter of it is what the adapter is called."""

    model_id: ModelId

    def with_adapter(self, digest: str) -> Named:
        return Named(ModelId(digest))


def sglang_tree(core: str, **options: Any) -> UnifiedRadixCache:
    """Over slots that nobody has."""
    slots: Any = SimpleNamespace(
        page_size=PAGE, device="cpu", free_segment=lambda _slots, *, start_pos: None
    )
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=slots,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
            **options,
        )
    )


def request_of(tokens: Sequence[int], lora_id: str | None = None) -> Any:
    """With all that is asked of SGLang's requests when they are inserted."""
    return SimpleNamespace(
        lora_id=lora_id,
        extra_key=lora_id,
        cache_salt=None,
        full_untruncated_fill_ids=array("q", tokens),
        multimodal_inputs=None,
        input_embeds=None,
        positional_embed_overrides=None,
        session=None,
    )
