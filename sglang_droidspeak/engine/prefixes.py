"""A request's prompt as page hashes: SGLang's own chain over tokens, salt and extra key.

SGLang appends the adapter's id to the extra key, which gives each adapter a tree and hashes of its
own. The cache's hashes leave it out: they say which tokens of which tenant, never which model. KV
that descends from another model's lies in a namespace of its own, so that whoever wants exact KV
finds no other, also when SGLang inserts a chunk and goes on with what the tree has of it:

    extra key   tenant │ model's namespace                  exact KV of this model
                tenant │ APPROXIMATE │ model's namespace    what was made with another's

SGLang joins the two without a mark between. A key of the base model's that ends like a namespace
of an adapter is therefore made another tenant's, which no user can name.

After a change of plans a new generation of requests reads none of the approximate KV from before:
its number stands after APPROXIMATE. After it stands how many first pages the prompt shares with
many others: in that namespace these are exact.

After an update of weights the model's namespace ends with a mark of that update, until SGLang
flushes its tree: what the weights before have left is then out of reach.
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
"""Generation of weights, and the end of its namespaces, of a request that was met before any
update."""
_ID_CHARS: Final = 32
"""Of an adapter's id, SGLang's hexadecimal UUID."""
APPROXIMATE: Final = f"~droidspeak-approximate-{SECRET}~"
"""A user can give any extra key, but none that names this: what is read there would count as
exact."""


def page_hash(key: str) -> PageHash:
    """SGLang's hexadecimal page key, shortened."""
    return PageHash(bytes.fromhex(key[: 2 * PAGE_HASH_BYTES]))


def refusal(req: Req) -> str:
    """Why this request's KV is not a function of its token ids and the model; empty if it is."""
    if req.multimodal_inputs is not None:
        return "multimodal"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds"
    if req.session is not None:
        return "session"
    return ""


def own_pages_of(req: Req, num_tokens: int, page_size: int) -> list[PageHash]:
    """As SGLang names them where it looks for the request's prefix."""
    return pages_of(req, num_tokens, page_size, place_of(req))


def pages_of(req: Req, num_tokens: int, page_size: int, namespace: str = "") -> list[PageHash]:
    """Hashes of the whole pages among the request's first `num_tokens` tokens, for any model."""
    length = num_tokens // page_size * page_size
    if not length:
        return []
    key = _key(req, namespace, length)
    return [page_hash(page) for page in get_storage_hash_str(key, page_size=page_size)]


def reusable_pages(req: Req, page_size: int) -> list[PageHash]:
    """Pages that may come from a cache: never the last token, nothing after a wanted logprob."""
    return pages_of(req, req._compute_max_prefix_len(len(req.full_untruncated_fill_ids)), page_size)


def num_held(req: Req, namespace: str, num_pages: int, tree: UnifiedRadixCache) -> int:
    """How many of the first pages, of the same tokens and tenant, the device holds in a namespace.

    SGLang evicts by uses, and this is none: each rank may ask when it likes.
    """
    key = _key(req, namespace, num_pages * tree.page_size)
    num_tokens, _node, _num_pinned = tree.tree_core.match_full_device_prefix(key)
    return num_tokens // tree.page_size


def use(
    req: Req, namespace: str, num_pages: int, tree: UnifiedRadixCache
) -> tuple[NodeId, torch.Tensor]:
    """Of pages that are held the last node of SGLang's tree, which keeps all of them, and the
    slots. All ranks have to make the same uses, in the same order."""
    key = _key(req, namespace, num_pages * tree.page_size)
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    return node, tree.path_device_indices(node)


def namespace_of(req: Req) -> str:
    """Of the model that answers: the adapter's id, and where an activated one begins to act,
    because what it has computed from there on is no other request's."""
    at = invoked_at(req)
    name = (req.lora_id or "") if at is None else f"{req.lora_id}@{at}"
    return name + getattr(req, _WEIGHTS, _FIRST)[1]


def generation_of(req: Req) -> int:
    """The generation of weights in which the request was last met; see `Models`."""
    return getattr(req, _WEIGHTS, _FIRST)[0]


def place_of_generation(generation: int) -> str:
    """The end of its namespaces, which no user can name."""
    return f"@{SECRET}-{generation}"


def run_with(req: Req, generation: int, place: str) -> None:
    """Have the request find and leave KV of this generation of weights only; while the request
    holds nothing of SGLang's tree."""
    if getattr(req, _WEIGHTS, _FIRST) != (generation, place):
        _note(req, _WEIGHTS, (generation, place))


