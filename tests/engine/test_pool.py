"""Tests of the notes that this package keeps about pages in SGLang's pool, and of requests that
wait for one another. No server runs."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from engine_parts import PAGE, family_of
from safetensors.torch import load_file, save_file
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from standins import Named, made, request, request_of, sglang_tree

from benchmarks.random_adapters import write_adapter
from cachetree.checkpoint import Codec, adapted, adapter_digest, read_model_identity
from cachetree.errors import ConfigError
from cachetree.ids import EMPTY_SPAN, ModelId, PageHash, Span
from cachetree.planning.plan import Plan
from cachetree.tree.hashing import page_hashes
from cachetree.tree.remote_entries import RemoteEntries
from cachetree.tree.tree import CacheTree
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.asking import unsent
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.followers import Followers
from sglang_droidspeak.request.planner import Declined, Planner
from sglang_droidspeak.request.request import Request
from sglang_droidspeak.request.source import InPool
from sglang_droidspeak.store import pool as pool_module
from sglang_droidspeak.store.insertions import Insertions
from sglang_droidspeak.store.pool import Held, PoolIndex, pool_of

BASE, ADAPTED = ModelId("base"), ModelId("adapted")
NO_MATCH = Declined("no_match")
TREE: Any = object()
NUM_SLOTS = 64 * PAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (path,) = write_models(folder, shape("llama", layers=4, hidden=64, heads=2, kv_heads=1), ["m"])
    return path


def pages_of(num_pages: int, seed: int = 0) -> list[PageHash]:
    return page_hashes(random_prompt(num_pages * PAGE, seed), PAGE)


def plan_of(num_pages: int, block: Span = EMPTY_SPAN) -> Plan:
    return Plan(
        sender=BASE,
        receiver=ADAPTED,
        location=pool_of(""),
        pages=Span(1, num_pages),
        block=block,
        num_layers=4,
    )


@dataclass
class Shelf:
    """An index of the pool over a tree, with a stand-in for SGLang's tree."""

    index: PoolIndex
    tree: CacheTree
    num_there: int = 100
    """Number of pages that SGLang has not evicted."""

    def insert(self, pages: list[PageHash], num_there: int = 0, num_loaded: int = 0) -> None:
        """Insert pages. SGLang's tree has the first `num_there` of them. The next ones up to
        `num_loaded` were loaded, and the rest was computed."""
        self.index.note("", BASE, pages, num_there, num_loaded)

    def e_pages(self, pages: list[PageHash]) -> int:
        """Return how many of these pages can be recomputed from E."""
        (match,) = self.tree.match(pages)
        assert match.num_pages == len(pages)
        return match.e_pages.get(2, 0)

    def noted(self, pages: list[PageHash]) -> int:
        return self.tree.remote.reach(pool_of(""), BASE, pages)


@pytest.fixture
def shelf(model: Path, monkeypatch) -> Shelf:
    tree = CacheTree(family_of(model), host_bytes=0)
    made = Shelf(PoolIndex(tree, (2,), PAGE, NUM_SLOTS, Ranks(None)), tree)

    for name, of in (
        ("num_held", lambda _req, _lora_id, num_pages, _tree: min(num_pages, made.num_there)),
        ("use", lambda _req, _lora_id, num_pages, _tree: (7, torch.arange(num_pages * PAGE))),
    ):
        monkeypatch.setattr(prefixes, name, of)
    return made


def test_what_is_noted_is_found(shelf):
    pages = pages_of(6)
    shelf.insert(pages[:4])
    shelf.insert(pages, num_there=4)
    (match,) = shelf.tree.match(pages)
    assert (match.location, match.num_pages, match.e_pages) == (pool_of(""), 6, {2: 6})
    lock = shelf.index.lock(plan_of(5), pages, None, MagicMock())
    assert lock.slots.tolist() == list(range(PAGE, 5 * PAGE))


def test_what_sglang_has_evicted_is_a_miss_and_is_forgotten(shelf):
    pages = pages_of(6)
    shelf.insert(pages)
    shelf.num_there = 3
    assert not shelf.index.has(plan_of(6), pages, None, None)
    assert shelf.noted(pages) == 3
    shelf.num_there = 6
    shelf.insert(pages, num_there=3)
    assert shelf.noted(pages) == 6


