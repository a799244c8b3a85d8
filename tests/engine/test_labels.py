"""A request gets one label about the KV that it read, and metrics count it once."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.tokenizer_manager import ServerStatus
from standins import request as in_queue

from cachetree.ids import ModelId
from cachetree.names import ModelNames
from cachetree.planning import PrefillCost
from sglang_droidspeak.cost import Meter
from sglang_droidspeak.engine import asking, prefixes
from sglang_droidspeak.engine.names import ForwardMode
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.request import forward
from sglang_droidspeak.request.meta_info import KEY, RequestProvenance
from sglang_droidspeak.request.report import Labels, must_stay_exact


class Counts:
    """A stand-in for the metrics."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_approximate = self.num_approximate_tokens = 0

    def count_outcome(self, outcome: str, *, exact: bool, num_approximate: int) -> None:
        self.outcomes[outcome] += 1
        self.num_approximate += not exact
        self.num_approximate_tokens += num_approximate


request = partial(in_queue, extend_end=3)
"""Make a request that has been admitted."""


def reused(**fields: Any) -> RequestProvenance:
    return RequestProvenance(outcome="reused", reused_tokens=64, **fields)


def told(req: Any) -> RequestProvenance | None:
    entry = (req.customized_info or {}).get(KEY)
    return None if entry is None else RequestProvenance(**entry[0])


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def labels(counts: Counts) -> Labels:
    return Labels(counts, ModelNames())  # type: ignore[arg-type]


def test_a_label_is_told_once_and_stays(labels, counts):
    req = request(customized_info={"other": [1]})
    labels.note(req, RequestProvenance(outcome="no_slots"))
    labels.note(req, reused())
    labels.report([req])
    labels.note(req, RequestProvenance(outcome="no_match"))
    prefixes.move(req, approximate=True)
    labels.report([req])
    assert told(req) == reused()
    assert req.customized_info["other"] == [1]
    assert counts.outcomes == {"reused": 1}


def test_it_waits_for_the_end_of_the_prefill(labels, counts):
    chunked, retracted = request(), request(is_retracted=True)
    labels.report([chunked, retracted], chunked)
    assert (told(chunked), told(retracted), counts.outcomes) == (None, None, {})


def test_an_answer_names_the_sender_where_the_server_knows_its_name(counts):
    names, known, other = ModelNames(), ModelId("a" * 32), ModelId("b" * 32)
    names.call(known, "base")
    labels = Labels(counts, names)  # type: ignore[arg-type]
    for sender, name, said in ((known, "base", "base (aaaaaaaa)"), (other, None, other)):
        req = request()
        labels.note(req, reused(sender=sender, detail=f"of {sender}"))
        labels.report([req])
        assert (told(req).sender_name, told(req).detail) == (name, f"of {said}")


@pytest.mark.parametrize("is_approximate", [False, True])
def test_it_is_exact_where_what_it_read_was(labels, counts, is_approximate):
    """The outcome of the request's plan does not decide: its namespace may have another model's
    KV."""
    req = request()
    labels.note(req, RequestProvenance(outcome="no_match"))
    prefixes.move(req, approximate=is_approximate)
    labels.report([req])
    assert told(req) == RequestProvenance(outcome="no_match", exact=not is_approximate)
    assert counts.num_approximate == is_approximate


@pytest.mark.parametrize("num_answered", [0, 2])
def test_the_servers_own_requests_are_told_and_not_counted(labels, counts, num_answered):
    req = request()
    req.sampling_params.custom_params = {asking.ANSWERED: num_answered}
    labels.note(req, RequestProvenance(outcome="off"))
    labels.report([req])
    assert told(req) == RequestProvenance(outcome="off")
    assert (counts.outcomes, dict(labels.answered)) == ({}, {})