def is_approximate(req: Req) -> bool:
    """Whether SGLang looks for the request's prefix among approximate KV, and inserts it there."""
    return getattr(req, _APPROXIMATE, False)


def move(req: Req, *, approximate: bool) -> None:
    """Have SGLang look there from now on; while the request holds nothing of its tree."""
    if is_approximate(req) != approximate:
        _note(req, _APPROXIMATE, approximate)


def place_of(req: Req) -> str:
    """What stands behind the user's extra key now."""
    return approximate_of(req) if is_approximate(req) else namespace_of(req)


def approximate_of(req: Req) -> str:
    """Where approximate KV lies for requests of its generation, with a head as long."""
    head = f"#{num_head(req)}" if num_head(req) else ""
    return APPROXIMATE + getattr(req, _GENERATION, "") + head + namespace_of(req)


def join(req: Req, generation: str) -> None:
    """Have the request share approximate KV with those of its generation only; while the request
    holds nothing of SGLang's tree."""
    _note(req, _GENERATION, generation)


def has_head(req: Req) -> bool:
    """Whether it was decided how long the request's head is, which then stays."""
    return hasattr(req, _HEAD)


def num_head(req: Req) -> int:
    """First pages of its prompt that its own model computes, whoever has them."""
    return getattr(req, _HEAD, 0)


def lead(req: Req, num_pages: int) -> None:
    """Have the request read approximate KV behind so many exact pages only; while it holds nothing
    of SGLang's tree."""
    _note(req, _HEAD, num_pages)


def keep_apart(req: Req, adapters: Collection[str]) -> None:
    """Have a request of the base model's read and leave nothing where one of these adapters' KV
    lies, whatever extra key its user gave; while it holds nothing of SGLang's tree."""
    tenant = tenant_of(req) or ""
    if req.lora_id is None and _AT.sub("", tenant)[-_ID_CHARS:] in adapters:
        _note(req, _TENANT, f"{tenant}~{SECRET}")


def invoked_at(req: Req) -> int | None:
    """The token from which the request's activated LoRA acts; None for any other."""
    return getattr(req, _INVOKED_AT, None)


def invoke(req: Req, at: int) -> None:
    """Have the request's adapter act from token `at` on; before SGLang looks for its prefix."""
    _note(req, _INVOKED_AT, at)


def ask_base(req: Req) -> None:
    """Have no adapter act on any of the request; before SGLang looks for its prefix."""
    tenant, req.lora_id = tenant_of(req), None
    setattr(req, _NOT_INVOKED, True)
    _note(req, _TENANT, tenant)


def is_not_invoked(req: Req) -> bool:
    """Whether the base answers because the prompt never invokes the activated LoRA it names."""
    return getattr(req, _NOT_INVOKED, False)


def num_without_e(req: Req) -> int:
    """How many of its first tokens may have been loaded without E."""
    return getattr(req, _WITHOUT_E, 0)


def note_without_e(req: Req, num_tokens: int) -> None:
    """So many of its first tokens are there, and those that were loaded have no E."""
    setattr(req, _WITHOUT_E, num_tokens)


def num_approximate(req: Req) -> int:
    """How many tokens of the prompt have KV that was made from another model's."""
    return getattr(req, _NUM_APPROXIMATE, 0)


def note_approximate(req: Req, num_tokens: int) -> None:
    """So many are read or loaded; what the request computes after them is not counted."""
    setattr(req, _NUM_APPROXIMATE, num_tokens)


def _note(req: Req, name: str, value: object) -> None:
    setattr(req, _TENANT, tenant_of(req))
    setattr(req, name, value)
    req.extra_key = _extra_key(req, place_of(req))


def tenant_of(req: Req) -> str | None:
    """The extra key as the user gave it; of an adapter's request None for an empty one."""
    if hasattr(req, _TENANT):
        return getattr(req, _TENANT)
    place = place_of(req)
    return req.extra_key.removesuffix(place) or None if place else req.extra_key


def _key(req: Req, namespace: str, num_tokens: int) -> RadixKey:
    """SGLang's key of the request's first tokens, in its tenant's namespace and this one."""
    tokens = req.full_untruncated_fill_ids[:num_tokens]
    return RadixKey(tokens, _extra_key(req, namespace), cache_salt=req.cache_salt)


def _extra_key(req: Req, namespace: str) -> str | None:
    """As SGLang makes one: an empty key is another tenant's than none."""
    tenant = tenant_of(req)
    return (tenant or "") + namespace if namespace else tenant