def test_to_look_for_e_is_no_use_of_it(shelf, monkeypatch):
    pages = pages_of(6)
    shelf.insert(pages)
    monkeypatch.setattr(shelf.tree, "match", lambda *_: pytest.fail("it counts as a use"))
    assert shelf.index.has(plan_of(6, Span(2, 4)), pages, None, None)


def test_what_was_loaded_has_no_e(shelf):
    """Pages that were computed after loaded pages have E that no plan can use."""
    pages = pages_of(6)
    shelf.insert(pages, num_loaded=4)
    shelf.insert(pages[:4], num_there=4)
    assert shelf.e_pages(pages) == 0
    shelf.insert(pages_of(8, seed=1)[:4])
    shelf.insert(pages_of(8, seed=1), num_there=4, num_loaded=6)
    assert shelf.e_pages(pages_of(8, seed=1)) == 4


def test_what_is_loaded_in_place_of_what_was_evicted_has_no_e(shelf):
    """Loaded pages have no E even if a plan was made with the E of the evicted pages. Pages that
    are computed again have E."""
    pages = pages_of(6)
    shelf.insert(pages)
    assert shelf.e_pages(pages) == 6
    recompute, copy = plan_of(6, Span(2, 4)), plan_of(6)
    assert shelf.index.has(recompute, pages, None, None)
    shelf.insert(pages, num_there=3, num_loaded=5)
    assert shelf.e_pages(pages) == 3
    assert not shelf.index.has(recompute, pages, None, None)
    assert shelf.index.has(plan_of(3, Span(2, 4)), pages, None, None)
    assert shelf.index.has(copy, pages, None, None)
    shelf.insert(pages, num_there=3)
    assert shelf.e_pages(pages) == 6


def test_what_is_computed_where_the_tree_has_it_leaves_it_as_it_is(shelf):
    """Two requests compute the same pages at once. The one that loaded some is inserted first, and
    its slots stay."""
    pages = pages_of(6)
    shelf.insert(pages[:4], num_loaded=4)
    shelf.insert(pages, num_there=4)
    assert shelf.e_pages(pages) == 0


def test_what_was_inserted_unnoted_counts_as_without_e(shelf):
    """Pages are unnoted if their adapter was unknown when the pages came into the tree."""
    pages = pages_of(6)
    shelf.insert(pages, num_there=4)
    assert shelf.e_pages(pages) == 0


def test_nobody_loads_what_another_rank_has_not_and_all_note_it(shelf):
    """Each rank notes what it has looked up itself, so another rank's notes may differ."""
    pages, asked = pages_of(6), []
    least = 5
    shelf.insert(pages)
    shelf.index._ranks = SimpleNamespace(least=lambda mine: asked.append(mine) or [least])  # type: ignore[assignment]
    assert shelf.index.lock(plan_of(6, Span(2, 4)), pages, None, MagicMock()) is None
    assert shelf.e_pages(pages[:5]) == shelf.noted(pages) == 5
    shelf.num_there = least = 3
    assert shelf.index.lock(plan_of(5), pages, None, MagicMock()) is None
    assert asked == [[6], [3]]
    assert shelf.noted(pages) == 3


@pytest.mark.parametrize("has_e", [True, False])
def test_whoever_copies_pages_takes_over_whether_they_have_e(shelf, has_e):
    pages, adopted = pages_of(6), []
    shelf.insert(pages, num_loaded=0 if has_e else 2)
    tree: Any = SimpleNamespace(lock=lambda node: node, unlock=lambda node: None)
    pool: Any = SimpleNamespace(
        page_size=PAGE, e_pool=SimpleNamespace(adopt=lambda *it: adopted.append(it))
    )
    plan = plan_of(6)
    source = InPool(plan, pool, lambda: shelf.index.lock(plan, pages, None, tree))  # type: ignore[arg-type]
    assert source.admit()
    assert source.adopt_e(Span(PAGE, 2 * PAGE), torch.arange(PAGE)) == has_e
    ((page, _slots, _block),) = adopted
    assert page.tolist() == list(range(PAGE, 2 * PAGE))


