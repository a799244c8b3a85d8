"""A request's prompt as page hashes: SGLang's own chain over tokens, salt and extra key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachetree.ids import PAGE_HASH_BYTES, PageHash
from sglang_droidspeak.compat.names import MatchPrefixParams, RadixKey, get_storage_hash_str

if TYPE_CHECKING:
    import torch

    from sglang_droidspeak.compat.names import Req, UnifiedRadixCache


def page_hash(key: str) -> PageHash:
    """SGLang's hexadecimal page key, shortened."""
    return PageHash(bytes.fromhex(key[: 2 * PAGE_HASH_BYTES]))


def refusal(req: Req) -> str:
    """Why this request's KV is not a function of its token ids and the model; empty if it is."""
    if req.lora_id is not None:
        return "lora"
    if req.multimodal_inputs is not None:
        return "multimodal"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds"
    if req.session is not None:
        return "session"
    return ""


def pages_of(req: Req, num_tokens: int, page_size: int) -> list[PageHash]:
    """Hashes of the whole pages among the request's first `num_tokens` tokens."""
    length = num_tokens // page_size * page_size
    if not length:
        return []
    key = _key(req, length)
    return [page_hash(page) for page in get_storage_hash_str(key, page_size=page_size)]


def reusable_pages(req: Req, page_size: int) -> list[PageHash]:
    """Pages that may come from a cache: never the last token, nothing after a wanted logprob."""
    req.refresh_fill_ids()
    return pages_of(req, req._compute_max_prefix_len(len(req.full_untruncated_fill_ids)), page_size)


def slots_on_device(req: Req, num_pages: int, tree: UnifiedRadixCache) -> torch.Tensor:
    """Slots of the request's first tokens that the device holds already, whole pages of them."""
    found = tree.match_prefix(MatchPrefixParams(key=_key(req, num_pages * tree.page_size)))
    length = found.device_prefix_len // tree.page_size * tree.page_size
    return tree.path_device_indices(found.last_device_node)[:length]


def _key(req: Req, num_tokens: int) -> RadixKey:
    """SGLang's key of the request's first tokens, in its tenant's namespace."""
    tokens = req.full_untruncated_fill_ids[:num_tokens]
    return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
