"""Requests with KV that depends on more than their tokens, and prompts for which logprobs are
asked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from engine_parts import PAGE, page_hashes
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from standins import made

from cachetree.ids import ModelId, Span
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.prefixes import refusal, reusable_pages
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request.waiting import WaitingRequests
from sglang_droidspeak.store import insertions
from sglang_droidspeak.store.insertions import Insertions, Offloader

NUM_TOKENS = 4 * PAGE + 3
TOKENS = list(range(NUM_TOKENS))
NEVER = {
    "multimodal": {"multimodal_inputs": object()},
    "input_embeds": {"input_embeds": [[0.5]]},
    "replaced_embeds": {"positional_embed_overrides": object()},
    "session": {"session": object()},
}


def request(**fields: Any) -> Req:
    options = {name: fields.pop(name) for name in ("return_logprob",) if name in fields}
    params = SamplingParams(max_new_tokens=1)
    req = Req("r1", "", array("q", TOKENS), params, vocab_size=1000, **options)
    for name, value in fields.items():
        setattr(req, name, value)
    req.refresh_fill_ids()
    return req


def look(req: Req) -> tuple[set[str], MagicMock]:
    """Return the held requests, with a planner that finds no matches."""
    planner = MagicMock(refusal=refusal)
    planner.plan.side_effect = ValueError("a test: nothing is planned")
    settings = SimpleNamespace(
        hicache_backend=None, fetch_deadline_s=1.0, max_stall_s=None, gate="enforce", min_tokens=1
    )
    waiting = made(
        WaitingRequests,
        sources=MagicMock(server=SimpleNamespace(settings=settings, page_size=PAGE)),
        planner=planner,
        ranks=Ranks(None),
    )
    return waiting.look([req], MagicMock(), is_decoding=False), planner


OWNER = Owner(ModelId("m"), None, None)


def inserted(req, *, is_stopped=False, owner=OWNER):
    """Return the mocks of the offloader and the pool's index, after SGLang has inserted the
    request's whole pages into its tree."""
    models, pool, offloader = MagicMock(), MagicMock(), MagicMock(is_stopped=is_stopped)
    models.owner_of.return_value = owner
    inserting = Insertions(models, pool, offloader, PAGE)
    keys = [page.hex() for page in page_hashes(TOKENS)]
    transfer = SimpleNamespace(keys=keys, device_indices=torch.arange(NUM_TOKENS))

    def insert(_tree: object, _req: Req, *, up_to: int) -> None:
        inserting.offload([transfer], tuple)

    inserting.checkpoint(insert, None, req, up_to=NUM_TOKENS)
    return offloader.put, pool.note


@pytest.mark.parametrize(("num_owned", "stored"), [(None, Span(1, 3)), (2, Span(1, 2))])
def test_an_adapters_pages_are_stored_under_their_tokens_alone(num_owned, stored):
    """SGLang's tree hashes an adapter's pages with the adapter's id. The cache hashes the tokens
    alone: the model's id beside them tells the owner."""
    req, base = request(lora_id="a" * 32, extra_key="a" * 32), request()
    own = [page.hex() for page in prefixes.own_pages_of(req, NUM_TOKENS, PAGE)]
    pages = prefixes.pages_of(base, NUM_TOKENS, PAGE)
    models, offloader = MagicMock(), MagicMock(is_stopped=False)
    num_tokens = None if num_owned is None else num_owned * PAGE
    models.owner_of.return_value = Owner(ModelId("m"), None, num_tokens)
    inserting = Insertions(models, MagicMock(is_read=False), offloader, PAGE)

    def offered(keys: list[str]) -> bool:
        transfer: Any = SimpleNamespace(keys=keys, device_indices=torch.arange(2 * PAGE))
        return bool(inserting.offload([transfer], tuple))

    def insert(*_: object, up_to: int) -> None:
        assert offered(own[1:3])
        (offload,) = offloader.put.call_args.args
        assert (offload.model, offload.before) == ("m", pages[:1])
        assert offload.pages == pages[stored.start : stored.stop]
        assert offload.slots.tolist() == [*range(len(stored) * PAGE)]
        offloader.reset_mock()
        assert not offered([page.hex() for page in pages[1:3]]), "of another namespace"
        models.owner_of.return_value = Owner(ModelId("m"), None, PAGE)
        assert not offered(own[1:3]), "of no model that others may read"
        models.owner_of.return_value = None
        assert not offered(own[1:3]), "of an unknown adapter"

    inserting.checkpoint(insert, None, req, up_to=NUM_TOKENS)
    models.owner_of.return_value = Owner(ModelId("m"), None, None)
    assert not offered(own[1:3]), "nothing is being inserted"
    offloader.put.assert_not_called()