@pytest.mark.parametrize("core", ["python", "rust"])
def test_only_what_is_read_is_a_use_of_sglangs_tree(model, core):
    """Ranks look pages up at different times, but all of them have to evict the same pages."""
    sglangs = sglang_tree(core)
    index = PoolIndex(CacheTree(family_of(model), host_bytes=0), (2,), PAGE, NUM_SLOTS, Ranks(None))
    index.is_read = index.has_approximate = True
    models = Models(Named(BASE), 4, lambda _folder: ADAPTED)
    insertions = Insertions(models, index, None, PAGE)  # type: ignore[arg-type]
    older, newer = (request_of(random_prompt(6 * PAGE, seed)) for seed in range(2))
    plan = plan_of(4, Span(2, 4))

    def insert(_tree: object, req: Any, *, up_to: int) -> None:
        tokens, start = req.full_untruncated_fill_ids[:up_to], NUM_SLOTS * (req is newer)
        slots = torch.arange(start, start + up_to)
        sglangs.insert(InsertParams(key=RadixKey(tokens), value=slots))

    for req in (older, newer):
        insertions.checkpoint(insert, sglangs, req, up_to=6 * PAGE)
    pages = prefixes.pages_of(older, 6 * PAGE, PAGE)
    assert index.has(plan, pages, older, sglangs)
    assert index.held(older, 3, sglangs) == Held(3, 0)
    insertions.checkpoint(lambda *_, **__: None, sglangs, older, up_to=5 * PAGE)
    # Neither refreshed nor split.
    assert sglangs.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 6 * PAGE
    assert [index.held(it, 6, sglangs) for it in (older, newer)] == [Held(0, 0), Held(6, 0)]

    insertions.checkpoint(insert, sglangs, older, up_to=6 * PAGE)
    pages = prefixes.pages_of(newer, 6 * PAGE, PAGE)
    index.lock(plan, pages, newer, sglangs).release()
    assert sglangs.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 6 * PAGE
    locked = index.lock(plan, pages, newer, sglangs)
    sglangs.evict(EvictParams(num_tokens=NUM_SLOTS))
    assert [index.held(it, 6, sglangs) for it in (older, newer)] == [Held(0, 0), Held(4, 0)]
    assert locked.slots.tolist() == list(range(NUM_SLOTS + PAGE, NUM_SLOTS + 4 * PAGE))


@pytest.mark.parametrize(
    ("num_loaded", "is_read", "e_pages"), [(0, True, 6), (2, True, 6), (4, True, 2), (0, False, 2)]
)
def test_what_sglang_inserts_is_noted_by_what_its_tree_had_before(
    shelf, num_loaded, is_read, e_pages
):
    req = request_of(random_prompt(6 * PAGE, 1))
    pages = prefixes.pages_of(req, 6 * PAGE, PAGE)
    shelf.insert(pages[:2])
    shelf.num_there, shelf.index.is_read = 2, is_read
    if num_loaded:
        prefixes.note_without_e(req, num_loaded * PAGE)
    models = Models(Named(BASE), 4, lambda _folder: ADAPTED)
    insertions = Insertions(models, shelf.index, None, PAGE)  # type: ignore[arg-type]

    def insert(_tree: object, _req: object, *, up_to: int) -> None:
        shelf.num_there = up_to // PAGE

    insertions.checkpoint(insert, None, req, up_to=6 * PAGE)
    (match,) = shelf.tree.match(pages)
    assert (match.num_pages, match.e_pages[2]) == (6 if is_read else 2, e_pages)


def test_no_more_is_noted_of_a_place_than_the_pool_can_hold(shelf):
    """Pages that no request asked for are evicted first."""
    shared = pages_of(8)
    shelf.insert(shared)
    for seed in range(1, 8):
        shelf.insert(pages_of(8, seed))
    shelf.insert(shared[:6], num_there=6)  # As on every rank, also where nobody asks.
    shelf.insert(pages_of(4, seed=9))
    assert [shelf.noted(pages_of(8, seed)) for seed in (0, 1, 7)] == [8, 0, 8]
    assert shelf.tree.remote.num_pages[pool_of("")] <= 2 * NUM_SLOTS // PAGE, "with E"


