"""Compute SGLang's page hashes in Python if its compiled extension is missing."""

from __future__ import annotations

import logging
from array import array
from typing import Any

from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

from cachetree.tree import page_digests
from sglang_droidspeak.engine import HookType, place_hooks, release

log = logging.getLogger(__name__)


def ensure_page_hashes() -> None:
    """Compile SGLang's hash extension now, so that the first request need not wait. If that fails,
    replace the extension by Python code with the same hashes.

    The extension needs a C++ compiler and OpenSSL's headers, which a serving machine may lack.
    """
    try:
        get_native_hash(array("q", range(16)), None, 16)
    except RuntimeError as exc:
        log.warning(
            "page hashes cannot be compiled (%s) and are computed in Python", exc.__cause__ or exc
        )
        place_hooks({release.NATIVE_HASH: (hash_in_python, HookType.REPLACE)})


def hash_in_python(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Compute the same hashes as SGLang's `get_native_hash`, except for bigram keys. An incomplete
    last page gets a hash, too."""
    tokens = token_ids.raw_token_ids() if hasattr(token_ids, "raw_token_ids") else token_ids
    tokens = tokens[: len(token_ids)]
    page = page_size or max(1, len(tokens))
    digests = page_digests(tokens, page, prior_digest or b"")
    if rest := tokens[len(digests) * page :]:
        digests += page_digests(rest, len(rest), digests[-1] if digests else prior_digest or b"")
    hashes = [digest.hex() for digest in digests]
    return hashes if page_size else hashes[0]
