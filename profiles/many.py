"""Profile every pair of several models that can matter, one after the other.

    list      pairs that can matter, those with most shared tokens first, and why others cannot
    forecast  time and memory of each, by a cost model that is timed once for models of one shape
    measure   each pair as `profile_pair` does; pairs with the same receiver share its answers
    report    one table, and one page with it

A pair that fails does not end the run. Each pair keeps its own journal. A pair that has a profile
of the same models, data and settings is not measured again. So the same command continues a
stopped run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import transformers
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from cachetree import CacheTreeError, ConfigError
from profiles.answerers import answerer_of, time_costs
from profiles.compute.fitting import NUM_FITTED
from profiles.compute.journal import Journal, Timed
from profiles.compute.models import load_model, load_tokenizer, look_at
from profiles.compute.room import GIB, Sizes, most_needed
from profiles.data.documents import first_of_each_task
from profiles.data.logs import Context, contexts_of, read_logs
from profiles.environment import slow_dtype
from profiles.evidence import CostModel, Making, MeasuredProfile, read_measured
from profiles.forecast import Forecast, spoken
from profiles.pairs import Entry, Wanted, pairs_of
from profiles.profiler import Shared, blocks_of, dtype_of, profile_pair, require_place
from profiles.report import derived, words
from profiles.report.page import write_page
from profiles.report.tables import Table, table
from profiles.report.terminal import drawn
from profiles.settings import Settings
from profiles.splits import load_fitted_on, load_splits, logs_in
from profiles.stats.artifact import Data, data_digest

PAGE: Final = "index.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times and sizes of models of one shape, known before any pair is measured."""

    costs: CostModel
    head_layers: float
    sizes: Sizes
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A pair with its forecasts."""

    wanted: Wanted
    settings: Settings
    seconds: tuple[float, float]
    """Forecasts in seconds: if answers are as long as the accepted answers, and if no answer stops
    by itself."""
    num_bytes: int
    """Bytes needed at least, of host and device together, with the weights of both models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    wanted: Wanted
    profile: MeasuredProfile | None
    """Profile of the pair. None if the pair could not be measured."""
    problem: str = ""