def test_what_is_loaded_stays_noted_where_nobody_asks(shelf):
    """Only the first rank plans, so the other ranks are never asked."""
    shared = pages_of(8)
    shelf.insert(shared)
    for seed in range(1, 8):
        shelf.insert(pages_of(8, seed))
    assert shelf.index.lock(plan_of(8, Span(2, 4)), shared, None, MagicMock())
    shelf.insert(pages_of(4, seed=9))
    assert [shelf.noted(pages_of(8, seed)) for seed in (0, 1, 7)] == [8, 0, 8]


def test_all_places_together_have_a_bound(shelf):
    """Each place holds notes of pages that SGLang has evicted."""
    most = NUM_SLOTS // PAGE
    for place in range(10):
        for seed in range(most // 8):
            shelf.index.note(f"{place}", BASE, pages_of(8, 100 * place + seed), 0, 0)
    assert shelf.tree.remote.num_pages.total() <= 2 * 4 * most, "with E"
    assert shelf.tree.match(pages_of(8, 900))


def test_of_places_without_number_the_one_longest_unused_is_forgotten(shelf, monkeypatch):
    """Activated adapters make many places: one for each token at which they are invoked."""
    monkeypatch.setattr(pool_module, "_MAX_PLACES", 3)
    pages = pages_of(2)
    for namespace in ("x@1", "x@2", "x@3", "x@1", "x@4"):
        shelf.index.note(namespace, BASE, pages, 0, 0)
    assert {it.location for it in shelf.tree.match(pages)} == {*map(pool_of, ("x@1", "x@3", "x@4"))}
    shelf.index.forget("x")
    assert not shelf.tree.match(pages)


def test_to_note_again_what_is_noted_costs_no_more_than_a_look(shelf, monkeypatch):
    """Noting happens at each insertion of a long prompt, on the scheduler's thread."""
    pages = pages_of(6)
    shelf.insert(pages)
    monkeypatch.setattr(shelf.tree.remote, "add", lambda *_: pytest.fail("it is noted"))

    class Counted(list):  # type: ignore[type-arg]
        __iter__ = __reversed__ = lambda *_: pytest.fail("page after page")  # type: ignore[assignment]

    monkeypatch.setattr(shelf.tree.remote, "reach", lambda *_, **__: 6)
    shelf.insert(Counted(pages), num_there=6)


def test_an_unloaded_adapter_and_a_flush_leave_nothing(shelf):
    pages = pages_of(3)
    shelf.insert(pages)
    shelf.index.note("x", ADAPTED, pages, 0, 0)
    shelf.index.forget("x")
    assert [it.model for it in shelf.tree.match(pages)] == [BASE]
    shelf.index.clear()
    assert shelf.tree.match(pages) == []


def test_models_are_known_by_content(model, tmp_path):
    models = Models(Named(BASE), 4, lambda folder: ModelId(folder.name))
    upper = write_adapter(tmp_path / "upper", model, layers=[2, 3])
    lower = write_adapter(tmp_path / "lower", model, layers=[1], seed=1)
    models.add("u", upper)
    models.add("l", lower)
    assert models.first_differences(None) == {"upper": 2, "lower": 1}
    assert models.first_differences("u") == {BASE: 2, "lower": 1}
    models.add("twin", lower)
    models.drop("l")
    assert (models.of("l"), models.of("twin")) == (None, "lower")
    assert models.first_differences(None) == {"upper": 2, "lower": 1}
    models.drop("twin")
    assert (models.of("l"), models.first_differences(None)) == (None, {"upper": 2})


def test_an_adapter_is_another_model_once_its_base_is(model, tmp_path):
    base = read_model_identity(model)
    other = msgspec.structs.replace(base, weights="other")
    models, adapter = Models(base, 4, adapter_digest), write_adapter(tmp_path / "a", model)
    models.add("a", adapter)
    assert models.of("a") == adapted(base, adapter).model_id
    models.change()
    assert (models.of(None), models.of("a")) == (None, None)
    models.load("b", adapter, lambda: None)
    while models.is_reading("b"):
        models.settle(Ranks(None))
    assert models.of("b") is None
    named: dict[str, ModelId] = {}
    models.known = named.__setitem__
    models.become(other)
    assert models.of("a") == models.of("b") == adapted(other, adapter).model_id
    assert named == dict.fromkeys("ab", models.of("a"))
    assert models.first_differences(None) == {models.of("a"): 0}


def planner_over(models: Models) -> Any:
    family = SimpleNamespace(codec=Codec.NONE)
    cache = SimpleNamespace(family=family)
    return made(Planner, cache=cache, models=models, activated=ActivatedAdapters(models))


def load(models: Models, lora_id: str, folder: Path, meanwhile: Callable[[], object]) -> None:
    models.load(lora_id, folder, meanwhile)
    while models.is_reading(lora_id):
        models.settle(Ranks(None))


def test_an_adapter_whose_files_change_while_they_are_read_is_unknown(model, tmp_path):
    models = Models(Named(BASE), 4, lambda folder: ModelId(folder.name))
    folder = write_adapter(tmp_path / "a", model)
    load(models, "same", folder, lambda: None)
    assert models.of("same") == "a"
    load(models, "other", folder, lambda: (folder / "adapter_config.json").write_text("{}"))
    assert models.of("other") is None
    with pytest.raises(ConfigError):
        models.add("other", folder)


def test_an_activated_adapter_of_the_head_is_not_loaded(model, tmp_path):
    models = Models(Named(BASE), 4, lambda folder: ModelId(folder.name))
    folder = write_adapter(tmp_path / "a", model)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [7]}))
    save_file({**load_file(weights), "lm_head.lora_A.weight": torch.zeros(1, 1)}, weights)
    loaded: list[None] = []
    with pytest.raises(ConfigError, match="which SGLang applies to whole prompts"):
        models.load("a", folder, lambda: loaded.append(None))
    assert not loaded and not models.is_reading("a") and not models.invocation("a")


