"""Does a profile's verdict hold on other data? The frontier is measured again and judged anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from cachetree import ModelIdentity, ProfileError
from cachetree.corrections import Correction
from profiles.compute.journal import temporary_journal
from profiles.compute.models import Pair
from profiles.compute.study import HELD_OUT, Bench
from profiles.data.documents import Document, data_files
from profiles.evidence import FrontierPoint, MeasuredProfile, Split
from profiles.profiler import Stage, answerers, judge_all, load_documents, open_pair
from profiles.settings import Settings
from profiles.stats.artifact import Data, losses_of, split_of
from profiles.stats.choice import qualities_of
from profiles.stats.gate import interval, verdict
from profiles.stats.measured import Candidate


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What other data say about a profile."""

    split: Split
    plans: tuple[FrontierPoint, ...]
    """The profile's frontier, on these data."""
    passed: bool
    """The gate, on these data."""
    reason: str
    holds: bool
    """Whether that is the profile's verdict too."""


def verify_profile(
    profile: MeasuredProfile,
    settings: Settings,
    console: Console,
    corrections: Mapping[str, Correction],
) -> Verification:
    """Judge a profile's plans on `settings.data`, all of it, with its maps by digest.

    Raises ProfileError where the models are not the profile's, naming the field, and where a
    context is the profile's.
    """
    pair = open_pair_of(profile, settings)
    positions = pair.receiver.config.max_position_embeddings
    sources, documents = load_documents(settings, settings.data, pair.tokenizer, positions)
    _require_unseen(profile, documents)
    memory = settings.max_memory_gb, settings.max_device_memory_gb
    sender, receiver = answerers(pair, documents, *memory)
    candidates = [Candidate(runs=(it.block,), e_map=it.e_map) for it in profile.frontier]
    with temporary_journal() as journal:
        bench = Bench(sender=sender, receiver=receiver, journal=journal, corrections=corrections)
        stage = Stage(split=HELD_OUT, title="judging", candidates=candidates)
        judged = judge_all(bench, documents, stage, profile.costs, console)
    data = Data(files=data_files(sources, documents), documents=documents)
    split = split_of(data, judged.sender, judged.full_prefill, judged.full_reuse)
    plans = {}
    for point, candidate in zip(profile.frontier, candidates, strict=True):
        qualities = qualities_of(judged.candidates[candidate])
        plans[candidate] = msgspec.structs.replace(
            point,
            held_out=interval(qualities),
            tasks=losses_of(documents, judged.full_prefill, qualities, profile.tolerance),
        )
    passed, reason = verdict(_asked(profile, plans), split, profile.tolerance)
    return Verification(
        split=split,
        plans=tuple(plans.values()),
        passed=passed,
        reason=reason,
        holds=passed == profile.passed,
    )


def open_pair_of(profile: MeasuredProfile, settings: Settings) -> Pair:
    """Both models, loaded as the settings say; raises ProfileError where they are others."""
    pair = open_pair(settings)
    _require_same("sender", profile.sender, pair.sender_identity)
    _require_same("receiver", profile.receiver, pair.receiver_identity)
    return pair


def _asked(
    profile: MeasuredProfile, plans: Mapping[Candidate, FrontierPoint]
) -> Sequence[FrontierPoint]:
    """The recommended plan; where there is none, the first that was tried: the verdict holds where
    that one fails."""
    best = profile.recommended
    if best is not None:
        return [plans[Candidate(runs=(best.block,), e_map=best.e_map)]]
    return [[*plans.values()][place] for place in profile.order[:1]]


def _require_same(role: str, expected: ModelIdentity, found: ModelIdentity) -> None:
    for field in expected.__struct_fields__:
        ours, theirs = getattr(expected, field), getattr(found, field)
        if ours != theirs:
            raise ProfileError(
                f"--{role} is not the profile's {role}: {field} is {theirs!r}, and {ours!r} in the "
                "profile; give the models that were profiled, or profile these"
            )


def _require_unseen(profile: MeasuredProfile, documents: Sequence[Document]) -> None:
    known = {*profile.train.contexts, *profile.held_out.contexts}
    seen = sum(it.context in known for it in documents)
    if seen:
        raise ProfileError(
            f"{seen} of {len(documents)} contexts ({seen / len(documents):.0%}) are the profile's "
            "own; verify on others"
        )
