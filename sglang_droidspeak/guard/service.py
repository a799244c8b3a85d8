"""The drift guard in the scheduler: receive results of comparisons, take plans out of service.

A file, the record, keeps the pairs and their evidence from one start to the next.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cachetree import ConfigError, ModelId, ModelNames, with_names
from cachetree.disk import lock_file, new_file
from cachetree.planning import Line, LineProfile, PairProfile
from sglang_droidspeak.engine import tracing
from sglang_droidspeak.guard.plans import (
    ALL,
    NOISE,
    GuardQuestion,
    GuardState,
    Shadow,
    WatchedPair,
    after,
    left_of,
    watched,
)
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.start.config import Settings

log = logging.getLogger("droidspeak.guard")

Pair = tuple[ModelId, ModelId]
"""Model ids of sender and receiver."""

MAX_OTHERS: Final = 1000
"""Largest number of pairs in the record for which this server has no profile now."""
_lock = functools.cache(lock_file)
"""Lock a file until this process ends."""
_VERSION: Final = 1
_MAX_BYTES: Final = 16 << 20


class PairsInService:
    """The pairs that the drift guard watches, and their plans in service. All ranks get the same
    results of comparisons and decide alike; the first rank writes the record. Scheduler thread
    only."""

    def __init__(
        self,
        planner: Planner,
        metrics: Metrics,
        settings: Settings,
        names: ModelNames,
        *,
        keeps_record: bool,
    ) -> None:
        """Read the record in the file `settings.guard_path`, if it is set. Raises ConfigError."""
        self._planner: Final = planner
        self._metrics: Final = metrics
        self._names: Final = names
        self._rate: Final = settings.shadow_share
        path = None if settings.guard_path is None else Path(settings.guard_path)
        self._path: Final = path if keeps_record else None
        self._profiles: Final[dict[Pair, PairProfile]] = dict(planner.profiles)
        """Profiles of all watched pairs, including plans that are out of service."""
        known = {it.profile: it for it in (read_record(path) if path is not None else ())}
        self._pairs: Final[dict[Pair, WatchedPair]] = {}
        self._heirs: Mapping[Pair, LineProfile] = {}
        """Pairs that inherit a plan from a line of models. The record contains no such pair."""
        self._left: Final[dict[Line, int]] = {}
        """Number of plans in service since an alarm: one number for each line and all its pairs."""
        for profile in self._profiles.values():
            fresh = watched(profile)
            pair = known.pop(fresh.profile, fresh)
            self._note(pair, "as before the restart" if pair.is_demoted else "")
            if self._rate:
                self._warn_of(fresh)
        self._others: Final = tuple(known.values())[-MAX_OTHERS:]

    def inherit(self, heirs: Sequence[LineProfile]) -> None:
        """Replace all pairs that inherit a plan by `heirs`. A pair that has a profile of its own
        inherits nothing."""
        before = {it.profile: it for it in map(self._pairs.pop, self._heirs)}
        for key in self._heirs:
            del self._profiles[key]
        pairs = {(it.sender.model_id, it.receiver.model_id): it for it in heirs}
        self._heirs = {key: it for key, it in pairs.items() if key not in self._profiles}
        if not (before or self._heirs):
            return
        self._profiles |= self._heirs
        for key, profile in self._heirs.items():
            fresh = watched(profile)
            num_left = min(self._left.get(profile.line, fresh.num_left), fresh.num_left)
            fresh = msgspec.structs.replace(fresh, num_left=num_left)
            self._pairs[key] = before.get(fresh.profile, fresh)
        left = {key: left_of(it, self._pairs[key]) for key, it in self._heirs.items()}
        self._planner.inherit(left)
        self._tell()

    def answer(self, question: str) -> dict[str, Any]:
        """Answer a JSON question with a GuardState, converted to dicts and lists. Raises
        MsgspecError or LookupError for a wrong question."""
        asked = msgspec.json.decode(question or "{}", type=GuardQuestion)
        for result, num in asked.missed.items():
            self._metrics.shadows.labels(result).inc(num)
        if asked.shadow is not None:
            self._hear(asked.shadow)
        if asked.reset is not None:
            self._reset(asked.reset)
        pairs = tuple(self._pairs.values())
        suspects = tuple(plan for it in pairs for plan in it.suspects)
        state = GuardState(shadow_rate=self._rate, pairs=pairs, suspects=suspects)
        answer: dict[str, Any] = msgspec.to_builtins(state)
        return answer

    def _hear(self, shadow: Shadow) -> None:
        plan = shadow.plan
        key = plan.sender, plan.receiver
        before = self._pairs.get(key)
        if before is not None and plan.block is not None:
            num_layers = self._profiles[key].receiver.num_layers
            if not 0 <= plan.block[0] < plan.block[1] <= num_layers:
                raise LookupError(f"block {plan.block} is not within 0:{num_layers}")
        if not self._planner.serves(plan.receiver):  # An update came between its two requests.
            self._metrics.shadows.labels("failed").inc()
            return
        self._metrics.shadows.labels("compared").inc()
        if before is None or (pair := after(before, shadow)) is before:
            return
        self._metrics.shadow_tv.labels(*self._metrics.counted_as(key)).observe(shadow.tv)
        why = ""
        if pair.num_left < before.num_left:
            demoted = pair.plans[pair.num_left]
            why = (
                f"recomputing {demoted.layers} was {demoted.mean_tv:.3f} from full prefill in "
                f"{demoted.num_shadows} shadows, {demoted.allowed:.3f} is allowed"
            )
            if key in self._heirs:
                self._left[self._heirs[key].line] = pair.num_left
        self._note(pair, why)
        self._keep()

    def _reset(self, sender: str) -> None:
        names, senders = self._names.now, {it.sender for it in self._pairs.values()}
        asked = {it for it in senders if sender in (ALL, it, names.get(it))}
        if not asked and sender != ALL:
            known = [names.get(it, it) for it in sorted(senders)]
            raise LookupError(
                f"no pair here has the sender {sender}; give {' or '.join([*known, ALL])}"
            )
        for key, pair in self._pairs.items():
            if pair.sender in asked:
                fresh = watched(self._profiles[key])
                self._note(fresh, "an operator has reset it" if pair.is_demoted else "")
        if sender == ALL:
            self._left.clear()
        self._keep()

    def _note(self, pair: WatchedPair, why: str) -> None:
        """Set a pair's state. If its plans in service have changed, `why` is the reason, and the
        change is reported once: in the log, a metric and a trace. Otherwise `why` is empty."""
        key = pair.sender, pair.receiver
        self._pairs[key] = pair
        self._metrics.tell_guard(pair)
        self._tell()
        if not why:
            return
        left_in_it = left_of(self._profiles[key], pair)
        self._planner.put_in_service(left_in_it)
        self._metrics.tell_pairs({key: left_in_it})
        self._metrics.guard_changes.labels(*self._metrics.counted_as(key)).inc()
        left = f"{pair.num_left} of {len(pair.plans)} plans in service"
        log.warning("droidspeak: %s: %s: %s", self._called(pair), left, why)
        names = {"sender": pair.sender, "receiver": pair.receiver, "why": why}
        tracing.event("guard", {**names, "plans_left": pair.num_left})

    def _tell(self) -> None:
        """Tell the planner which plans are out of service, and planner and metrics the states of
        the pairs that inherit."""
        self._planner.out_of_service = frozenset(
            plan for it in self._pairs.values() for plan in it.out_of_service
        )
        states = {key: it.state for key, it in self._pairs.items() if key in self._heirs}
        self._planner.heirs = states
        self._metrics.tell_heirs(self._heirs, states.values())

    def _called(self, pair: WatchedPair) -> str:
        return with_names(f"{pair.sender} to {pair.receiver}", self._names.now)

    def _keep(self) -> None:
        if self._path is not None:
            try:
                own = (it for key, it in self._pairs.items() if key not in self._heirs)
                write_record(self._path, (*self._others, *own))
            except OSError as exc:
                log.warning("droidspeak: guard_path %s is not written: %s", self._path, exc)

    def _warn_of(self, pair: WatchedPair) -> None:
        silent = [it.layers for it in pair.plans if it.allowed == NOISE]
        if silent:
            log.warning(
                "droidspeak: %s: the profile does not say how far %s may be from full prefill; "
                "the drift guard allows %.2f, until `droidspeak profile calibrate` has measured it",
                self._called(pair),
                ", ".join(silent),
                NOISE,
            )


class _Record(msgspec.Struct, frozen=True):
    version: int
    pairs: tuple[WatchedPair, ...]


def read_record(path: Path) -> tuple[WatchedPair, ...]:
    """Return the pairs in a record. Empty if the file does not exist. Raises ConfigError if the
    file is no record."""
    remedy = "remove it, which puts every pair in service again, or give another guard_path"
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ConfigError(f"guard_path {path} has more than {_MAX_BYTES >> 20} MiB; {remedy}")
        record = msgspec.json.decode(raw, type=_Record)
    except FileNotFoundError:
        return ()
    except OSError as exc:
        raise ConfigError(f"guard_path {path} cannot be read: {exc.strerror}; {remedy}") from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"guard_path {path} has no drift guard's record: {exc}; {remedy}"
        ) from exc
    if record.version != _VERSION:
        raise ConfigError(
            f"guard_path {path} has version {record.version}, this release {_VERSION}; {remedy}"
        )
    return record.pairs


def check_record(path: Path) -> None:
    """Lock a record for this process until it ends. Raises ConfigError if another server has it, or
    if it cannot be read or written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _lock(path.absolute().with_name(f".{path.name}.lock"))
        write_record(path, read_record(path))
    except BlockingIOError:
        raise ConfigError(
            f"guard_path {path} is another server's; give each server a file of its own"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"guard_path {path} cannot be written: {exc.strerror}; give a file in a folder of this "
            "user"
        ) from exc


def write_record(path: Path, pairs: Iterable[WatchedPair]) -> None:
    """Replace a record's file atomically, readable only for its owner. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path.resolve()) as file:
        file.write(msgspec.json.encode(_Record(_VERSION, tuple(pairs))))
