"""Measure a profile's plans again, for two commands.

`verify` uses other data: does the verdict hold? `calibrate` uses the profile's data: how far may
answers be from full prefill's before the drift guard acts?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from rich.console import Console

from cachetree import ModelIdentity, ProfileError, write_profile
from cachetree.corrections import Correction
from cachetree.planning import BlockQuality
from profiles.answerers import answerers
from profiles.compute.examination import FIRST_TOKENS, Answerer
from profiles.compute.journal import Journal, temporary_journal
from profiles.compute.measuring import judging_steps
from profiles.compute.models import load_tokenizer, look_at_pair
from profiles.compute.study import HELD_OUT, Bench
from profiles.controls import measure_controls
from profiles.data.documents import Document, by_task, data_files
from profiles.evidence import FrontierPoint, MeasuredProfile, Split
from profiles.forecast import Forecast
from profiles.profiler import open_journal, open_pairs, require_place
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
from profiles.stats.gate import contexts_lacking, is_within, nothing_to_lose, reason_of
from profiles.stats.measured import Candidate, Measured
from profiles.watched import Watched


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a profile's plans on other data, and what follows for its verdict."""

    split: Split
    plans: tuple[FrontierPoint, ...]
    """The plans that servers use, measured on these data. Values for the training split are copied
    from the profile."""
    holds: bool | None
    """True if the recommended plan passes the gate here, too. None if more such data could still
    show that it does."""
    reason: str


class Again:
    """Measures a profile's plans again, on the data of the settings. Loads the profile's models.

    Raises ProfileError, naming the field, if the models of the settings are not the profile's.
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
        self._load = partial(load_documents, settings, settings.data, tokenizer, positions)

    def verify(self) -> Verification:
        """Measure the profile's usable plans on all the data, and judge the recommended plan again.

        Raises ProfileError if servers use none of the plans, or if the profile was made with one of
        the contexts. Also raises it if full prefill answers nothing right at some task.
        """
        profile = self._profile
        if not profile.passed:
            raise ProfileError(
                "the profile did not pass, so none of its plans is served; profile the pair on "
                "these data"
            )
        sources, documents = self._load()
        known = {*profile.train.contexts, *profile.held_out.contexts, *profile.made.fitted}
        contexts = {it.context for it in documents}
        if seen := len({it.context for it in documents if it.names & known}):
            raise ProfileError(
                f"{seen} of {len(contexts)} contexts ({seen / len(contexts):.0%}) are the "
                "profile's own; verify on others"
            )
        data = Data(files=data_files(sources, documents), documents=documents)
        for line in hardly_enough(data, profile.tolerance):
            self._console.print(line, highlight=False, soft_wrap=True)
        used = {_candidate(it) for it in profile.blocks}
        plans = {it: of for of in profile.frontier if (it := _candidate(of)) in used}
        with temporary_journal() as journal:
            bench = self._bench(journal, *self._answerers(documents))
            judged = self._judge("judging", documents, [*plans], bench)
            costs, own = profile.costs, judged.full_prefill
            controls = measure_controls(bench, documents, own, costs, self._console)
        split = split_of(data, judged, controls)
        if (unjudged := nothing_to_lose(split)) is not None:
            raise ProfileError(unjudged)
        tasks = by_task(documents).values()
        for candidate, point in plans.items():
            scores = judged.candidates[candidate]
            qualities = qualities_of(scores)
            plans[candidate] = msgspec.structs.replace(
                point,
                held_out=interval_of(documents, qualities),
                tasks=losses_of(tasks, judged.full_prefill, qualities, profile.tolerance),
                fidelity=fidelity_of(scores),
                ttft_s=profile.costs.ttft_s(candidate.runs, *split.mean_lengths),
            )
        best = plans[_candidate(profile.recommended)]
        holds = is_within(best.tasks, profile.tolerance)
        is_open = not holds and contexts_lacking(best, split, profile.tolerance) is not None
        return Verification(
            split=split,
            plans=tuple(plans.values()),
            holds=None if is_open else holds,
            reason=reason_of(best, split, profile.tolerance),
        )

    def calibrate(self) -> MeasuredProfile:
        """Measure how far each plan's answers are from full prefill's (`tv_bound`), and write the
        profile with these bounds to `settings.out`.

        The data must have the profile's held-out contexts, and may have contexts that the profile
        does not know. The same call continues after a stop. Raises ProfileError if the profile has
        no plan, or if the data lack a held-out context.
        """
        profile, settings = self._profile, self._settings
        num_layers = profile.receiver.num_layers
        plans = {_candidate(it): it for it in profile.blocks if len(it.block) < num_layers}
        if not plans:
            raise ProfileError(f"the profile has no plan to calibrate: {profile.reason}")
        if profile.line is not None:
            raise ProfileError("a profile of a line has the bounds of its pairs; make it again")
        require_place(settings.out)
        _, loaded = self._load()
        documents = _begun(profile, loaded)
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
        (pair,) = open_pairs(self._settings)
        return answerers(pair, documents, *self._settings.memory_gb)

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


def _candidate(plan: BlockQuality | FrontierPoint) -> Candidate:
    return Candidate(runs=(plan.block,), e_map=plan.e_map)


def _require_same(role: str, expected: ModelIdentity, actual: ModelIdentity) -> None:
    for field in expected.__struct_fields__:
        ours, theirs = getattr(expected, field), getattr(actual, field)
        if ours != theirs:
            raise ProfileError(
                f"--{role} is not the profile's {role}: {field} is {theirs!r}, and {ours!r} in the "
                "profile; give the models that were profiled, or profile these"
            )


def _begun(profile: MeasuredProfile, loaded: Sequence[Document]) -> list[Document]:
    """Return the documents that neither chose plans nor fitted maps, with the length of answers cut
    to `FIRST_TOKENS`. Raises ProfileError if a held-out context of the profile is missing."""
    chosen_on = {*profile.train.contexts, *profile.made.fitted}
    held_out = {*profile.held_out.contexts}
    documents = [
        replace(it, task=replace(it.task, max_new=min(FIRST_TOKENS, it.task.max_new)))
        for it in loaded
        if it.names.isdisjoint(chosen_on)
    ]
    if missing := held_out.difference(*(it.names for it in documents)):
        raise ProfileError(
            f"{len(missing)} of the profile's {len(held_out)} held-out contexts are not in --data; "
            "give the data that it was judged on, asked with the same template"
        )
    return documents
