"""Random lives of adapters and prompts: what is found is always that model's, tenant's and tokens'.

SGLang's side is played by a plain dictionary, the oracle, that says of every KV slot which weights
computed it, for which tenant and which page. Adapters come and go, come back with other weights
under the same name, SGLang evicts behind our back, approximate pages mix with exact ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_parts import PAGE, family_of

from cachetree.checkpoint.adapters import Adapter
from cachetree.clock import Deadline
from cachetree.ids import EMPTY_SPAN, LOCAL, Kind, ModelId, PageHash, Span, Step, is_pool
from cachetree.memory import scatter
from cachetree.planning.plan import Plan
from cachetree.tree.hashing import page_hashes
from cachetree.tree.tree import CacheTree
from profiles.random_models import shape, write_models
from sglang_droidspeak.adapters import models as models_module
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.store import pool as pool_module
from sglang_droidspeak.store.pool import PoolIndex, pool_of

NUM_PAGES = 96
"""Of the pool: small, so that slots are used again and again."""
NUM_LAYERS = 4
NAMES = ("a", "b", "c")
TENANTS = ("", "one", "two")


@dataclass(frozen=True)
class Content:
    """What a page of slots holds."""

    weights: str
    page: PageHash


@dataclass(frozen=True)
class Prompt:
    """As a request; `tokens` are page-wise choices."""

    tenant: str
    choices: tuple[int, ...]

    @property
    def pages(self) -> list[PageHash]:
        tokens = [choice for choice in self.choices for _ in range(PAGE)]
        return page_hashes(tokens, PAGE, self.tenant.encode().ljust(32, b"\0"))


class Engine:
    """SGLang's trees and pool as they are, with nothing to tell anybody of what it evicts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.contents: dict[int, Content] = {}
        self.trees: dict[tuple[str | None, PageHash], int] = {}
        """The page of slots of a page, in an adapter's tree."""
        self.children: dict[tuple[str | None, PageHash], set[PageHash]] = {}

    def held(self, lora_id: str | None, pages: Sequence[PageHash]) -> list[int]:
        slots = []
        for page in pages:
            if (lora_id, page) not in self.trees:
                break
            slots.append(self.trees[lora_id, page])
        return slots

    def insert(self, lora_id: str | None, weights: str, pages: Sequence[PageHash]) -> list[int]:
        """Compute what is missing; returns the pages of slots that are new."""
        new = []
        for index, page in enumerate(pages):
            if (lora_id, page) in self.trees:
                continue
            free = set(range(NUM_PAGES)) - set(self.trees.values())
            while not free:
                self.evict_one(keep={(lora_id, it) for it in pages})
                free = set(range(NUM_PAGES)) - set(self.trees.values())
            slot = self._rng.choice(sorted(free))
            self.trees[lora_id, page] = slot
            if index:
                self.children.setdefault((lora_id, pages[index - 1]), set()).add(page)
            self.contents[slot] = Content(weights, page)
            new.append(slot)
        return new

    def evict_one(self, keep: set[tuple[str | None, PageHash]] = frozenset()) -> None:
        leaves = [it for it in self.trees if it not in keep and not self.children.get(it)]
        if leaves:
            gone = self._rng.choice(leaves)
            del self.trees[gone]
            for owner, below in self.children.items():
                if owner[0] == gone[0]:
                    below.discard(gone[1])

    def flush(self) -> None:
        self.trees.clear()
        self.children.clear()


