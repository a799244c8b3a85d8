"""How far answers by a profile's plans are from full prefill's, which the drift guard allows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from cachetree import ProfileError, write_profile
from cachetree.corrections import Correction
from profiles.compute.examination import FIRST_TOKENS
from profiles.compute.journal import Journal
from profiles.compute.study import HELD_OUT, Bench
from profiles.evidence import MeasuredProfile
from profiles.profiler import Stage, answerers, judge_all, load_documents
from profiles.settings import Settings
from profiles.stats.artifact import tv_bound
from profiles.stats.measured import Candidate
from profiles.verification import open_pair_of

if TYPE_CHECKING:
    from profiles.data.documents import Document


def calibrate_profile(
    profile: MeasuredProfile,
    settings: Settings,
    console: Console,
    corrections: Mapping[str, Correction],
) -> MeasuredProfile:
    """Measure the `tv_bound` of its plans as the profiler does, on its own held-out contexts, and
    write the profile with it to `settings.out`. The same call goes on where one was stopped.

    Raises ProfileError where the models are not the profile's, naming the field, where it has no
    plan, and where `settings.data` lacks one of those contexts.
    """
    plans = {
        Candidate(runs=(it.block,), e_map=it.e_map): it
        for it in profile.blocks
        if len(it.block) < profile.receiver.num_layers
    }
    if not plans:
        raise ProfileError(f"the profile has no plan to calibrate: {profile.reason}")
    pair = open_pair_of(profile, settings)
    positions = pair.receiver.config.max_position_embeddings
    _, found = load_documents(settings, settings.data, pair.tokenizer, positions)
    documents = _begun(profile, found)
    memory = settings.max_memory_gb, settings.max_device_memory_gb
    sender, receiver = answerers(pair, documents, *memory)
    decisive = msgspec.json.encode((profile, settings.dtype, settings.device))
    digest = hashlib.sha256(decisive).hexdigest()[:12]
    journal = Journal(settings.out.with_name(f".{settings.out.name}.{digest}.jsonl"))
    bench = Bench(sender=sender, receiver=receiver, journal=journal, corrections=corrections)
    stage = Stage(split=HELD_OUT, title="calibrating", candidates=[*plans])
    judged = judge_all(bench, documents, stage, profile.costs, console)
    measured = {
        plan: msgspec.structs.replace(plan, tv_bound=tv_bound(judged.candidates[it]))
        for it, plan in plans.items()
    }
    calibrated = msgspec.structs.replace(
        profile,
        blocks=tuple(measured.get(it, it) for it in profile.blocks),
        recommended=profile.recommended and measured[profile.recommended],
    )
    write_profile(calibrated, settings.out)
    journal.remove()
    return calibrated


def _begun(profile: MeasuredProfile, found: Sequence[Document]) -> list[Document]:
    """Its held-out contexts, of whose answers only the beginning is asked."""
    held_out = {*profile.held_out.contexts}
    documents = [
        replace(it, task=replace(it.task, max_new=min(FIRST_TOKENS, it.task.max_new)))
        for it in found
        if it.context in held_out
    ]
    if missing := held_out - {it.context for it in documents}:
        raise ProfileError(
            f"{len(missing)} of the profile's {len(held_out)} held-out contexts are not in --data; "
            "give the data that it was judged on, asked with the same template"
        )
    return documents