@pytest.mark.parametrize(
    ("status", "has_http", "is_counted"),
    [("Starting", True, False), ("Up", True, True), ("Starting", False, True)],
)
def test_requests_of_sglangs_warm_up_are_not_counted(labels, counts, status, has_http, is_counted):
    """SGLang marks the warm-up only by its own status. Without HTTP the status never becomes Up."""
    manager, sent = SimpleNamespace(server_status=ServerStatus[status]), object()
    alone = {"temperature": 0, "custom_params": {KEY: {"mode": "off"}}}
    for params in (alone, [{"temperature": 0}, alone.copy()], None, "x"):
        obj = GenerateReqInput(text="The capital", sampling_params=params)
        asking.mark_warm_up(manager, obj, sent if has_http else None)
        for one in params if isinstance(params, list) else [params]:
            if isinstance(one, dict):
                req = request()
                req.sampling_params.custom_params = one.get("custom_params")
                labels.report([req])
    assert counts.outcomes.total() == 3 * is_counted
    assert alone["custom_params"][KEY] == {"mode": "off"}


def test_a_request_that_never_invokes_its_adapter_says_so_and_is_counted():
    metrics = Metrics(enabled=False)
    labels, req, other = Labels(metrics, ModelNames()), request(), request()
    prefixes.ask_base(req)
    labels.report([req, other])
    assert (told(req).not_invoked, told(other).not_invoked) == (True, False)
    assert sample(metrics.not_invoked) == 1


@pytest.mark.parametrize("custom", [{"droidspeak_answered": 2}, 5, "x", [1], None], ids=str)
def test_a_users_request_is_counted_whatever_its_custom_params(labels, counts, custom):
    req = request()
    req.sampling_params.custom_params = custom
    labels.note(req, RequestProvenance(outcome="off"))
    labels.report([req])
    assert counts.outcomes == {"off": 1} and "r1" in labels.answered
    assert asking.num_answered(req) == 0


def test_a_long_id_is_neither_kept_nor_logged(labels, counts, caplog):
    caplog.set_level(logging.INFO, "droidspeak.request")
    for rid in ("r" * 256, "a\nb" * 9999):
        req = request(rid)
        detail = "no profile with sender \x1b[2J\nrid=r2"  # Which a peer has said.
        labels.note(req, RequestProvenance(outcome="fallback: SlowLink", detail=detail))
        labels.report([req])
    assert counts.outcomes == {"fallback: SlowLink": 2}
    assert [*labels.answered] == ["r" * 256]
    assert len(caplog.messages) == 2
    assert all(it.isprintable() and len(it) < 400 for it in caplog.messages)


@pytest.mark.long
def test_what_a_server_starts_knows_its_own_requests_and_no_other_server_does():
    own: Any = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={asking.ANSWERED: 2}))
    with multiprocessing.get_context("spawn").Pool(1) as started:
        assert started.apply(asking.num_answered, [own]) == 2
    command = "from sglang_droidspeak.engine.asking import ANSWERED; print(ANSWERED)"
    process = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    assert process.stdout.decode().split()[-1] != asking.ANSWERED


def test_metrics_say_how_much_is_approximate_and_which_pairs_are_on():
    metrics = Metrics(enabled=False)
    for exact in (True, False, True):
        metrics.count_outcome("reused", exact=exact)
    assert sample(metrics.approximate) == 1
    profiles: Any = {
        ("s", "r"): SimpleNamespace(is_usable=True),
        ("s", "q"): SimpleNamespace(is_usable=False),
    }
    metrics.tell_pairs(profiles)
    assert samples(metrics.pair_usable) == {("s", "r"): 1}, "a profile that failed alerts nobody"
    metrics.tell_pairs({("s", "r"): SimpleNamespace(is_usable=False)})  # type: ignore[dict-item]
    assert samples(metrics.pair_usable) == {("s", "r"): 0}, "the drift guard took it out"
    metrics.tell_pairs(profiles, are_off=True)
    metrics.tell_pairs(profiles)
    assert samples(metrics.pair_usable) == {("s", "r"): 0}, "nothing is in service that is off"


