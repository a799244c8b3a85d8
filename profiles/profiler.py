"""Make a profile of a pair of models from a data set: measure, choose, judge (§4.2, §5.4).

    data ─► train ─► every block by KL ─► the best ones by the metric
          held out ─► judge the frontier and the baselines ─► gate ─► profile

A journal beside the profile has all measurements until the profile is written. So the same command
continues after a stop.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
import transformers
from rich.console import Console

from cachetree import ConfigError, Span, write_profile
from cachetree.corrections import write_corrections
from cachetree.planning import PROFILE_VERSION as VERSION
from profiles.answerers import answerer_of, answerers, measure_small, time_costs
from profiles.compute.examination import Answerer
from profiles.compute.journal import Journal, Timed
from profiles.compute.measuring import (
    comparing_steps,
    judging_steps,
    places_swept,
    sweep_steps,
)
from profiles.compute.models import (
    Pair,
    load_line,
    load_pair,
    load_tokenizer,
    look_at_pair,
)
from profiles.compute.room import Sizes, bounds_of, require_fitting
from profiles.compute.study import HELD_OUT, TRAIN, Bench
from profiles.controls import measure_controls
from profiles.data.documents import Document, Tokens, by_task, first_of_each_task, key_of
from profiles.environment import read_environment, slow_dtype
from profiles.evidence import CostModel, Making, MeasuredProfile
from profiles.forecast import Forecast, spoken
from profiles.line import asked_of_each, line_of, models_by_task, with_line
from profiles.settings import Settings, choose_device
from profiles.splits import (
    hardly_enough,
    load_fitted_on,
    load_held_out_of_small,
    load_splits,
    with_answers_of,
)
from profiles.stats.artifact import Data, Findings, best_of, build, split_of
from profiles.stats.choice import (
    MOST_SHARE,
    Choice,
    baselines,
    choose,
    default_group,
    grid,
    sensitive_first,
    shortlist,
)
from profiles.stats.gate import contexts_lacking, proven
from profiles.stats.measured import NO_BLOCK, Candidate, Measured
from profiles.watched import Watched, correct, refine

_DECISIVE: Final = ("dtype", "group", "pruned")
"""Settings that change measurements, in addition to models, documents and devices."""
PACKAGES: Final = ("sglang-droidspeak", "torch", "transformers")


@dataclass
class Shared:
    """Results that are measured once for all pairs with the same receiver."""

    costs: CostModel | None = None
    """Cost model of the receiver. None until it is timed."""
    splits: tuple[Data, Data] | None = None
    """Training and held-out documents. None until they are loaded."""
    answers: dict[str, list[Tokens]] = field(default_factory=dict)
    """The receiver's answers by full prefill. Keys are documents."""


