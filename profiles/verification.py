"""A profile's plans measured again: on other data, does its verdict hold? On its own, how far are
their answers from full prefill's, which the drift guard allows?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from rich.console import Console

from cachetree import ModelIdentity, ProfileError, write_profile
from cachetree.corrections import Correction
from cachetree.planning import BlockQuality
from profiles.compute.examination import FIRST_TOKENS, Answerer
from profiles.compute.journal import Journal, temporary_journal
from profiles.compute.measuring import judging_steps
from profiles.compute.models import load_tokenizer, look_at_pair
from profiles.compute.study import HELD_OUT, Bench
from profiles.data.documents import Document, data_files
from profiles.evidence import FrontierPoint, MeasuredProfile, Split
from profiles.forecast import Forecast
from profiles.profiler import Watched, answerers, open_journal, open_pair
from profiles.report import words
from profiles.settings import Settings
from profiles.splits import hardly_enough, load_documents
from profiles.stats.artifact import (
    Data,
    fidelity_of,
    interval_of,
    losses_of,
    split_of,
    tv_bound,
)
from profiles.stats.choice import qualities_of
from profiles.stats.gate import contexts_lacking, verdict
from profiles.stats.measured import Candidate, Measured


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What other data say about a profile."""

    split: Split
    plans: tuple[FrontierPoint, ...]
    """The profile's frontier on these data, but corrected plans whose map was not kept; what it
    says of the training split stays."""
    passed: bool
    """The gate, on these data."""
    reason: str
    holds: bool
    """Whether that is the profile's verdict too."""
    undecided: bool
    """Where it is not: whether more such data could still show it."""