def samples(metric: Any) -> dict[tuple[str, ...], float]:
    (family,) = metric.collect()
    return {tuple(it.labels.values()): it.value for it in family.samples}


def sample(metric: Any) -> float:
    (family,) = metric.collect()
    return family.samples[0].value


def test_whatever_ends_without_an_answer_is_counted_once(labels, counts):
    queued, running = request(), request(finished_reason=FINISH_ABORT("too long"))
    failed = request(to_finish=FINISH_ABORT("its grammar"))
    labels.note(queued, RequestProvenance(outcome="no_match"))
    for _ in range(2):
        labels.aborted(None, None, queued)
        labels.report([running, failed])
    assert counts.outcomes == {"aborted": 3}


def test_what_was_aborted_after_it_read_says_so_and_is_counted_as_aborted(labels, counts):
    early, late = request(finished_reason=FINISH_ABORT()), request()
    labels.note(early, reused())
    labels.report([early, late])
    late.finished_reason = FINISH_LENGTH(length=8)
    labels.report([late])
    of_early = told(early)
    assert of_early and of_early.outcome == "reused"
    assert counts.outcomes == {"aborted": 1, "error": 1}, "no plan was made for the second one"


def test_an_experiments_answer_is_not_exact_whoever_may_read_its_kv(labels):
    """An experiment reads in the namespace of exact KV, and leaves nothing there."""
    req = request()
    labels.note(req, reused(exact=False))
    labels.report([req])
    assert told(req) == reused(exact=False)
    assert not must_stay_exact(req)


@pytest.mark.parametrize(("extend_end", "is_exact"), [(None, True), (2, False)])
def test_what_was_aborted_before_it_read_anything_is_exact(labels, counts, extend_end, is_exact):
    """A request in the queue has read nothing. A request in the middle of its prefill has read KV
    of SGLang's tree."""
    req = request(extend_end=extend_end)
    prefixes.move(req, approximate=True)
    prefixes.note_approximate(req, 2)
    labels.aborted(None, None, req)
    num_read = 0 if is_exact else 2
    assert told(req) == RequestProvenance(
        outcome="aborted", exact=is_exact, approximate_tokens=num_read
    )
    assert counts.num_approximate == counts.num_approximate_tokens == 0, "nobody has its answer"


def test_health_probes_are_nobodys_requests(labels, counts):
    probe = request("HEALTH_CHECK_17")
    labels.note(probe, RequestProvenance(outcome="no_match"))
    labels.report([probe])
    assert (told(probe), counts.outcomes) == (None, {})


def test_samples_say_what_was_read_for_all_of_them(labels, counts):
    """If `n` is above 1, SGLang prefills the prompt in a request of its own. Other requests answer,
    and find the KV on the device."""
    warming, samples = request(n=2, max_new_tokens=0), [request(n=2), request(n=2)]
    labels.note(warming, reused(exact=False))
    prefixes.move(warming, approximate=True)
    labels.report([warming])
    assert not counts.outcomes
    for req in samples:
        labels.note(req, RequestProvenance(outcome="too_short"))
        prefixes.move(req, approximate=True)
    labels.report(samples)
    assert [told(req) for req in samples] == [reused(exact=False)] * 2
    other = request(n=2, cache_salt="bob")
    labels.note(other, RequestProvenance(outcome="no_match"))
    labels.report([other])
    assert counts.outcomes == {"reused": 2, "no_match": 1}


def test_a_sample_that_has_computed_its_prompt_says_so(labels, counts):
    """An experiment loads KV only for the first request, so the others do not have it."""
    warming, sample = request(n=2, max_new_tokens=0), request(n=2)
    labels.note(warming, reused(exact=False))
    labels.report([warming])
    labels.note(sample, RequestProvenance(outcome="fallback: StaleEntry"))
    labels.report([sample])
    assert told(sample) == RequestProvenance(outcome="fallback: StaleEntry")
    assert counts.outcomes == {"fallback: StaleEntry": 1}


