"""Random histories of adapters and prompts. Any KV that is found belongs to the right model, tenant
and tokens.

A plain dictionary, the oracle, stands for SGLang. For every KV slot it has the weights that
computed it, its tenant and page, and whether it has E. Adapters are loaded and unloaded, also with
other weights under the same name. SGLang evicts without a notice. One request may compute pages
that another one loads at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from engine_parts import PAGE, family_of
from standins import Named

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
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.store import pool as pool_module
from sglang_droidspeak.store.pool import PoolIndex, pool_of

NUM_PAGES = 96
"""Number of pages of the pool: few, so that slots are used again and again."""
NUM_LAYERS = 4
E_LAYER = 1
MAX_RUNNING = 6
NAMES = ("a", "b", "c")
TENANTS = ("", "one", "two")


@dataclass(frozen=True)
class Content:
    """Content of a page of slots."""

    weights: str
    page: PageHash
    has_e: bool


@dataclass(frozen=True)
class Running:
    """A request between its admission and its insertion."""

    lora_id: str | None
    weights: str
    pages: Sequence[PageHash]
    num_read: int
    """Number of pages that the request reads in SGLang's tree. The tree keeps them meanwhile."""
    num_loaded: int
    """Number of first pages without E. Pages among them that were not read come out of a cache."""


@dataclass(frozen=True)
class Prompt:
    """Plan a request; `tokens` are page-wise choices."""

    tenant: str
    choices: tuple[int, ...]

    @property
    def pages(self) -> list[PageHash]:
        tokens = [choice for choice in self.choices for _ in range(PAGE)]
        return page_hashes(tokens, PAGE, self.tenant.encode().ljust(32, b"\0"))