def test_an_adapter_is_read_beside_the_scheduler(model, tmp_path):
    """The adapter answers requests at once (from its invocation token on if it has one). Its KV is
    shared as soon as its weights are known."""
    may_read = threading.Event()

    def identify(folder: Path) -> ModelId:
        may_read.wait(10)
        return ModelId(folder.name)

    models = Models(Named(BASE), 4, identify)
    folder = write_adapter(tmp_path / "a", model)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [7]}))
    for lora_id in ("kept", "dropped"):
        models.load(lora_id, folder, lambda: None)
        models.settle(Ranks(None))
        assert (models.of(lora_id), models.is_reading(lora_id)) == (None, True)
        assert models.invocation(lora_id) == (7,)
    models.drop("dropped")
    may_read.set()
    while models.is_reading("kept") or models.is_reading("dropped"):
        models.settle(Ranks(None))
    assert (models.of("kept"), models.of("dropped")) == ("a", None)


def test_an_adapter_that_cannot_be_read_is_unknown(model, tmp_path, caplog):
    def identify(_folder: Path) -> ModelId:
        return sorted(["q_proj", 1])[0]  # type: ignore[list-item, return-value]

    models = Models(Named(BASE), 4, identify)
    load(models, "a", write_adapter(tmp_path / "a", model), lambda: None)
    assert models.of("a") is None
    assert "adapter a shares with no other model: '<' not supported" in caplog.text


def test_an_adapter_that_two_ranks_read_differently_is_unknown(model, tmp_path):
    models = Models(Named(BASE), 4, lambda folder: ModelId(folder.name))
    ranks: Any = SimpleNamespace(least=lambda values: values, share=lambda *_: "another")
    models.load("a", write_adapter(tmp_path / "a", model), lambda: None)
    while models.is_reading("a"):
        models.settle(ranks)
    assert models.of("a") is None


@dataclass
class Crowd:
    leaders: Followers
    index: PoolIndex


def follow(leaders, req, pages, declined=NO_MATCH):
    """Let a request that may read approximate KV follow a leader, if it has to wait."""
    request = Request(req)
    request.pages = pages
    return request if leaders.follow(request, declined, TREE) else None