class Again:
    """A profile's models, and the data that settings name; its maps by digest.

    Raises ProfileError where the models are not the profile's, naming the field.
    """

    def __init__(
        self,
        profile: MeasuredProfile,
        settings: Settings,
        console: Console,
        corrections: Mapping[str, Correction],
    ) -> None:
        self._profile, self._settings, self._console = profile, settings, console
        self._corrections = corrections
        sender, receiver = look_at_pair(*settings.pair)
        _require_same("sender", profile.sender, sender.identity)
        _require_same("receiver", profile.receiver, receiver.identity)
        tokenizer = load_tokenizer(settings.pair[1])
        positions = receiver.config.max_position_embeddings
        self._sources, self._documents = load_documents(
            settings, settings.data, tokenizer, positions
        )

    def verify(self) -> Verification:
        """The profile's plans on all the data; the frontier is judged anew.

        Raises ProfileError where a context is the profile's.
        """
        profile, documents = self._profile, self._documents
        known = {*profile.train.contexts, *profile.held_out.contexts, *profile.made.fitted}
        contexts = {it.context for it in documents}
        if seen := len(contexts & known):
            raise ProfileError(
                f"{seen} of {len(contexts)} contexts ({seen / len(contexts):.0%}) are the "
                "profile's own; verify on others"
            )
        data = Data(files=data_files(self._sources, documents), documents=documents)
        for line in hardly_enough(data, profile.tolerance) if profile.passed else ():
            self._console.print(line, highlight=False, soft_wrap=True)
        plans = kept_plans(profile)
        if left := [words.plan(it) for it in profile.frontier if _candidate(it) not in plans]:
            self._console.print(
                f"not judged, for their maps were not kept: {', '.join(left)}",
                highlight=False,
                soft_wrap=True,
            )
        tried = [profile.recommended or profile.frontier[it] for it in profile.order]
        # Without a recommended plan the first that was tried: the verdict holds where that fails.
        asked = [it for it in map(_candidate, tried) if it in plans][:1]
        if tried and not asked:
            raise ProfileError(
                "every plan that was tried corrects E, and maps of unproven ones are not kept, so "
                "none can be computed again; profile the pair anew, and give --held-out these data"
            )
        with temporary_journal() as journal:
            bench = self._bench(journal, *self._answerers(documents))
            judged = self._judge("judging", documents, [*plans], bench)
        split = split_of(data, judged)
        for candidate, point in plans.items():
            scores = judged.candidates[candidate]
            qualities = qualities_of(scores)
            plans[candidate] = msgspec.structs.replace(
                point,
                held_out=interval_of(documents, qualities),
                tasks=losses_of(documents, judged.full_prefill, qualities, profile.tolerance),
                shown=None,
                fidelity=fidelity_of(scores),
                ttft_s=profile.costs.ttft_s(candidate.runs, *split.mean_lengths),
            )
        judging = [plans[it] for it in asked]
        passed, reason = verdict(judging, split, profile.tolerance)
        lacking = (contexts_lacking(it, split, profile.tolerance) for it in judging)
        return Verification(
            split=split,
            plans=tuple(plans.values()),
            passed=passed,
            reason=reason,
            holds=passed == profile.passed,
            undecided=profile.passed and not passed and any(lacking),
        )

    def calibrate(self) -> MeasuredProfile:
        """Measure the `tv_bound` of its plans as the profiler does, on its own held-out contexts
        and on those of the data that it does not know, and write the profile with it to
        `settings.out`. The same call goes on where one was stopped.

        Raises ProfileError where it has no plan, and where the data lack one of those contexts.
        """
        profile, settings = self._profile, self._settings
        num_layers = profile.receiver.num_layers
        plans = {_candidate(it): it for it in profile.blocks if len(it.block) < num_layers}
        if not plans:
            raise ProfileError(f"the profile has no plan to calibrate: {profile.reason}")
        documents = _begun(profile, self._documents)
        answering = self._answerers(documents)
        journal = open_journal(settings, answering, profile, documents)
        judged = self._judge("calibrating", documents, [*plans], self._bench(journal, *answering))
        measured = {
            plan: msgspec.structs.replace(plan, tv_bound=tv_bound(documents, judged.candidates[it]))
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

    def _answerers(self, documents: Sequence[Document]) -> tuple[Answerer, Answerer]:
        return answerers(open_pair(self._settings), documents, *self._settings.memory_gb)

    def _bench(self, journal: Journal, sender: Answerer, receiver: Answerer) -> Bench:
        return Bench(
            sender=sender, receiver=receiver, journal=journal, corrections=self._corrections
        )

    def _judge(
        self, title: str, documents: Sequence[Document], plans: Sequence[Candidate], bench: Bench
    ) -> Measured:
        forecast = Forecast(self._profile.costs, bench.receiver.model.head_layers)
        steps = judging_steps(documents, plans, bench.num_layers)
        return Watched(bench, forecast, self._console).measure(title, HELD_OUT, documents, steps)


def kept_plans(profile: MeasuredProfile) -> dict[Candidate, FrontierPoint]:
    """Of the frontier what can be computed again: only proven plans' maps lie beside a profile."""
    kept = {None, *profile.e_maps}
    return {_candidate(it): it for it in profile.frontier if it.e_map in kept}


def _candidate(it: BlockQuality | FrontierPoint) -> Candidate:
    return Candidate(runs=(it.block,), e_map=it.e_map)


def _require_same(role: str, expected: ModelIdentity, found: ModelIdentity) -> None:
    for field in expected.__struct_fields__:
        ours, theirs = getattr(expected, field), getattr(found, field)
        if ours != theirs:
            raise ProfileError(
                f"--{role} is not the profile's {role}: {field} is {theirs!r}, and {ours!r} in the "
                "profile; give the models that were profiled, or profile these"
            )


def _begun(profile: MeasuredProfile, found: Sequence[Document]) -> list[Document]:
    """Those that nothing was chosen on, of whose answers only the beginning is asked."""
    chosen_on = {*profile.train.contexts, *profile.made.fitted}
    held_out = {*profile.held_out.contexts}
    documents = [
        replace(it, task=replace(it.task, max_new=min(FIRST_TOKENS, it.task.max_new)))
        for it in found
        if it.context not in chosen_on
    ]
    if missing := held_out - {it.context for it in documents}:
        raise ProfileError(
            f"{len(missing)} of the profile's {len(held_out)} held-out contexts are not in --data; "
            "give the data that it was judged on, asked with the same template"
        )
    return documents