def profile_pair(
    settings: Settings, console: Console, shared: Shared | None = None
) -> MeasuredProfile:
    """Measure a pair and write its profile to `settings.out`.

    Raises CacheTreeError or RecordError with a message for people.
    """
    began = time.monotonic()
    require_place(settings.out)
    device, _ = settings.devices()
    # A run over several pairs has said it before its forecast.
    slow = () if shared else slow_dtype(dtype_of(settings), device)
    shared = shared or Shared()
    theirs, ours = look_at_pair(*settings.pair)
    line = line_of(settings.sources) if settings.line else None
    tokenizer, positions = load_tokenizer(ours.source), ours.config.max_position_embeddings
    train, held_out = shared.splits or load_splits(settings, tokenizer, positions)
    for note in (*slow, *train.notes, *hardly_enough(held_out, settings.tolerance)):
        console.print(note, highlight=False, soft_wrap=True)
    fitted_on = load_fitted_on(settings, train, held_out, tokenizer, positions)
    asked_of_small = load_held_out_of_small(settings, held_out)
    pairs = open_pairs(settings)
    pair, tasks = pairs[-1], Data(files=(), documents=[*train.documents, *held_out.documents])
    if line is not None:
        train, held_out = asked_of_each(train, line), asked_of_each(held_out, line)
    documents = [*train.documents, *held_out.documents]
    num_contexts = len({it.context for it in documents})
    group = settings.group or default_group(pair.num_layers)
    blocks = blocks_of(settings, pair.num_layers)
    answering = [*answerers(pairs[0], documents, *settings.memory_gb)]
    for later in pairs[1:]:
        model, memory = later.receiver, settings.memory_gb
        answering.append(answerer_of(model, later.tokenizer, documents, later.num_layers, memory))
    sender, receiver = answering[-2:]
    if settings.e_correction:
        num_maps = len({it.start for it in blocks if it.start})
        bounds = bounds_of(*settings.memory_gb, receiver.model.device)
        require_fitting(Sizes.of(receiver.model), fitted_on, num_maps, bounds)
    models = (pairs[0].sender_identity, *(it.receiver_identity for it in pairs))
    journal = open_journal(settings, answering, models, train.documents)
    held_out = replace(held_out, documents=in_judged_order(held_out.documents, journal, settings))
    if journal.costs is None:
        if shared.costs is None:
            shared.costs = time_costs(receiver.model, "receiver", documents, settings, console)
        journal.put(Timed(costs=shared.costs))
    forecast = Forecast(journal.costs, receiver.model.head_layers)
    least_s, most_s = forecast.both(
        train.documents, held_out.documents, blocks, settings, fitted_on
    )
    console.print(
        f"{pair.num_layers} layers, {len(blocks)} blocks, {num_contexts} contexts, "
        f"about {spoken(least_s, most_s)}",
        highlight=False,
        soft_wrap=True,
    )
    before_s = journal.seconds
    by_task = models_by_task(tasks, line, answering) if line is not None else {}
    answers = shared.answers
    bench = Bench(sender=sender, receiver=receiver, journal=journal, answers=answers, pairs=by_task)
    watched = Watched(bench, forecast, console)
    steps = sweep_steps(train.documents, blocks, pair.num_layers, pruned=settings.pruned)
    swept = watched.measure("measuring", TRAIN, train.documents, steps)
    places = places_swept(train.documents, pruned=settings.pruned)
    first = Data(files=(), documents=[train.documents[it] for it in places])
    for task in split_of(first, swept).tasks:
        if task.full_prefill <= 0:
            console.print(
                f"the receiver alone answers nothing of {task.name or 'the data'} right so far; "
                "check data, template and metric",
                highlight=False,
                soft_wrap=True,
            )
    candidates = [*([NO_BLOCK] if line is not None else []), *shortlist(swept, settings.plans)]
    if settings.e_correction:
        ends = {it.block.stop for it in candidates}
        most = MOST_SHARE * pair.num_layers
        late = [it for it in blocks if it.start and it.stop in ends and len(it) <= most]
        watched, corrected = correct(watched, train.documents, fitted_on, late, settings)
        candidates += corrected
    steps = judging_steps(train.documents, candidates, pair.num_layers)
    tried = watched.measure("choosing", TRAIN, train.documents, steps)
    choice = chosen(candidates, tried, train.documents, settings)
    if group > 1:
        near = refine(watched, train.documents, choice, candidates, settings)
        steps = judging_steps(train.documents, near, pair.num_layers)
        candidates += near
        more = watched.measure("refining", TRAIN, train.documents, steps)
        tried = replace(tried, candidates=tried.candidates | more.candidates)
        choice = chosen(candidates, tried, train.documents, settings)
    stated = settings.tolerance, settings.most_contexts
    judged = watched.judge(held_out.documents, choice.order, *stated)
    held_out = replace(held_out, documents=held_out.documents[: len(judged.full_prefill)])
    contexts = {it.context for it in held_out.documents}
    asked_of_small = [it for it in asked_of_small if it.context in contexts]
    best = best_of(choice, held_out.documents, judged, settings.tolerance)
    others = [it for it in choice.frontier if it not in choice.order]
    if line is None:
        others += baselines(choice.frontier, best, sensitive_first(swept.layers))
    steps = comparing_steps(held_out.documents, others, pair.num_layers)
    compared = watched.measure("comparing", HELD_OUT, held_out.documents, steps)
    judged = replace(judged, candidates=compared.candidates | judged.candidates)
    bench, small = watched.bench, None
    if settings.small is not None:
        judged_by = [bench.judged(HELD_OUT, it) for it in held_out.documents]
        asked_of_small = with_answers_of(judged_by, asked_of_small)
        small = measure_small(settings, held_out, asked_of_small, journal.costs, console)
    corrections = bench.corrections
    controls = measure_controls(
        bench, held_out.documents, judged.full_prefill, journal.costs, console
    )
    findings = Findings(
        sender=pair.sender_identity,
        receiver=pair.receiver_identity,
        names=settings.names or (theirs.source.name, ours.source.name),
        first_difference=pair.first_difference,
        train=train,
        held_out=held_out,
        costs=journal.costs,
        swept=swept,
        tried=tried,
        choice=choice,
        judged=judged,
        controls=controls,
        small=small,
    )
    made = _making(
        settings,
        journal,
        group,
        elapsed_s=before_s + time.monotonic() - began,
        sweep_passes=len({it.start for it in blocks}) + 1 + len(corrections),
        fitted=[it.context for it in fitted_on],
    )
    profile = build(findings, settings.tolerance, made)
    if line is not None:
        profile = with_line(profile, findings, line)
    write_corrections(profile, corrections, settings.out)
    write_profile(profile, settings.out)
    if is_open(profile):
        journal.close()
        console.print(
            "more held-out contexts could show more: with a larger --most-contexts, or with more "
            "contexts in its data, which then judge, the same command goes on from here",
            highlight=False,
            soft_wrap=True,
        )
    else:
        journal.remove()
    return profile


