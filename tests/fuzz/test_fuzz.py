"""All inputs of the corpus once more, and some seeded mutations of them. `make soak` runs ten
million."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import pytest
from fuzz_corpus import CORPUS, read_corpus
from fuzz_mutations import mutations
from fuzz_targets import TARGETS

SEED = 20
NUM_MUTATIONS = 10_000
"""Number of mutations of all targets together."""
MAX_GROWTH_KIB = 128 << 10
MAX_SECONDS = 2.0
"""Largest number of seconds of processor time for one input."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_expected_errors(name):
    corpus = read_corpus().of(name)
    target = TARGETS[name]
    num = max(50, round(NUM_MUTATIONS * target.share))
    # From here on: what other tests once took hides nothing.
    Path("/proc/self/clear_refs").write_text("5")
    before_kib = most_kib()
    for data in itertools.chain(corpus, itertools.islice(mutations(corpus, SEED), num)):
        begun_at_s = time.process_time()
        try:
            target(data)
        except Exception as exc:
            raise AssertionError(f"{name} of {data[:2000]!r}") from exc
        assert time.process_time() - begun_at_s < MAX_SECONDS, data
    assert most_kib() - before_kib < MAX_GROWTH_KIB


def most_kib() -> int:
    """Return the most memory that this process has had since the mark was last cleared."""
    matched = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert matched is not None
    return int(matched[1])


def test_memory_that_is_given_back_is_seen_and_what_came_before_is_not():
    """A target may give its memory back before it returns. The fuzzer has to see the peak."""
    before_kib = most_kib()
    bytearray(2 * MAX_GROWTH_KIB << 10)
    assert most_kib() - before_kib > MAX_GROWTH_KIB
    Path("/proc/self/clear_refs").write_text("5")
    assert most_kib() - before_kib < MAX_GROWTH_KIB


@pytest.mark.parametrize("name", TARGETS)
def test_a_sound_input_is_read(name):
    """If valid inputs were refused, the mutations would be changes to noise."""
    target = TARGETS[name]
    for data in read_corpus().sound[name]:
        try:
            target.run(data)
        except target.expected:
            continue
        return
    pytest.fail("no input of the corpus is taken")


def test_the_corpus_is_small():
    assert CORPUS.stat().st_size < 200_000
    assert read_corpus().sound.keys() == TARGETS.keys()
