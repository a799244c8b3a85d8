"""Random operations on the disk store, compared with an oracle: the stored pages, and the number of
bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_parts import A, B, files_bytes, num_right, open_store, path_of, random_texts, write

from cachetree.disk import DiskStore
from cachetree.ids import KV, ModelId, PageHash, Part

# Everything at once, against an oracle.


class Oracle:
    """Pages that the store may have. For each model, these are the pages that were written and not
    removed since."""

    def __init__(self) -> None:
        self.pages: dict[ModelId, set[PageHash]] = {A: set(), B: set()}

    def most(self, model: ModelId, text: str) -> int:
        pages = path_of(text)
        present = self.pages[model]
        return next((i for i, page in enumerate(pages) if page not in present), len(pages))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_bytes", [1 << 20, 16 << 10], ids=["roomy", "evicting"])
def test_random_operations_agree_with_an_oracle_and_keep_the_budget(
    tmp_path, monkeypatch, seed, num_bytes
):
    rename = Path.rename
    num_writes = 0

    def rename_within_budget(path: Path, to: Path) -> Path:
        nonlocal num_writes
        num_writes += 1
        assert files_bytes(tmp_path) <= num_bytes
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename_within_budget)
    rng = random.Random(f"{seed} {num_bytes}")
    draw = random_texts(rng.randrange(1 << 30))
    oracle = Oracle()
    texts = [(A, "a")]
    store = open_store(tmp_path, num_bytes=num_bytes)
    is_evicting = num_bytes < 1 << 20
    for _ in range(400):
        action = rng.random()
        model, text = rng.choice(texts[-40:])
        if action < 0.5:
            model, text, start, e_layers = draw()
            texts.append((model, text))
            is_new = e_layers or oracle.most(model, text) < len(text)
            old_bytes = files_bytes(tmp_path)
            assert write(store, model, text, start, e_layers) or is_evicting
            assert is_new or is_evicting or files_bytes(tmp_path) == old_bytes, "written twice"
            oracle.pages[model].update(path_of(text))
            for part in map(Part, e_layers):
                assert num_right(store, model, text, part) == len(text) or is_evicting
        elif action < 0.6:
            pages = path_of(text)[: 1 + rng.randrange(len(text))]
            gone = evicted_with(store, model, pages)
            assert bool(store.evict(model, pages)) == bool(gone)
            oracle.pages[model] -= gone
        elif action < 0.65:
            store.close()
            before = store.status()
            store = open_store(tmp_path, num_bytes=num_bytes)
            after = store.status()
            assert (after.num_entries, after.num_pages) == (before.num_entries, before.num_pages)
        else:
            most = oracle.most(model, text)
            num = num_right(store, model, text)
            assert num <= most if is_evicting else num == most
            assert all(num_right(store, model, text, Part(it)) <= num for it in range(3))
        status = store.status()
        assert status.num_bytes == files_bytes(tmp_path) <= num_bytes
    assert store.status().counts.num_damaged_entries == 0
    assert num_writes > 100
    store.close()


def evicted_with(store: DiskStore, model: ModelId, pages: Sequence[PageHash]) -> set[PageHash]:
    """Pages that leave with the last of `pages`: all that follow it, and the entries up to it that
    no other entry follows."""
    records = reversed(store.files.coldest_first())
    files = [it.record for it in records if (it.record.model, it.record.part) == (model, KV)]
    last = next((it for it in files if pages[-1] in it.pages), None)  # Parents come first.
    if last is None:
        return set()
    ends = set(last.pages).difference(pages[:-1])
    gone: set[PageHash] = set()
    for file in files:
        if file.parent in ends | gone:
            gone.update(file.pages)
    for file in reversed(files):
        stand_on_it = [it for it in files if it.parent in file.pages]
        is_above = file.pages[-1] in pages or file is last
        if is_above and all(it.pages[0] in gone for it in stand_on_it):
            gone.update(file.pages)
    return gone