@pytest.fixture
def crowd(shelf: Shelf) -> Crowd:
    models = Models(Named(BASE), 4, lambda _folder: ADAPTED)
    models._loaded["x"] = SimpleNamespace(model_id=ADAPTED, adapter=None)
    made = Crowd(None, shelf.index)  # type: ignore[arg-type]
    planner = SimpleNamespace(demand=lambda *_args: None, would_save_s=lambda *_args, **_: 1.0)
    made.leaders = Followers(shelf.tree, planner, models, PAGE)  # type: ignore[arg-type]
    return made


def test_the_first_leads_and_others_wait_until_its_pages_are_there(crowd):
    pages, longer = pages_of(4), [*pages_of(3), *pages_of(2, seed=5)]
    first, second, same = request("1"), request("2", "x"), request("3")
    assert follow(crowd.leaders, first, pages) is None
    assert follow(crowd.leaders, same, pages) is None, "its own tree will have it"
    following = follow(crowd.leaders, second, longer)
    assert not following.may_be_planned()
    crowd.index.note("", BASE, pages[:2], 0, 0)
    assert not following.may_be_planned()
    crowd.index.note("", BASE, pages[:3], 2, 0)
    assert following.may_be_planned(), "all that both have"


def test_one_that_leaves_nothing_is_followed_until_its_first_token(crowd):
    """A leader is also followed until it has left the queue for good, for example when it is
    aborted. Then it is forgotten."""
    pages = pages_of(4)
    for rid in ("answers", "aborted"):
        leader = request(rid)
        follow(crowd.leaders, leader, pages)
        following = follow(crowd.leaders, request("2", "x"), pages)
        crowd.leaders.prune({rid, "2"})
        assert not following.may_be_planned()
        if rid == "answers":
            leader.kv.holds_kv = True
            crowd.leaders.prune({"2"})
            assert not following.may_be_planned(), "it computes"
            leader.output_ids.append(1)
        crowd.leaders.prune({"2"})
        assert following.may_be_planned()
        assert follow(crowd.leaders, request("3", "x"), pages) is None
        crowd.leaders.clear()


def test_whether_a_leader_has_left_its_pages_is_asked_for_its_followers_alone(crowd, monkeypatch):
    """If every waiting request were asked, each step of the scheduler would take longer."""
    pages, leader = pages_of(4), request("1")
    follow(crowd.leaders, leader, pages)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(RemoteEntries, "reach", lambda *_: pytest.fail("nobody follows"))
        crowd.leaders.prune({"1"})
    assert follow(crowd.leaders, request("2", "x"), pages)
    crowd.index.note("", BASE, pages[:3], 0, 0)
    crowd.leaders.prune({"1"})
    assert follow(crowd.leaders, request("3", "x"), pages)
    common = [*pages[:3], *pages_of(1, seed=5)]
    assert follow(crowd.leaders, request("4", "x"), common) is None, "these are there"


def test_of_the_leaders_of_one_model_only_the_one_with_most_in_common_is_weighed(crowd):
    """If all leaders were compared, each new request would take longer."""
    weighed: list[Any] = []
    planner: Any = SimpleNamespace(
        demand=lambda _req, _owner, num_pages, _tree: num_pages,
        would_save_s=lambda *args, **_: weighed.append(args) or 0.0,
    )
    leaders = replace(crowd.leaders, _planner=planner)
    for number in range(20):
        mine = [*pages_of(1 + number % 3), *pages_of(1, seed=10 + number)]
        assert follow(leaders, request(f"{number}"), mine) is None
    assert not weighed, "its own tree will have it"
    assert follow(leaders, request("other", "x"), pages_of(4)) is None
    assert weighed == [(4, 3, BASE, pool_of(""))]


@pytest.mark.parametrize("outcome", ["off", "bad_controls"])
def test_who_reads_nobody_leads_and_does_not_follow(crowd, outcome):
    pages, first = pages_of(4), request("1")
    assert follow(crowd.leaders, first, pages, Declined(outcome)) is None
    other = request("2", "x")
    assert follow(crowd.leaders, other, pages, Declined(outcome)) is None
    assert follow(crowd.leaders, other, pages)


