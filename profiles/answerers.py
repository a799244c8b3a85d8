"""Prepare models to answer questions in batches that fit into memory, and time them. Also measure
the smaller model of `--small`, with which a profile compares reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from profiles.compute.examination import Answerer
from profiles.compute.layered import LayeredModel, check_layers
from profiles.compute.models import ModelSource, Pair, load_model, load_tokenizer
from profiles.compute.room import Sizes, bounds_of, make_room
from profiles.costs import Repeats, choose_lengths, measure_costs, trusted
from profiles.data.documents import Document, mean_lengths
from profiles.evidence import Baseline, BaselineKind, CostModel
from profiles.progress import shown
from profiles.settings import Settings, choose_device
from profiles.stats.artifact import Data, interval_of

SAMPLE_TOKENS: Final = 64


def answerers(
    pair: Pair,
    documents: Sequence[Document],
    host_gb: float | None = None,
    device_gb: float | None = None,
) -> tuple[Answerer, Answerer]:
    """Prepare sender and receiver, with batches that fit into the stated memory. If none is stated,
    they fit into the free memory."""
    stated = pair.tokenizer, documents, pair.num_layers, (host_gb, device_gb)
    return answerer_of(pair.sender, *stated), answerer_of(pair.receiver, *stated)


def answerer_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    num_mixtures: int = 1,
    memory_gb: tuple[float | None, float | None] = (None, None),
) -> Answerer:
    """Prepare a model to answer over `num_mixtures` mixtures of KV at a time. `memory_gb` has the
    limits in GiB for host and device."""
    layered, first = LayeredModel(model), documents[0]
    sample = *first.prefix[:SAMPLE_TOKENS], *first.questions[0].suffix[:SAMPLE_TOKENS]
    check_layers(layered, sample)
    bounds = bounds_of(*memory_gb, layered.device)
    room = make_room(Sizes.of(layered), documents, num_mixtures, bounds)
    return Answerer(model=layered, tokenizer=tokenizer, ends=ends_of(model, tokenizer), room=room)


def time_costs(
    model: LayeredModel,
    role: str,
    documents: Sequence[Document],
    settings: Settings,
    console: Console,
) -> CostModel:
    """Time the model, and return a cost model for these documents' lengths. Raises ConfigError if
    the cost model's error is too large. `timing_seconds` 0 accepts any error."""
    positions = model.model.config.max_position_embeddings
    num_suffix = round(mean_lengths(documents)[1])
    longest = max(len(it.prefix) for it in documents)
    left = positions - 2 * num_suffix
    lengths, others = choose_lengths(longest, left, settings.page_size, role)
    budget_s = settings.timing_seconds
    console.print(f"timing the {role}, to forecast all that follows", highlight=False)

    def measure() -> CostModel:
        done_s = 0.0
        with shown(console, "timing", budget_s) as done:

            def progress(share: float) -> None:
                nonlocal done_s
                done(share * budget_s - done_s)
                done_s = share * budget_s

            return measure_costs(
                model,
                lengths=lengths,
                held_out_lengths=others,
                num_suffix=num_suffix,
                progress=progress,
                repeats=Repeats(budget_s=budget_s),
            )

    return trusted(measure, role) if budget_s else measure()


def measure_small(
    settings: Settings,
    held_out: Data,
    documents: Sequence[Document],
    costs: CostModel,
    console: Console,
) -> Baseline:
    """Measure a smaller model's answers to these documents' held-out questions, by full prefill.
    The receiver's cost model `costs` turns the smaller model's time into a number of layers."""
    source, device = ModelSource(path=settings.small), choose_device(settings.device)
    model = load_model(source, dtype=getattr(torch, settings.dtype), device=device)
    tokenizer = load_tokenizer(source)
    answerer = answerer_of(model, tokenizer, documents, memory_gb=settings.memory_gb)
    own = time_costs(answerer.model, "smaller model", documents, settings, console)
    seconds = [own.full_prefill_s(len(it.prefix), 0) for it in documents]
    qualities = []
    with shown(console, "smaller model", sum(seconds)) as done:
        for document, document_s in zip(documents, seconds, strict=True):
            answers = answerer.answer(document, answerer.model.prefix(document.prefix, ()).kv)
            qualities.append([answerer.quality(document, i, it) for i, it in enumerate(answers)])
            done(document_s)
    ttft_s = own.full_prefill_s(*map(round, mean_lengths(documents)))
    share = ttft_s / costs.full_prefill_s(*map(round, mean_lengths(held_out.documents)))
    return Baseline(
        kind=BaselineKind.SMALL_MODEL,
        recomputed_layers=round(share * costs.num_layers, 4),
        runs=(),
        quality=interval_of(documents, qualities),
        fidelity=None,
        ttft_s=ttft_s,
    )


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer."""
    ends = {tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        ends |= (
            {*config.eos_token_id}
            if isinstance(config.eos_token_id, list)
            else {config.eos_token_id}
        )
    return frozenset(ends - {None})
