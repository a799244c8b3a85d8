"""Page hashes: a chain, seeded by the tenant, equal to SGLang's."""

from __future__ import annotations

from array import array

import pytest

from cachetree.tree.hashing import page_hashes


def test_known_values():
    # Computed by SGLang 0.5.23's get_hash_str([1, 2, 3, 70000, 5, 6, 7, 8], None, page_size=4).
    assert [page.hex() for page in page_hashes([1, 2, 3, 70000, 5, 6, 7, 8], 4)] == [
        "120664a1420d0b19c5790fe3b42d8694",
        "afadfa918fa9230cf0a7f8b73ecba69b",
    ]


def test_only_whole_pages_have_a_hash():
    assert [len(page_hashes(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_all_tokens_before_it_and_the_tenant():
    base = page_hashes([1, 2, 3, 4, 5, 6], 2)
    changed = page_hashes([9, 2, 3, 4, 5, 6], 2)
    assert not set(base) & set(changed)
    assert page_hashes([1, 2, 3, 4, 5, 9], 2)[:2] == base[:2]
    assert not set(base) & set(page_hashes([1, 2, 3, 4, 5, 6], 2, seed=b"t" * 32))


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda ids: array("q", ids), lambda ids: array("I", ids)]
)
def test_tokens_may_come_in_any_sequence(kind):
    assert page_hashes(kind([1, 2, 70000, 2**32 - 1]), 2) == page_hashes(
        [1, 2, 70000, 2**32 - 1], 2
    )


@pytest.mark.parametrize("token", [-1, 2**32])
@pytest.mark.parametrize("kind", [list, lambda ids: array("q", ids)])
def test_a_token_that_does_not_fit_is_refused(kind, token):
    with pytest.raises(OverflowError):
        page_hashes(kind([1, token]), 2)