@pytest.mark.parametrize("tenant", [None, "tenant"])
@pytest.mark.parametrize("lora_id", [None, "7" * 32])
def test_approximate_kv_has_a_namespace_of_its_own(tenant, lora_id):
    """The namespace has the same tenant and adapter, and hashes that other servers understand."""
    key = (tenant or "") + (lora_id or "") or None  # As SGLang makes it.
    tokens = random_prompt(4 * PAGE, 1)
    req = request_of(tokens, lora_id, extra_key=key, cache_salt="salt")
    own, shared = (of(req, 4 * PAGE, PAGE) for of in (prefixes.own_pages_of, prefixes.pages_of))
    prefixes.move(req, approximate=True)
    assert req.extra_key == (tenant or "") + prefixes.APPROXIMATE + (lora_id or "")
    assert prefixes.own_pages_of(req, 4 * PAGE, PAGE) != own
    assert prefixes.pages_of(req, 4 * PAGE, PAGE) == shared
    assert (prefixes.tenant_of(req), prefixes.namespace_of(req)) == (tenant, lora_id or "")
    if lora_id is not None:
        prefixes.invoke(req, 17)
        assert req.extra_key.endswith(f"{prefixes.APPROXIMATE}{lora_id}@17")
    prefixes.move(req, approximate=False)
    at = "" if lora_id is None else "@17"
    assert req.extra_key == ((key or "") + at or None)


@pytest.mark.parametrize("key", [None, "", "t"])
@pytest.mark.parametrize("lora_id", [None, "7" * 32])
def test_pages_are_named_as_sglang_names_them(key, lora_id):
    """SGLang distinguishes an empty key from no key. A conversion to SGLang's names and back keeps
    the names."""
    req = unsent(random_prompt(4 * PAGE, 1), lora_id, key, None)
    req.refresh_fill_ids()
    old_key = req.extra_key
    for _ in range(2):
        theirs = RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
        pages = [*map(prefixes.page_hash, get_storage_hash_str(theirs, page_size=PAGE))]
        assert prefixes.own_pages_of(req, 4 * PAGE, PAGE) == pages
        prefixes.move(req, approximate=True)
        prefixes.move(req, approximate=False)
        assert req.extra_key == old_key


@pytest.mark.long
def test_all_ranks_of_a_server_name_approximate_kv_alike():
    """SGLang can check that its ranks look up the same keys."""
    anybody: Any = SimpleNamespace(lora_id=None)
    with multiprocessing.get_context("spawn").Pool(1) as ranks:
        assert ranks.apply(prefixes.approximate_of, [anybody]) == prefixes.APPROXIMATE