@pytest.mark.parametrize("fields", NEVER.values(), ids=NEVER)
def test_it_is_neither_planned_nor_held_nor_stored(fields):
    req = request(**fields)
    assert refusal(req)
    held, planner = look(req)
    assert not held
    planner.plan.assert_not_called()
    for put_or_noted in inserted(req):
        put_or_noted.assert_not_called()


def test_what_an_unknown_adapter_has_computed_is_neither_stored_nor_noted():
    for put_or_noted in inserted(request(), owner=None):
        put_or_noted.assert_not_called()


def test_any_other_request_is_planned_and_stored():
    req = request()
    assert not refusal(req)
    look(req)[1].plan.assert_called_once()
    put, noted = inserted(req)
    (call,) = put.call_args_list
    assert call.args[0].pages == page_hashes(TOKENS)
    noted.assert_called_once()


def test_what_descends_from_approximate_kv_is_let_go_in_its_turn():
    """The node does not become exact, so it is never offered again."""
    req = request()
    prefixes.move(req, approximate=True)
    put, noted = inserted(req)
    put.assert_called_once_with(None)
    noted.assert_not_called()


def test_where_nothing_is_stored_a_node_is_let_go_once_and_not_offered_again():
    inserted(request(), is_stopped=True)[0].assert_called_once_with(None)


def test_what_comes_after_a_node_that_is_let_go_is_stored(offloader, monkeypatch):
    stored: list[Any] = []
    monkeypatch.setattr(Offloader, "_store", lambda _self, it: stored.append(it))
    node = MagicMock()
    assert offloader.put(None)
    assert offloader.put(node)
    deadline_s = time.monotonic() + 20
    while offloader.num_results < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [offloader.pop_result(), offloader.pop_result()] == [True, True]
    assert (stored, offloader.num_done) == ([node], 2)


def test_a_node_that_fails_is_let_go(offloader, monkeypatch):
    """The pages behind the node have no parent in the cache."""
    turns = iter([1, 0, 1])
    monkeypatch.setattr(Offloader, "_store", lambda *_: 1 / next(turns))
    for _ in range(3):
        assert offloader.put(MagicMock())
    while offloader.num_results < 3:
        time.sleep(0.001)
    assert [offloader.pop_result() for _ in range(3)] == [True] * 3
    assert (offloader.num_done, offloader.num_results, offloader.storing) == (3, 0, None)


def test_so_many_nodes_are_in_flight_until_sglang_knows_of_them(offloader):
    for _ in range(insertions.MAX_IN_FLIGHT):
        assert offloader.put(None)
    while offloader.num_results < insertions.MAX_IN_FLIGHT:
        time.sleep(0.001)
    assert not offloader.put(None)
    assert offloader.pop_result() and offloader.put(None)
    assert not offloader.put(None)
    offloader.reset()
    assert (offloader.num_done, offloader.num_results) == (insertions.MAX_IN_FLIGHT + 1, 0)
    assert offloader.put(None)


@pytest.fixture
def offloader() -> Iterator[Offloader]:
    pool: Any = SimpleNamespace(e_pool=SimpleNamespace(valid=torch.zeros(1)))
    offloader_ = Offloader(MagicMock(), pool, None)
    yield offloader_
    offloader_.close()


@pytest.mark.parametrize(
    ("fields", "num_pages"),
    [
        ({}, 4),
        ({"return_logprob": True, "logprob_start_len": -1}, 4),
        ({"return_logprob": True, "logprob_start_len": 0}, 0),
        ({"return_logprob": True, "logprob_start_len": 2 * PAGE - 1}, 1),
        ({"return_logprob": True, "logprob_start_len": 2 * PAGE}, 2),
        ({"logprob_start_len": 0}, 4),
    ],
)
def test_no_page_is_reused_after_a_wanted_logprob(fields, num_pages):
    assert reusable_pages(request(**fields), PAGE) == page_hashes(TOKENS)[:num_pages]


def test_the_last_token_is_always_computed():
    req = request()
    req.origin_input_ids = array("q", TOKENS[: 2 * PAGE])
    req.refresh_fill_ids()
    assert reusable_pages(req, PAGE) == page_hashes(TOKENS)[:1]