class Many:
    """A run that profiles all useful pairs of several models. `run` raises ConfigError if it
    can profile no pair."""

    def __init__(self, settings: Settings, entries: Mapping[str, Entry], console: Console) -> None:
        transformers.utils.logging.disable_progress_bar()
        require_place(settings.out / PAGE)
        self._settings, self._entries, self._console = settings, entries, console
        self._logs = logs_in(settings.data)
        self._asked_of = dict.fromkeys(entries)
        self.pairs = pairs_of(entries, settings, self._contexts() if self._logs else None)
        self._splits: dict[str, tuple[Data, Data]] = {}

    def run(self) -> list[Outcome]:
        """Profile all pairs. The outcomes include pairs that cannot be measured."""
        out, console = self._settings.out, self._console
        wanted = [it for it in self.pairs if not it.why_not]
        if not wanted:
            reasons = {f"{it.about}: {it.why_not}" for it in self.pairs}
            raise ConfigError("no pair can be profiled: " + "; ".join(sorted(reasons)))
        _require_own_files(wanted)
        for note in slow_dtype(dtype_of(self._settings), self._settings.devices()[0]):
            self._say(note)
        planned = self._plan(wanted)
        self._show(planned_table(planned), others_table(self.pairs))
        shared = {name: Shared(splits=splits) for name, splits in self._splits.items()}
        outcomes = list[Outcome]()
        for number, plan in enumerate(planned, start=1):
            console.rule(f"{number} of {len(planned)}: {plan.wanted.name}")
            outcomes.append(self._measure(plan, shared[plan.wanted.receiver]))
        shown = outcome_table(outcomes), others_table(self.pairs)
        self._show(*shown)
        write_page(out / PAGE, "Pairs", shown)
        return outcomes

    def _measure(self, planned: Planned, shared: Shared) -> Outcome:
        wanted, out = planned.wanted, planned.settings.out
        try:
            if (made := self._made(planned)) is not None:
                self._say(f"{out} is of these models and data; remove it to measure again")
                return Outcome(wanted=wanted, profile=made)
            shared.costs = shared.costs or self._timings[self._shape(wanted.receiver)].costs
            return Outcome(
                wanted=wanted, profile=profile_pair(planned.settings, self._console, shared)
            )
        except CacheTreeError as exc:
            self._say(f"{wanted.name}: {exc}")
            return Outcome(wanted=wanted, profile=None, problem=str(exc))

    def _made(self, planned: Planned) -> MeasuredProfile | None:
        """Return the profile of an earlier run. None if it has other models, data or settings."""
        settings = planned.settings
        if not settings.out.is_file():
            return None
        earlier = read_measured(settings.out)
        models = tuple(look_at(end).identity for end in settings.pair)
        is_same = (
            (earlier.sender, earlier.receiver) == models
            and earlier.data_sha256 == data_digest(*self._splits[planned.wanted.receiver])
            and earlier.tolerance == settings.tolerance
            and is_made_as(settings, earlier.made)
            and {*earlier.made.fitted} == self._fitted_on(planned)
        )
        return earlier if is_same else None

    def _fitted_on(self, planned: Planned) -> set[str]:
        """Return the digests of the contexts of `--fit-data` on which maps would be fitted."""
        settings, receiver = planned.settings, planned.wanted.receiver
        if not settings.fit_data:
            return set()
        splits, reading = self._splits[receiver], self._reading(receiver)
        return {it.context for it in load_fitted_on(settings, *splits, *reading)}

    def _plan(self, wanted: Sequence[Wanted]) -> list[Planned]:
        """Load each receiver's documents. Return `wanted` with its pairs' forecasts."""
        settings = {it.name: self._settings_of(it) for it in wanted}
        # The first profile of a receiver says which contexts chose plans.
        for pair in sorted(wanted, key=lambda it: not settings[it.name].out.is_file()):
            if pair.receiver not in self._splits:
                tokenizer, positions = self._reading(pair.receiver)
                splits = load_splits(settings[pair.name], tokenizer, positions)
                self._splits[pair.receiver] = splits
        return [self._planned(it, settings[it.name]) for it in wanted]

    def _planned(self, pair: Wanted, settings: Settings) -> Planned:
        train, held_out = (part.documents for part in self._splits[pair.receiver])
        timing = self._timings[self._shape(pair.receiver)]
        forecast = Forecast(timing.costs, timing.head_layers)
        blocks = blocks_of(settings, timing.sizes.num_layers)
        fitted_on = [train[place] for place in first_of_each_task(train, NUM_FITTED)]
        needed = most_needed(timing.sizes, [*train, *held_out])
        return Planned(
            wanted=pair,
            settings=settings,
            seconds=forecast.both(train, held_out, blocks, settings, fitted_on),
            num_bytes=2 * timing.weight_bytes + needed,
        )

    @cached_property
    def _timings(self) -> dict[str, Timing]:
        """Time one receiver of each shape, on the documents of all receivers of this shape."""
        receivers: dict[str, list[str]] = {}
        for name in self._splits:
            receivers.setdefault(self._shape(name), []).append(name)
        return {shape: self._timed(shape, names) for shape, names in receivers.items()}

    def _timed(self, shape: str, names: Sequence[str]) -> Timing:
        settings, source = self._settings, self._entries[names[0]].source
        documents = [it for name in names for part in self._splits[name] for it in part.documents]
        device, _ = settings.devices()
        model = load_model(source, dtype=dtype_of(settings), device=device)
        tokenizer = load_tokenizer(source)
        answerer = answerer_of(model, tokenizer, documents, memory_gb=settings.memory_gb)
        journal = Journal.beside(settings.out / "costs", shape, settings.dtype, str(device))
        if journal.costs is None:
            costs = time_costs(answerer.model, "receiver", documents, settings, self._console)
            journal.put(Timed(costs=costs))
        journal.close()
        return Timing(
            costs=journal.costs,
            head_layers=answerer.model.head_layers,
            sizes=Sizes.of(answerer.model),
            weight_bytes=sum(it.numel() * it.element_size() for it in model.parameters()),
        )

    def _contexts(self) -> list[Context]:
        """Return the contexts of the logs, with models named as in the entries."""
        tokenizer, _ = self._reading(next(iter(self._entries)))
        asked = [it for log in read_logs(self._logs, tokenizer) for it in log.asked]
        strange = sorted({it.model for it in asked} - self._entries.keys())
        bare = [name for name, it in self._entries.items() if not it.adapter]
        if len(strange) == len(bare) == 1:  # A base's server accepts any model name.
            self._asked_of[bare[0]], strange = strange[0], []
        if strange:
            self._say(f"prompts of {', '.join(strange)} are no model's of these; they are left out")
        names = {asked: name for name, asked in self._asked_of.items() if asked}
        known = [replace(it, model=names.get(it.model, it.model)) for it in asked]
        known = [it for it in known if it.model in self._entries]
        return contexts_of(known, self._settings.page_size)

    def _settings_of(self, pair: Wanted) -> Settings:
        """Return the settings of one pair."""
        sender, receiver = (self._entries[name] for name in (pair.sender, pair.receiver))
        stated = {name: getattr(receiver, name) for name in ("template", "metric", "max_new")}
        is_logged = self._logs and not receiver.data
        return replace(
            self._settings,
            names=(pair.sender, pair.receiver),
            sender=sender.source.path,
            sender_lora=sender.source.adapter,
            receiver=receiver.source.path,
            receiver_lora=receiver.source.adapter,
            data=receiver.data or self._settings.data,
            asked_of=(self._asked_of[pair.receiver] or pair.receiver) if is_logged else None,
            out=self._settings.out / file_of(pair),
            **{name: value for name, value in stated.items() if value is not None},
        )

    def _shape(self, name: str) -> str:
        return look_at(self._entries[name].source).config.to_json_string()

    def _reading(self, name: str) -> tuple[PreTrainedTokenizerBase, int]:
        source = self._entries[name].source
        return load_tokenizer(source), look_at(source).config.max_position_embeddings

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _show(self, *tables: Table) -> None:
        for shown in tables:
            if shown.rows:
                self._console.print(drawn(shown))