def test_no_extra_key_of_a_user_names_approximate_kv(monkeypatch):
    """A user who knows the code or has another server cannot find such a key. Approximate KV under
    a user's key would be read as exact."""
    spec = importlib.util.find_spec(prefixes.__name__)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as another:
        another.setattr("sglang_droidspeak.engine.asking.SECRET", "another server's")
        spec.loader.exec_module(elsewhere)
    tokens = random_prompt(4 * PAGE, 1)
    approximate, known, user = (request_of(tokens) for _ in range(3))
    for of, req in ((prefixes, approximate), (elsewhere, known)):
        of.move(req, approximate=True)
    user.extra_key = known.extra_key
    pages = [prefixes.own_pages_of(it, 4 * PAGE, PAGE) for it in (user, approximate)]
    assert not {*pages[0]} & {*pages[1]}


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("is_activated", [False, True])
@pytest.mark.parametrize("tenant", ["", "tenant"])
def test_no_extra_key_of_a_user_names_an_adapters_kv(model, tmp_path, core, is_activated, tenant):
    """SGLang joins the key and the adapter's id. A user who knows the adapter's name and path can
    compute the id."""
    lora_id, prompt = LoRARef.deterministic_id("sql", "/models/sql"), random_prompt(4 * PAGE, 1)
    models = Models(Named(BASE), 4, lambda _folder: ADAPTED)
    models.add(lora_id, write_adapter(tmp_path / "sql", model))
    if is_activated:
        models._invocations[lora_id] = tuple(prompt[17:19])
    planner = planner_over(models)
    adapters = unsent(prompt, lora_id, tenant, None)
    planner.meet(adapters)
    namespace = f"{lora_id}@17" if is_activated else lora_id
    assert adapters.extra_key == tenant + namespace
    user = unsent(prompt, None, adapters.extra_key, None)
    for _ in range(2):
        planner.meet(user)
        prefixes.move(user, approximate=True)
        prefixes.move(user, approximate=False)
    assert user.extra_key == f"{tenant}{namespace}~{prefixes.SECRET}"
    neighbour = unsent(prompt, None, user.extra_key.removesuffix(prefixes.SECRET), None)
    planner.meet(neighbour)
    assert neighbour.extra_key != user.extra_key, "a tenant of its own"
    tree = sglang_tree(core)
    for req, other in ((user, adapters), (adapters, user)):
        req.refresh_fill_ids()
        key = RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
        tree.insert(InsertParams(key=key, value=torch.arange(4 * PAGE)))
        held = [prefixes.num_held(it, prefixes.namespace_of(it), 4, tree) for it in (req, other)]
        assert held == [4, 0]
        tree.reset()
    models.drop(lora_id)
    again = unsent(prompt, None, adapters.extra_key, None)
    planner.meet(again)
    assert again.extra_key == user.extra_key, "what it left may still be there"


def test_nor_where_the_users_own_adapter_is_never_invoked(model, tmp_path):
    models = Models(Named(BASE), 4, lambda _folder: ADAPTED)
    sql, judge = (LoRARef.deterministic_id(name, name) for name in ("sql", "judge"))
    for lora_id in (sql, judge):
        models.add(lora_id, write_adapter(tmp_path / lora_id, model))
    models._invocations[judge] = (7,)
    planner = planner_over(models)
    user = unsent([5] * 20, judge, sql, None)
    for _ in range(2):
        planner.meet(user)
        assert (user.lora_id, user.extra_key) == (None, f"{sql}~{prefixes.SECRET}")


def test_any_other_extra_key_stays_as_it_is():
    lora_id, other = (LoRARef.deterministic_id(name, "/models") for name in "ab")
    for key, of in ((None, None), ("", None), ("tenant", None), (other, None), (lora_id, other)):
        req = unsent([1, 2], of, key, None)
        before = req.extra_key
        prefixes.keep_apart(req, {lora_id})
        assert req.extra_key == before


@pytest.mark.parametrize("lora_id", [None, "7" * 32])
def test_a_generation_reads_no_approximate_kv_of_another(lora_id):
    """A request reads the same exact KV, whichever of the two generations it looks for when it
    joins."""
    reqs = [request("r", lora_id, extra_key="tenant" + (lora_id or "")) for _ in range(3)]
    prefixes.move(reqs[1], approximate=True)
    for req, generation in zip(reqs[1:], "12", strict=True):
        prefixes.join(req, generation)
    exact = {prefixes.move(req, approximate=False) or req.extra_key for req in reqs}
    assert exact == {"tenant" + (lora_id or "")}
    approximate = [prefixes.move(req, approximate=True) or req.extra_key for req in reqs]
    assert len({*approximate}) == 3
    assert [prefixes.tenant_of(req) for req in reqs] == ["tenant"] * 3
    assert [it.removeprefix("tenant") for it in approximate] == [
        *map(prefixes.approximate_of, reqs)
    ]


def test_what_the_device_has_of_either_kind(shelf, monkeypatch):
    monkeypatch.setattr(
        prefixes,
        "num_held",
        lambda _req, place, most, _tree: min(
            most, 5 if place.startswith(prefixes.APPROXIMATE) else 3
        ),
    )
    req = request()
    assert shelf.index.held(req, 8, None) == Held(3, 0), "none was ever loaded"
    shelf.index.has_approximate = True
    assert shelf.index.held(req, 8, None) == Held(3, 5)
    assert shelf.index.held(req, 3, None) == Held(3, 3)
