"""Page hashes: the keys of the tree, computed as SGLang computes them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from cachetree.ids import PAGE_HASH_BYTES, PageHash


def page_digests(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[bytes]:
    """One SHA-256 digest per whole page of `tokens`; a last page that is not full has none.

    Each covers the previous page's digest (`seed` before the first) and the page's token ids as
    32-bit little-endian integers, so it covers every token before it. `seed` is the tenant's: 32
    bytes, or empty where there is none.
    """
    digests: list[bytes] = []
    digest = seed
    for start in range(0, len(tokens) - page_size + 1, page_size):
        ids = array("I", tokens[start : start + page_size])
        digest = hashlib.sha256(digest + ids.tobytes()).digest()
        digests.append(digest)
    return digests


def page_hashes(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[PageHash]:
    """The keys of the whole pages of `tokens`: the start of each page's digest."""
    return [PageHash(it[:PAGE_HASH_BYTES]) for it in page_digests(tokens, page_size, seed)]