def blocks_of(settings: Settings, num_layers: int) -> list[Span]:
    """Return all blocks to compare by KL."""
    return grid(num_layers, settings.group or default_group(num_layers))


def dtype_of(settings: Settings) -> torch.dtype:
    return getattr(torch, settings.dtype)


def chosen(
    plans: Sequence[Candidate], tried: Measured, documents: Sequence[Document], settings: Settings
) -> Choice:
    """Choose the plans that the gate will try, among `plans` decoded on all training documents."""
    return choose(
        {it: tried.candidates[it] for it in plans},
        tried.full_prefill,
        [*by_task(documents).values()],
        settings.tolerance,
        settings.plans,
        settings.most_contexts,
    )


def in_judged_order(
    documents: Sequence[Document], journal: Journal, settings: Settings
) -> list[Document]:
    """Return the documents that judge, at most `settings.most_contexts` of each task. First come
    those that an earlier run has used, in its order: results must not change the order."""
    known = {key: place for place, key in enumerate(journal.documents(HELD_OUT))}
    ordered = sorted(documents, key=lambda it: known.get(key_of(it), len(known)))
    return [ordered[it] for it in first_of_each_task(ordered, settings.most_contexts)]


def is_open(profile: MeasuredProfile) -> bool:
    """Return whether the first plan that failed, in the gate's order, could pass with more held-out
    contexts."""
    plans = [profile.frontier[it] for it in profile.order]
    unproven = plans[len(proven(plans, profile.tolerance)) :]
    lacking = (contexts_lacking(it, profile.held_out, profile.tolerance) for it in unproven[:1])
    return any(it is not None for it in lacking)


def require_place(out: Path) -> None:
    """Raise ConfigError if `out`, or the journal and the maps beside it, cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folders = out.parent, out.resolve().parent
    if (out.exists() and not out.is_file()) or not all(os.access(it, os.W_OK) for it in folders):
        raise ConfigError(
            f"{out} cannot be a profile; give a file in a folder that can be written to"
        )


def open_pairs(settings: Settings) -> list[Pair]:
    """Load both models as the settings say, or all models of a line."""
    transformers.utils.logging.disable_progress_bar()
    device, sender_device = settings.devices()
    dtype = dtype_of(settings)
    if settings.line:
        return load_line(settings.sources, dtype=dtype, device=device)
    return [load_pair(*settings.pair, dtype=dtype, device=device, sender_device=sender_device)]


def open_journal(settings: Settings, answering: Sequence[Answerer], *measured: object) -> Journal:
    """Open the journal of a run. Its name is a digest of everything that decides the measurements:
    the documents in tokens, the models, and the tokens that end their answers."""
    ends = [sorted(it.ends) for it in answering]
    chosen = [getattr(settings, it) for it in _DECISIVE]
    chosen += map(str, settings.devices())
    versions = VERSION, str(torch.__version__), transformers.__version__
    return Journal.beside(settings.out, measured, ends, chosen, versions)


def _making(
    settings: Settings,
    journal: Journal,
    group: int,
    *,
    elapsed_s: float,
    sweep_passes: int,
    fitted: Sequence[str],
) -> Making:
    environment, device = read_environment(PACKAGES), choose_device(settings.device)
    return Making(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=settings.command,
        versions=environment.versions,
        hardware=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{environment.processor}, {torch.get_num_threads()} of {environment.num_cores} cores",
        device=str(device),
        dtype=settings.dtype,
        seed=settings.seed,
        held_out_share=settings.held_out_share,
        group=group,
        page_size=settings.page_size,
        template=settings.template or "",
        metric=settings.options.metric,
        chat=settings.chat,
        max_new=settings.max_new or 0,
        max_prompt_tokens=settings.max_prompt_tokens,
        fitted=tuple(fitted) if settings.fit_data else (),
        e_correction=settings.e_correction,
        pruned=settings.pruned,
        prefix_passes=journal.num_passes,
        sweep_passes_per_context=sweep_passes,
        elapsed_s=round(elapsed_s, 1),
    )
