"""Hash the pages of a request's prompt, and choose its namespace in SGLang's radix tree: the end of
SGLang's `extra_key`.

SGLang's hash of a page covers the page's tokens, all tokens before them, the salt and the extra
key. SGLang appends the adapter's id to the extra key. So each adapter has its own tree and its own
hashes. The cache's hashes omit this id: they depend on tokens and tenant, never on the model.

KV that was made from another model's KV is in a namespace of its own. So a request that needs exact
KV finds only exact KV, even if SGLang inserts a chunk of its prompt and continues from the tree.

    extra key   tenant │ model's namespace                  exact KV of this model
                tenant │ APPROXIMATE │ model's namespace    KV made from another model's KV

SGLang joins the tenant, which is the user's key, and the namespace without a separator. So a key
could end like an adapter's namespace. A request of the base model with this key gets another
tenant, which users cannot name.

Each change of the plans in service begins a new generation (one version of the plans). Its number
follows APPROXIMATE, so that new requests read no older approximate KV. The length of the prompt's
head comes next. The head is the first pages, if many prompts share them; it stays exact.

An update begins a new generation (one version of the weights). The model's namespace then ends with
a mark of this generation, until SGLang flushes its tree. So requests find no KV of former weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import torch

from cachetree import PAGE_HASH_BYTES, PageHash
from sglang_droidspeak.engine.asking import SECRET
from sglang_droidspeak.engine.names import (
    MatchPrefixParams,
    NodeId,
    RadixKey,
    Req,
    UnifiedRadixCache,
    get_storage_hash_str,
)

_AT: Final = re.compile("@[0-9]+$")
_TENANT: Final = "droidspeak_tenant"
_INVOKED_AT: Final = "droidspeak_invoked_at"
_APPROXIMATE: Final = "droidspeak_approximate"
_GENERATION: Final = "droidspeak_generation"
_HEAD: Final = "droidspeak_head"
_WITHOUT_E: Final = "droidspeak_without_e"
_NUM_APPROXIMATE: Final = "droidspeak_num_approximate"
_WEIGHTS: Final = "droidspeak_weights"
_NOT_INVOKED: Final = "droidspeak_not_invoked"
_FIRST: Final = (0, "")
"""First version of the weights, before any update: its number (0), and the mark of its namespaces
(none)."""
_ID_CHARS: Final = 32
"""Number of characters of an adapter's id. SGLang makes ids as hexadecimal UUIDs."""
APPROXIMATE: Final = f"~droidspeak-approximate-{SECRET}~"
"""Start of the namespaces of approximate KV. It contains a secret, so that no user can name it in
an extra key. Otherwise, approximate KV that is read by such a key would count as exact."""


def page_hash(key: str) -> PageHash:
    """Shorten SGLang's hexadecimal page key to a page hash."""
    return PageHash(bytes.fromhex(key[: 2 * PAGE_HASH_BYTES]))


def refusal(req: Req) -> str:
    """Return why a request cannot share KV: its KV depends on more than the token ids and the
    model, for example on an image. Empty if the request can share KV."""
    if req.multimodal_inputs is not None:
        return "multimodal"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds"
    if req.session is not None:
        return "session"
    return ""


def own_pages_of(req: Req, num_tokens: int, page_size: int) -> list[PageHash]:
    """Return the hashes of the request's pages in its present namespace."""
    return pages_of(req, num_tokens, page_size, place_of(req))


def pages_of(req: Req, num_tokens: int, page_size: int, namespace: str = "") -> list[PageHash]:
    """Return the hashes of the whole pages among the request's first `num_tokens` tokens. Without a
    namespace they are the hashes of the cache, equal for all models."""
    length = num_tokens // page_size * page_size
    if not length:
        return []
    key = _key(req, namespace, length)
    return [page_hash(page) for page in get_storage_hash_str(key, page_size=page_size)]


def reusable_pages(req: Req, page_size: int) -> list[PageHash]:
    """Return the hashes of the pages that may be read from a cache. The last token, and all tokens
    from a requested log-probability on, have to be computed."""
    return pages_of(req, req._compute_max_prefix_len(len(req.full_untruncated_fill_ids)), page_size)


def num_held(req: Req, namespace: str, num_pages: int, tree: UnifiedRadixCache) -> int:
    """Return how many of the request's first pages the device holds in a namespace.

    The lookup does not count as a use, so SGLang evicts the same pages as without it. Any rank may
    call it at any time.
    """
    key = _key(req, namespace, num_pages * tree.page_size)
    num_tokens, _node, _num_pinned = tree.tree_core.match_full_device_prefix(key)
    return num_tokens // tree.page_size


def use(
    req: Req, namespace: str, num_pages: int, tree: UnifiedRadixCache
) -> tuple[NodeId, torch.Tensor]:
    """Look up pages that the device holds, and count this as a use. Return their last tree node,
    and their slots. A lock on this node keeps all of the pages. All ranks have to make the same
    calls in the same order."""
    key = _key(req, namespace, num_pages * tree.page_size)
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    return node, tree.path_device_indices(node)


def namespace_of(req: Req) -> str:
    """Return the namespace of the model that answers. It has the adapter's id, the token at which
    an activated adapter begins to act, and the mark of an update of weights."""
    at = invoked_at(req)
    name = (req.lora_id or "") if at is None else f"{req.lora_id}@{at}"
    return name + getattr(req, _WEIGHTS, _FIRST)[1]


