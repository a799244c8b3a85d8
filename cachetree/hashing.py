"""Page hashes: the keys of the tree, computed as SGLang computes them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from cachetree.ids import PAGE_HASH_BYTES, PageHash


def page_hashes(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[PageHash]:
    """One hash per whole page of `tokens`; a last page that is not full has none.

    Each is the start of SHA-256 over the previous page's whole digest (`seed` before the first)
    and the page's token ids as 32-bit little-endian integers, so it covers every token before it.
    `seed` is the tenant's: 32 bytes, or empty where there is none.
    """
    hashes: list[PageHash] = []
    digest = seed
    for start in range(0, len(tokens) - page_size + 1, page_size):
        ids = array("I", tokens[start : start + page_size])
        digest = hashlib.sha256(digest + ids.tobytes()).digest()
        hashes.append(PageHash(digest[:PAGE_HASH_BYTES]))
    return hashes