def file_of(pair: Wanted) -> str:
    """Return the name of a pair's profile. Names of models may have slashes, and name no folder.

    >>> file_of(Wanted(sender="../org/base", receiver="json"))
    '_org_base_to_json.json'
    """
    return f"{pair.sender}_to_{pair.receiver}.json".replace("/", "_").lstrip(".")


def _require_own_files(pairs: Iterable[Wanted]) -> None:
    pair_of: dict[str, str] = {}
    for pair in pairs:
        file, name = file_of(pair), pair.about
        if (other := pair_of.setdefault(file, name)) != name:
            raise ConfigError(f"{other} and {name} would both be written to {file}; rename a model")


def is_made_as(settings: Settings, made: Making) -> bool:
    """Return whether a run with these settings would ask and measure as an earlier run did."""
    names = "dtype", "seed", "page_size", "max_prompt_tokens", "pruned"
    return (
        made.options == settings.options
        and all(getattr(made, it) == getattr(settings, it) for it in names)
        and settings.group in (None, made.group)
        and made.e_correction in (None, settings.e_correction)
    )


def planned_table(planned: Sequence[Planned]) -> Table:
    least_s, most_s = (sum(it.seconds[which] for it in planned) for which in (0, 1))
    shown = table(
        f"Pairs to profile: about {spoken(least_s, most_s)}",
        planned,
        {
            "pair": lambda it: it.wanted.name,
            "prompts": lambda it: f"{it.wanted.num_prompts:,}",
            "tokens": lambda it: f"{it.wanted.num_tokens:,}",
            "time": lambda it: words.duration(it.seconds[0]),
            "memory": lambda it: f"{it.num_bytes / GIB:.2g} GiB",
        },
        caption="memory: weights of both models, and what one context needs at least",
    )
    if not any(it.wanted.num_prompts for it in planned):
        return shown.without("prompts", "tokens")
    logged = "prompts: of the log, about what the sender had read first; tokens: that they share; "
    return replace(shown, caption=logged + shown.caption)


def others_table(pairs: Iterable[Wanted]) -> Table:
    """List the pairs that are not profiled, grouped by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for pair in pairs:
        if pair.why_not:
            reasons.setdefault(pair.why_not, {})[pair.about] = None
    rows = tuple((", ".join(about), why) for why, about in reasons.items())
    return Table(title="Not profiled", headers=("pairs", "why"), rows=rows, is_prose=True)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    def said(outcome: Outcome) -> tuple[str, ...]:
        profile = outcome.profile
        if profile is None:
            return outcome.wanted.name, "not measured", words.ABSENT, words.ABSENT, outcome.problem
        plan = derived.recommended(profile)
        verdict = "passed" if profile.passed else "failed"
        reason = words.ABSENT if profile.passed else profile.reason
        next_steps = "; ".join(derived.next_steps(profile)) or reason
        if plan is None:
            return outcome.wanted.name, verdict, words.ABSENT, words.ABSENT, next_steps
        share = words.percent(derived.ttft_ratio(profile, plan.ttft_s))
        return outcome.wanted.name, verdict, words.plan(plan), share, next_steps

    num_passed = sum(it.profile is not None and it.profile.passed for it in outcomes)
    return Table(
        title=f"{num_passed} of {words.counted(len(outcomes), 'pair')} passed",
        headers=("pair", "verdict", "recomputes", "of full", "what next"),
        rows=tuple(map(said, outcomes)),
        caption=(
            "recomputes: layers, where all others are loaded; of full: predicted time to the first "
            "token in per cent of a full prefill. `droidspeak profile show FILE` has the reason"
        ),
        is_prose=True,
    )
