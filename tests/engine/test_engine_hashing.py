"""The stand-in for SGLang's compiled hashes gives the same keys."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_droidspeak.engine.hashing import hash_in_python


@pytest.mark.long
@pytest.mark.parametrize("prior", [None, bytes(range(32))])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_same_as_the_compiled_ones(prior, page_size):
    tokens = array("q", [(7919 * i) % 150_000 for i in range(200)])
    for key in (tokens, RadixKey(tokens, None), RadixKey(tokens, None, limit=130)):
        assert hash_in_python(key, prior, page_size) == get_native_hash(key, prior, page_size)
