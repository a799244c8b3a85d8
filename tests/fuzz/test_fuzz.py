"""The corpus again, and some seeded mutations of it; `make soak` runs ten million."""

from __future__ import annotations

import itertools
import resource
import time

import pytest
from fuzz_corpus import CORPUS, read_corpus
from fuzz_mutations import mutations
from fuzz_targets import TARGETS

SEED = 20
NUM_MUTATIONS = 10_000
"""Of all targets together."""
MAX_GROWTH_KIB = 128 << 10
MAX_SECONDS = 2.0
"""For one input."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_expected_errors(name: str) -> None:
    corpus = read_corpus().of(name)
    target = TARGETS[name]
    num = max(50, round(NUM_MUTATIONS * target.share))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in itertools.chain(corpus, itertools.islice(mutations(corpus, SEED), num)):
        begun_at_s = time.monotonic()
        try:
            target(data)
        except Exception as exc:
            raise AssertionError(f"{name} of {data[:2000]!r}") from exc
        assert time.monotonic() - begun_at_s < MAX_SECONDS, data
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MAX_GROWTH_KIB


@pytest.mark.parametrize("name", TARGETS)
def test_a_sound_input_is_read(name: str) -> None:
    """Else the mutations would be of noise."""
    target = TARGETS[name]
    for data in read_corpus().sound[name]:
        try:
            target.run(data)
        except target.expected:
            continue
        return
    pytest.fail("no input of the corpus is taken")


def test_the_corpus_is_small() -> None:
    assert CORPUS.stat().st_size < 200_000
    assert read_corpus().sound.keys() == TARGETS.keys()
