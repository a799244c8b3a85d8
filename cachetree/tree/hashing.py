"""Page hashes: the keys of the tree, computed like SGLang's."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from cachetree.ids import PAGE_HASH_BYTES, PageHash

_TOKEN_BYTES = 4


def page_digests(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[bytes]:
    """Return one SHA-256 digest per whole page of `tokens`; an incomplete last page has none.

    A page's digest covers the previous page's digest (`seed` for the first page) and the page's
    token ids as 32-bit little-endian integers. So it also covers every earlier token. `seed` is the
    tenant's: 32 bytes, or empty without a tenant.
    """
    ids = _little_endian(tokens)
    page_bytes = page_size * _TOKEN_BYTES
    digests: list[bytes] = []
    digest = seed
    for start in range(0, len(ids) - page_bytes + 1, page_bytes):
        digest = hashlib.sha256(digest + ids[start : start + page_bytes]).digest()
        digests.append(digest)
    return digests


def _little_endian(tokens: Sequence[int]) -> bytes:
    """Encode all token ids as 32-bit integers. Raises OverflowError if an id is larger, or
    negative."""
    if not isinstance(tokens, array) or tokens.typecode != "q":
        return np.array(array("I", tokens), "<u4").tobytes()
    # SGLang keeps tokens as int64. Converting the array directly makes no Python integers.
    ids = np.frombuffer(tokens, np.int64)
    if (ids >> 32).any():
        raise OverflowError("a token id is negative or has more than 32 bits")
    return ids.astype("<u4").tobytes()


def page_hashes(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[PageHash]:
    """Return the keys of the whole pages of `tokens`. A key is the start of a page's digest."""
    return [PageHash(it[:PAGE_HASH_BYTES]) for it in page_digests(tokens, page_size, seed)]


def join_hashes(pages: Sequence[PageHash]) -> bytes:
    """Join the hashes of pages. Raises ValueError for a hash of the wrong size."""
    hashes = b"".join(pages)
    if len(hashes) != len(pages) * PAGE_HASH_BYTES:
        raise ValueError(f"a page hash has {PAGE_HASH_BYTES} bytes")
    return hashes


def split_hashes(hashes: bytes) -> tuple[PageHash, ...]:
    """Split joined page hashes. Raises ValueError if the last one is incomplete."""
    size = PAGE_HASH_BYTES
    if len(hashes) % size:
        raise ValueError(f"{len(hashes)} bytes are not a whole number of page hashes")
    # One cast: a call of `PageHash` for each page would take longer than all the rest.
    pages = [hashes[at : at + size] for at in range(0, len(hashes), size)]
    return tuple(cast("list[PageHash]", pages))
