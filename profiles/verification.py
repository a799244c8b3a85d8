"""Does a profile's verdict hold on other data? The frontier is measured again and judged anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from rich.console import Console

from cachetree.errors import ProfileError
from cachetree.evidence import DataFile, Interval, MeasuredProfile
from cachetree.family import ModelIdentity
from cachetree.profile import Recipe
from profiles.artifact import qualities_of
from profiles.documents import data_files
from profiles.forecast import judging_s
from profiles.gate import interval, loss, verdict
from profiles.journal import temporary_journal
from profiles.judging import Candidate
from profiles.profiler import Settings, answerers, judge_all, load_documents, open_pair
from profiles.study import Bench


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What other data say about a profile."""

    num_contexts: int
    num_questions: int
    full_prefill: Interval
    full_reuse: Interval
    losses: dict[str, Interval]
    """Of every plan of the frontier, by its `str`."""
    passed: bool
    """The gate, on these data."""
    reason: str
    holds: bool
    """Whether that is the profile's verdict too."""


def verify_profile(profile: MeasuredProfile, settings: Settings, console: Console) -> Verification:
    """Judge a profile's blocks on `settings.data`, all of it.

    Raises ProfileError where the models are not the profile's, naming the field.
    """
    pair = open_pair(settings)
    _require_same("sender", profile.sender, pair.sender_identity)
    _require_same("receiver", profile.receiver, pair.receiver_identity)
    positions = pair.receiver.config.max_position_embeddings
    sources, documents = load_documents(settings, settings.data, pair.tokenizer, positions)
    _require_unseen(profile, data_files(sources, documents))
    sender, receiver = answerers(pair, documents, settings.max_memory_gb)
    candidates = {it.recipe: Candidate(runs=it.recipe.runs) for it in profile.frontier}
    with temporary_journal() as journal:
        bench = Bench(sender=sender, receiver=receiver, journal=journal)
        judging = judging_s(documents, profile.costs)
        judged = judge_all(bench, documents, list(candidates.values()), judging, console)
    full = interval(judged.full_prefill)
    losses = {
        recipe: loss(judged.full_prefill, qualities_of(judged.candidates[candidate]))
        for recipe, candidate in candidates.items()
    }
    recipe = _judged(profile, losses)
    passed, reason = verdict(recipe, losses.get(recipe), full, profile.tolerance)
    return Verification(
        num_contexts=len(documents),
        num_questions=sum(len(document.questions) for document in documents),
        full_prefill=full,
        full_reuse=interval(qualities_of(judged.full_reuse)),
        losses={str(recipe): it for recipe, it in losses.items()},
        passed=passed,
        reason=reason,
        holds=passed == profile.passed,
    )


def _judged(profile: MeasuredProfile, losses: Mapping[Recipe, Interval]) -> Recipe | None:
    """The recommended plan; where there is none, the one short of all layers that loses least: the
    verdict holds where even that one loses too much."""
    if profile.recommended is not None:
        return profile.recommended.recipe
    smaller = [it for it in losses if len(it.block) < profile.receiver.num_layers]
    return min(smaller, key=lambda it: losses[it].mean, default=None)


def _require_same(role: str, expected: ModelIdentity, found: ModelIdentity) -> None:
    for field in expected.__struct_fields__:
        ours, theirs = getattr(expected, field), getattr(found, field)
        if ours != theirs:
            raise ProfileError(
                f"--{role} is not the profile's {role}: {field} is {theirs!r}, and {ours!r} in the "
                "profile; give the models that were profiled, or profile these"
            )


def _require_unseen(profile: MeasuredProfile, files: Iterable[DataFile]) -> None:
    known = {file.sha256: file.name for file in (*profile.train.files, *profile.held_out.files)}
    for file in files:
        if file.sha256 in known:
            raise ProfileError(
                f"data {file.name} are the profile's own ({known[file.sha256]}); verify on others"
            )