class Walk:
    """One engine, its models, and the index that is to be right about both."""

    def __init__(self, family, monkeypatch, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(self.rng)
        self.tree = CacheTree(family, host_bytes=40 * family.num_layers * family.kv_page_bytes)
        e_pool = type("NoE", (), {"layers": ()})()
        self.index = PoolIndex(self.tree, e_pool, PAGE, NUM_PAGES * PAGE)
        self.models = Models(ModelId("base"), NUM_LAYERS, lambda folder: ModelId(folder.name))
        self.loaded: dict[str, tuple[str, str]] = {}
        """By name: SGLang's id of this loading, and the weights."""
        self.num_loads = self.num_hits = self.num_local_hits = 0
        monkeypatch.setattr(pool_module.prefixes, "slots_of", self._slots_of)
        monkeypatch.setattr(
            models_module,
            "read_adapter",
            lambda folder, layers: Adapter(
                num_layers=layers, applied="", layers={int(folder.name[-1]): folder.name}
            ),
        )

    def _slots_of(self, req, namespace, num_pages, _tree):
        held = self.engine.held(namespace or None, req.pages[:num_pages])
        slots = [page * PAGE + i for page in held for i in range(PAGE)]
        return 0, torch.tensor(slots, dtype=torch.int64)

    def step(self) -> None:
        operations = [self.request] * 12 + [self.evict] * 6 + [self.reload] * 2
        operations += [self.unload, self.flush] if self.rng.random() < 0.05 else []
        self.rng.choice(operations)()

    def evict(self) -> None:
        self.engine.evict_one()

    def flush(self) -> None:
        self.engine.flush()
        self.index.clear()

    def unload(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.loaded:
            lora_id, _ = self.loaded.pop(name)
            self.models.drop(lora_id)
            self.index.forget(lora_id)

    def reload(self) -> None:
        """The same name, an id of its own, and perhaps the weights that it or another had once."""
        self.unload()
        name = self.rng.choice(NAMES)
        if name not in self.loaded:
            self.num_loads += 1
            weights = f"w{self.rng.randrange(4)}-{self.rng.randrange(NUM_LAYERS)}"
            self.loaded[name] = (f"id{self.num_loads}", weights)
            self.models.add(f"id{self.num_loads}", Path(weights))

    def request(self) -> None:
        lora_id, weights = self.rng.choice([(None, "base"), *self.loaded.values()])
        length = self.rng.randrange(2, 7)
        prompt = Prompt(
            self.rng.choice(TENANTS), tuple(self.rng.randrange(2) for _ in range(length))
        )
        pages = prompt.pages
        if self.rng.random() < 0.7:
            self.look(lora_id, weights, prompt)
        self.engine.insert(lora_id, weights, pages)
        self.index.note(lora_id or "", self.models.of(lora_id), pages)
        self.store(weights, pages)

    def store(self, weights: str, pages: Sequence[PageHash]) -> None:
        reservation = self.tree.reserve(ModelId(weights), None, pages, ())
        if reservation is not None:
            with reservation:
                for layer in range(NUM_LAYERS) if reservation.pages else ():
                    page_bytes = self.tree.family.kv_page_bytes
                    tags = [f"{weights:>8}".encode() + page for page in reservation.pages]
                    kv = b"".join(tag.ljust(page_bytes, b"\0") for tag in tags)
                    scatter(reservation.kv(layer), memoryview(kv))
                reservation.commit()

    def look(self, lora_id: str | None, weights: str, prompt: Prompt) -> None:
        """Everything that is found for a request is what it says it is."""
        pages = prompt.pages
        for match in self.tree.match(pages):
            assert match.location == LOCAL or is_pool(match.location)
            plan = Plan(
                sender=match.model,
                receiver=self.models.of(lora_id),
                location=match.location,
                pages=Span(0, match.num_pages),
                block=EMPTY_SPAN,
                num_layers=NUM_LAYERS,
            )
            if match.location == LOCAL:
                self._check_local(match.model, pages[: match.num_pages])
                continue
            living = {pool_of(it) for it, _ in self.loaded.values()} | {pool_of("")}
            assert match.location in living
            found = self.index.find(plan, pages, prompt, None)
            if found is not None:
                _, slots = found
                for at, page in enumerate(pages[: match.num_pages]):
                    (slot_page,) = set((slots[at * PAGE : (at + 1) * PAGE] // PAGE).tolist())
                    assert self.engine.contents[slot_page] == Content(match.model, page)
                self.num_hits += 1

    def _check_local(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        lease = self.tree.lease(model, pages, "a test", Deadline.after(10))
        with lease:
            raw = b"".join(bytes(view) for view in lease.views(Step(Kind.KV, 1)))
        size = self.tree.family.kv_page_bytes
        for at, page in enumerate(pages):
            assert raw[at * size :].startswith(f"{model:>8}".encode() + page)
        self.num_local_hits += 1


@pytest.mark.parametrize("num_operations", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_hit_is_of_the_wrong_adapter(num_operations: int, tmp_path: Path, monkeypatch) -> None:
    config = shape("llama", layers=NUM_LAYERS, hidden=16, heads=2, kv_heads=1)
    (model,) = write_models(tmp_path, config, ["m"])
    walk = Walk(family_of(model), monkeypatch, seed=num_operations)
    for _ in range(num_operations):
        walk.step()
    assert walk.num_loads > num_operations // 200
    assert walk.num_hits > num_operations // 10
    assert walk.num_local_hits > num_operations // 10