@pytest.mark.parametrize("exact", [False, True])
def test_a_sample_that_read_other_kv_than_the_first_says_so(labels, exact):
    """The sample is judged by its own namespace, not by that of the request that ran the
    prefill."""
    warming, sample = request(n=2, max_new_tokens=0), request(n=2)
    labels.note(warming, reused(exact=not exact))
    labels.report([warming])
    labels.note(sample, RequestProvenance(outcome="too_short"))
    prefixes.move(sample, approximate=not exact)
    labels.report([sample])
    assert told(sample) == RequestProvenance(outcome="too_short", exact=exact)


def test_a_sample_says_what_was_read_by_its_own_controls(labels, counts):
    """Two requests ask for one prompt at the same time, and one of them forbids reuse."""
    read = {"auto": reused(), "off": RequestProvenance(outcome="off")}
    for mode, provenance in read.items():
        ask(labels, mode, provenance, max_new_tokens=0)
    for mode, own in (("auto", "too_short"), ("off", "off")):
        req = ask(labels, mode, RequestProvenance(outcome=own))
        assert told(req) == read[mode]
    failed = RequestProvenance(outcome="fallback: StaleEntry")
    assert told(ask(labels, "auto", failed)) == failed
    assert counts.outcomes == {"reused": 1, "off": 1, "fallback: StaleEntry": 1}


def ask(labels: Labels, mode: str, provenance: RequestProvenance, max_new_tokens: int = 8) -> Any:
    """Make one of several samples, or the request that SGLang prefills for all of them."""
    req = request(n=2, max_new_tokens=max_new_tokens)
    req.sampling_params.custom_params = {"droidspeak": {"mode": mode}, "__req__": object()}
    labels.note(req, provenance)
    labels.report([req])
    return req


def test_a_reuse_that_became_a_full_prefill_is_logged(labels, caplog):
    caplog.set_level(logging.INFO, "droidspeak.request")
    for outcome in ("reused", "no_match", "fallback: StaleEntry"):
        req = request()
        labels.note(req, RequestProvenance(outcome=outcome, overlap=0.5))
        labels.report([req])
    (line,) = [record.getMessage() for record in caplog.records]
    fields = dict(field.split("=", 1) for field in line.split())
    assert (fields["rid"], fields["outcome"], fields["overlap"]) == (
        "r1",
        "fallback:StaleEntry",
        "0.5",
    )


@pytest.mark.parametrize("num_before", [0, 32])
def test_who_reads_nothing_approximate_leaves_exact_kv(monkeypatch, num_before):
    """If there is no room for its load in the end, a request computes everything itself."""
    monkeypatch.setattr(forward, "PartialPrefill", lambda *_: None)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 64)))
    settings = SimpleNamespace(forward_wait_s=0.05, recompute_attention="server")
    server = SimpleNamespace(identity=SimpleNamespace(num_layers=4), settings=settings)
    parts: dict[str, Any] = dict.fromkeys(("loader", "labels"))
    forwards = forward.BatchForward(
        attachment=SimpleNamespace(  # type: ignore[arg-type]
            runner=runner, e_pool=None, stack=None, server=server
        ),
        meter=Meter("cpu", 4, 64, PrefillCost(token_s=1.0, context_s=0.0)),
        ranks=Ranks(None),
        **parts,
    )
    req = request()
    prefixes.move(req, approximate=True)
    batch = SimpleNamespace(
        reqs=[req],
        prefix_lens=[num_before],
        forward_mode=ForwardMode.EXTEND,
        hicache_consumer_index=-1,
        extend_lens=[16],
    )
    assert forwards.run_batch(lambda _worker, _batch: "done", None, batch) == "done"
    assert prefixes.is_approximate(req) == bool(num_before)