def generation_of(req: Req) -> int:
    """Return the number of the version of the weights that `run_with` last set for the request."""
    return getattr(req, _WEIGHTS, _FIRST)[0]


def place_of_generation(generation: int) -> str:
    """Return the mark that ends namespaces of one version of the weights. Users cannot name it."""
    return f"@{SECRET}-{generation}"


def run_with(req: Req, generation: int, place: str) -> None:
    """Let the request read and insert only KV of version `generation` of the weights. `place` ends
    this version's namespaces. Call it while the request locks no node of SGLang's radix tree."""
    if getattr(req, _WEIGHTS, _FIRST) != (generation, place):
        _note(req, _WEIGHTS, (generation, place))


def is_approximate(req: Req) -> bool:
    """Whether SGLang looks for the request's prefix among approximate KV, and inserts KV there."""
    return getattr(req, _APPROXIMATE, False)


def move(req: Req, *, approximate: bool) -> None:
    """Choose whether SGLang looks for the request's prefix among approximate or among exact KV.
    Call it while the request holds nothing of SGLang's tree."""
    if is_approximate(req) != approximate:
        _note(req, _APPROXIMATE, approximate)


def place_of(req: Req) -> str:
    """Return the request's present namespace, which SGLang appends to the user's extra key."""
    return approximate_of(req) if is_approximate(req) else namespace_of(req)


def approximate_of(req: Req) -> str:
    """Return the namespace of approximate KV for this request. Two requests share it if they have
    the same version of the plans in service, and heads of the same length."""
    head = f"#{num_head(req)}" if num_head(req) else ""
    return APPROXIMATE + getattr(req, _GENERATION, "") + head + namespace_of(req)


def join(req: Req, generation: str) -> None:
    """Let the request share approximate KV only with requests of this version of the plans in
    service. Call it while the request holds nothing of SGLang's tree."""
    _note(req, _GENERATION, generation)


def has_head(req: Req) -> bool:
    """Whether the length of the request's head is decided. The length is decided only once."""
    return hasattr(req, _HEAD)


def num_head(req: Req) -> int:
    """Return the number of first pages that the request's own model has to compute."""
    return getattr(req, _HEAD, 0)


def lead(req: Req, num_pages: int) -> None:
    """Set the length of the request's head: its first `num_pages` pages have to be exact. Call it
    while the request holds nothing of SGLang's tree."""
    _note(req, _HEAD, num_pages)


def keep_apart(req: Req, adapters: Collection[str]) -> None:
    """Give a request of the base model another tenant if its extra key ends like the namespace of
    one of these adapters. Otherwise its KV would count as the adapter's. Call it while the request
    holds nothing of SGLang's tree."""
    tenant = tenant_of(req) or ""
    if req.lora_id is None and _AT.sub("", tenant)[-_ID_CHARS:] in adapters:
        _note(req, _TENANT, f"{tenant}~{SECRET}")


def invoked_at(req: Req) -> int | None:
    """Return the first token on which the request's activated LoRA acts. None if none acts."""
    return getattr(req, _INVOKED_AT, None)


def invoke(req: Req, at: int) -> None:
    """Let the request's adapter act from token `at` on. Call it before SGLang looks for the
    request's prefix."""
    _note(req, _INVOKED_AT, at)


def ask_base(req: Req) -> None:
    """Let the base model answer the request, without an adapter. Call it before SGLang looks for
    the request's prefix."""
    tenant, req.lora_id = tenant_of(req), None
    setattr(req, _NOT_INVOKED, True)
    _note(req, _TENANT, tenant)


def is_not_invoked(req: Req) -> bool:
    """Whether the base answers, because the prompt lacks the invocation of its activated LoRA."""
    return getattr(req, _NOT_INVOKED, False)


def num_without_e(req: Req) -> int:
    """Return the number of the request's first tokens that may have KV without E."""
    return getattr(req, _WITHOUT_E, 0)


def note_without_e(req: Req, num_tokens: int) -> None:
    """Note that the request has loaded KV without E, up to token `num_tokens`."""
    setattr(req, _WITHOUT_E, num_tokens)


def num_approximate(req: Req) -> int:
    """Return the number of prompt tokens with KV that was made from another model's KV."""
    return getattr(req, _NUM_APPROXIMATE, 0)


def note_approximate(req: Req, num_tokens: int) -> None:
    """Note the number of prompt tokens with approximate KV that the request reads or loads. Tokens
    that the request computes after them do not count."""
    setattr(req, _NUM_APPROXIMATE, num_tokens)


def _note(req: Req, name: str, value: object) -> None:
    setattr(req, _TENANT, tenant_of(req))
    setattr(req, name, value)
    req.extra_key = _extra_key(req, place_of(req))


def tenant_of(req: Req) -> str | None:
    """Return the extra key as the user gave it. An adapter's request gets None for an empty key."""
    if hasattr(req, _TENANT):
        return getattr(req, _TENANT)
    place = place_of(req)
    return req.extra_key.removesuffix(place) or None if place else req.extra_key


def _key(req: Req, namespace: str, num_tokens: int) -> RadixKey:
    """Return the key of the request's first tokens in SGLang's tree, in this namespace."""
    tokens = req.full_untruncated_fill_ids[:num_tokens]
    return RadixKey(tokens, _extra_key(req, namespace), cache_salt=req.cache_salt)


def _extra_key(req: Req, namespace: str) -> str | None:
    """Join the tenant's extra key and a namespace as SGLang does. An empty key and no key are two
    tenants."""
    tenant = tenant_of(req)
    return (tenant or "") + namespace if namespace else tenant