class Engine:
    """SGLang's trees and pool. They report no eviction."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.contents: dict[int, Content] = {}
        self.trees: dict[tuple[str | None, PageHash], int] = {}
        """Page in the pool that has the slots, by adapter and page hash."""
        self.children: dict[tuple[str | None, PageHash], set[PageHash]] = {}
        self.running: list[Running] = []

    def held(self, lora_id: str | None, pages: Sequence[PageHash]) -> list[int]:
        slots = []
        for page in pages:
            if (lora_id, page) not in self.trees:
                break
            slots.append(self.trees[lora_id, page])
        return slots

    def insert(self, running: Running) -> None:
        """Insert missing pages. A page that the tree has keeps its slots, whatever the request
        made."""
        lora_id, pages = running.lora_id, running.pages
        for index, page in enumerate(pages):
            if (lora_id, page) in self.trees:
                continue
            free = set(range(NUM_PAGES)) - set(self.trees.values())
            while not free:
                self.evict_one(keep={(lora_id, page) for page in pages})
                free = set(range(NUM_PAGES)) - set(self.trees.values())
            slot = self._rng.choice(sorted(free))
            self.trees[lora_id, page] = slot
            if index:
                self.children.setdefault((lora_id, pages[index - 1]), set()).add(page)
            self.contents[slot] = Content(running.weights, page, has_e=index >= running.num_loaded)

    def evict_one(self, keep: set[tuple[str | None, PageHash]] = frozenset()) -> None:
        keep = keep | {
            (it.lora_id, page) for it in self.running for page in it.pages[: it.num_read]
        }
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
    """One engine with its models, and the index that has to be right about both."""

    def __init__(self, family, monkeypatch, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Engine(self.rng)
        self.tree = CacheTree(family, host_bytes=40 * family.num_layers * family.kv_page_bytes)
        self.index = PoolIndex(self.tree, (E_LAYER,), PAGE, NUM_PAGES * PAGE, Ranks(None))
        self.models = Models(
            Named(ModelId("base")), NUM_LAYERS, lambda folder: ModelId(folder.name)
        )
        self.loaded: dict[str, tuple[str, str]] = {}
        """SGLang's id of each loaded adapter, and its weights, by name."""
        self.plans: list[tuple[Plan, Prompt]] = []
        """Plans of requests that wait for their slots."""
        self.num_loads = self.num_hits = self.num_local_hits = self.num_with_e = 0
        for name, of in (("num_held", self._num_held), ("use", self._use)):
            monkeypatch.setattr(pool_module.prefixes, name, of)
        monkeypatch.setattr(models_module, "acting", lambda _folder: ("acts", []))
        monkeypatch.setattr(
            models_module,
            "read_adapter",
            lambda folder, layers: Adapter(applied="", layers={int(folder.name[-1]): folder.name}),
        )

    def _num_held(self, req, namespace, num_pages, _tree):
        return len(self.engine.held(namespace or None, req.pages[:num_pages]))

    def _use(self, req, namespace, num_pages, _tree):
        held = self.engine.held(namespace or None, req.pages[:num_pages])
        slots = [page * PAGE + i for page in held for i in range(PAGE)]
        return 0, torch.tensor(slots, dtype=torch.int64)

    def step(self) -> None:
        operations = [self.request] * 12 + [self.finish] * 12 + [self.evict] * 6
        operations += [self.admit] * 6 + [self.reload] * 2
        operations += [self.unload, self.flush] if self.rng.random() < 0.05 else []
        self.rng.choice(operations)()

    def evict(self) -> None:
        self.engine.evict_one()

    def flush(self) -> None:
        self.finish_all()
        self.engine.flush()
        self.index.clear()

    def unload(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.loaded:
            self.finish_all()
            lora_id, _ = self.loaded.pop(name)
            self.models.drop(lora_id)
            self.index.forget(lora_id)

    def reload(self) -> None:
        """Load an adapter again under the same name, with a new id. Its weights may be weights that
        an adapter had before."""
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
        num_read = len(self.engine.held(lora_id, pages))
        num_loaded = self.rng.choice([0, self.rng.randint(num_read, length)])
        self.engine.running.append(Running(lora_id, weights, pages, num_read, num_loaded))
        if len(self.engine.running) > MAX_RUNNING:
            self.finish()

    def finish(self) -> None:
        if not self.engine.running:
            return
        running = self.engine.running.pop(self.rng.randrange(len(self.engine.running)))
        num_there = len(self.engine.held(running.lora_id, running.pages))
        model = self.models.of(running.lora_id)
        self.index.note(running.lora_id or "", model, running.pages, num_there, running.num_loaded)
        self.engine.insert(running)
        self.store(running.weights, running.pages)

    def finish_all(self) -> None:
        while self.engine.running:
            self.finish()

    def store(self, weights: str, pages: Sequence[PageHash]) -> None:
        reservation = self.tree.reserve(ModelId(weights), None, pages)
        if reservation is not None:
            with reservation:
                for step in reservation.steps:
                    page_bytes = self.tree.family.kv_page_bytes
                    tags = [f"{weights:>8}".encode() + page for page in reservation.pages]
                    kv = b"".join(tag.ljust(page_bytes, b"\0") for tag in tags)
                    scatter(reservation.views(step), memoryview(kv))
                reservation.commit()

    def look(self, lora_id: str | None, weights: str, prompt: Prompt) -> None:
        """Check everything that is found for a request: it has to be of the right model, tenant and
        tokens."""
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
            self._check(plan, prompt)
            if num_with_e := match.e_pages.get(E_LAYER, 0):
                plan = replace(plan, pages=Span(0, num_with_e), block=Span(E_LAYER, NUM_LAYERS))
                self._check(plan, prompt)
                self.plans.append((plan, prompt))

    def admit(self) -> None:
        """Look for the pages of an earlier plan, now that the request gets slots."""
        if self.plans:
            self._check(*self.plans.pop(self.rng.randrange(len(self.plans))))

    def _check(self, plan: Plan, prompt: Prompt) -> None:
        lock = self.index.lock(plan, prompt.pages, prompt, MagicMock())
        if lock is None:
            return
        slots = lock.slots
        for at, page in enumerate(prompt.pages[: plan.pages.stop]):
            (slot_page,) = set((slots[at * PAGE : (at + 1) * PAGE] // PAGE).tolist())
            content = self.engine.contents[slot_page]
            assert (content.weights, content.page) == (plan.sender, page)
            assert content.has_e or not plan.transition_layers
        self.num_hits += 1
        self.num_with_e += len(plan.transition_layers)

    def _check_local(self, model: ModelId, pages: Sequence[PageHash]) -> None:
        lease = self.tree.lease(model, pages, "a test", Deadline.after(10))
        with lease:
            raw = b"".join(bytes(view) for view in lease.views(Step(Kind.KV, 1)))
        size = self.tree.family.kv_page_bytes
        for at, page in enumerate(pages):
            assert raw[at * size :].startswith(f"{model:>8}".encode() + page)
        self.num_local_hits += 1


@pytest.mark.long
@pytest.mark.parametrize("num_operations", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_hit_is_of_the_wrong_adapter(num_operations, tmp_path, monkeypatch):
    config = shape("llama", layers=NUM_LAYERS, hidden=16, heads=2, kv_heads=1)
    (model,) = write_models(tmp_path, config, ["m"])
    walk = Walk(family_of(model), monkeypatch, seed=num_operations)
    for _ in range(num_operations):
        walk.step()
    assert walk.num_loads > num_operations // 200
    assert walk.num_hits > num_operations // 10
    assert walk.num_local_hits > num_operations // 10
    assert walk.num_with_e > num_operations // 20
