"""The places from which an activated adapter acts in a batch, as SGLang gets them on a device."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.utils import get_lm_head_pruned_lens

from sglang_droidspeak.adapters.activated import ActivatedAdapters, last_of
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.asking import ANSWERED, unsent
from sglang_droidspeak.engine.names import ForwardMode, Req

RID, INVOKED_AT, NUM_TOKENS = "a request", 20, 32


def request(lora_id: str = "judge") -> Req:
    tokens = [5] * INVOKED_AT + [7] + [5] * (NUM_TOKENS - INVOKED_AT - 1)
    return unsent(tokens, lora_id, None, None)


@pytest.fixture
def activated() -> Iterator[ActivatedAdapters]:
    """Yield adapters that have met a request."""
    models: Any = SimpleNamespace(invocation=lambda it: (7,) if it == "judge" else ())
    made = ActivatedAdapters(models)
    req = request()
    req.rid = RID
    made.meet(req)
    assert prefixes.invoked_at(req) == INVOKED_AT
    yield made


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 9, 60])
@pytest.mark.parametrize("seed", range(6))
def test_an_invocation_is_found_where_it_comes_last(num_tokens, seed):
    draw = random.Random(seed)
    tokens = array("q", draw.choices([0, 1, 256], k=num_tokens))
    for length in (1, 2, 3):
        wanted = draw.choices([0, 1, 256], k=length)
        places = (i for i in range(num_tokens) if [*tokens[i : i + length]] == wanted)
        assert last_of(wanted, tokens) == max(places, default=None)


@pytest.mark.parametrize("filled_with", [5, 7])
def test_the_scheduler_waits_for_no_search_through_a_long_prompt(filled_with):
    """A user may fill the prompt with the first token of an invocation."""
    tokens = array("q", [filled_with]) * 1_000_000
    begun_s = time.process_time()
    assert last_of((7, 8, 9), tokens) is None
    assert time.process_time() - begun_s < 0.1


@pytest.mark.parametrize("num_answered", [0, 10])
def test_what_never_invokes_it_is_the_bases_and_so_is_the_guards_exact_run(activated, num_answered):
    """The guard's exact run has the served answer in its input. Invocation tokens in the answer do
    not invoke the adapter."""
    req = unsent([5] * NUM_TOKENS + [7] * num_answered, "judge", "tenant", None)
    req.sampling_params.max_new_tokens = 10 - num_answered
    req.sampling_params.custom_params = {ANSWERED: num_answered}
    for _ in range(2):
        activated.meet(req)
        assert (req.lora_id, req.extra_key) == (None, "tenant")
        assert (prefixes.invoked_at(req), prefixes.namespace_of(req)) == (None, "")


def prefill() -> Any:
    return SimpleNamespace(
        rids=[RID],
        lora_ids=["judge"],
        batch_size=1,
        forward_mode=ForwardMode.EXTEND,
        seq_lens_cpu=torch.tensor([NUM_TOKENS]),
        extend_seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32).to("cuda"),
        extend_seq_lens_cpu=[NUM_TOKENS],
        extend_num_tokens=NUM_TOKENS,
    )


def manager(num_slots: int) -> Any:
    """Return a manager that has captured graphs of prefills for this number of requests."""
    backend = SimpleNamespace(
        prefill_cuda_graph_max_bs=num_slots, prefill_cuda_graph_max_tokens=NUM_TOKENS
    )
    return SimpleNamespace(
        lora_backend=backend, attn_dp_enabled=False, fetch_new_loras=lambda _ids: None
    )


def test_the_host_does_not_wait_to_tell_of_it(cuda, activated):
    copied, batch = [], prefill()
    cuda.stalls.clear()
    activated.prepare(lambda _manager, it: copied.append(it), manager(2), batch)
    assert cuda.stalls == []
    assert copied[0].lora_ids == [None, "judge"]
    assert copied[0].extend_seq_lens.tolist() == [INVOKED_AT, NUM_TOKENS - INVOKED_AT]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_graph_is_replayed_only_where_what_it_reads_was_refreshed(cuda, activated, num_slots):
    fits, batch, refreshed = LoRAManager.can_use_prefill_cuda_graph, prefill(), []

    def prepare(of: Any, split: Any) -> None:
        refreshed.append(activated.fits_graph(fits, of, split))

    activated.prepare(prepare, manager(num_slots), batch)
    is_replayed = activated.fits_graph(fits, manager(num_slots), batch)
    assert refreshed == [is_replayed] == [num_slots == 2]


def test_a_question_about_a_prompt_that_was_not_sent_changes_no_request(cuda, activated):
    """Nothing changes, even if such a question has the id of a running request."""
    user, batch = request(), prefill()
    batch.rids = [user.rid]
    activated.meet(user)
    activated.meet(request())
    assert activated._split(batch).lora_ids == [None, "judge"]


def test_to_ask_whether_a_graph_fits_copies_nothing(cuda, activated):
    batch = prefill()
    batch.extend_seq_lens = None  # What is on the device is not looked at.
    assert activated.fits_graph(LoRAManager.can_use_prefill_cuda_graph, manager(2), batch)


def test_another_adapters_request_of_the_same_id_is_not_touched(cuda, activated):
    """The first request has been answered, and is still in the running batch."""
    other, batch = request("plain"), prefill()
    other.rid = RID
    activated.meet(other)
    batch.lora_ids = ["plain"]
    assert activated._split(batch) is batch


def test_where_log_probabilities_begin_is_not_told_of_parts(cuda, activated):
    """If SGLang got places within the parts, its triton backend would count a negative number of
    rows, in segments without an end."""
    batch = prefill()
    batch.rids, batch.lora_ids, batch.batch_size = [RID, "another"], ["judge", None], 2
    batch.seq_lens_cpu = torch.tensor([NUM_TOKENS, 50])
    batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu = [NUM_TOKENS, 50], [31, 49]
    batch.return_logprob = True
    assert get_lm_head_pruned_lens(batch) == [1, 1]
    parts = activated._split(batch)
    assert parts.lora_ids == [None, "judge", None]
    assert get_lm_head_pruned_lens(parts) == [1, 1, 1]
