"""Which plans of a pair are in service, and the evidence against each. Pure.

An alarm takes a plan out of service, and with it those of its profile that promise no more. The
pair continues with the best of the others; without any it is off. Exact plans always stay. A plan
is watched more closely at first and while there is some evidence against it, and after an alarm all
that are left. With `gate: none`, a block that requests name is watched as a plan that promises
nothing. A document adds evidence once, and an hour adds a bounded share of it.

How far an answer was from an exact run
---------------------------------------

SGLang reports the most likely tokens of each side, and none of the others is more likely than the
last of them. Total variation is the most that the two sides give differently to any set of tokens.
So it has a lower bound: the sum of what one side gives more than the other can at most. The bound
is 0 if both are the same, and close if few tokens have nearly all of the probability.

Has the mean of these distances risen above what is allowed?
------------------------------------------------------------

A Shiryaev-Roberts e-detector for the mean of values in [0, 1] (Shin, Ramdas and Rinaldo,
"E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024):

    evidence' = (evidence + 1) * (1 + bet * (x - allowed)),   averaged over several bets

While each value's mean, given all before it, is at most `allowed`, the second factor's is at most
1, so evidence grows by at most 1 per observation on average, whatever the distribution. Summed over
all plans of a server that holds for every shadow it runs, whichever plan that is of. An alarm at
`threshold` therefore comes after at least `threshold` shadows of the whole server on average,
however many plans it has. How often shadows are run may depend on the evidence: a decision about
the next one uses the past alone.

Ordinary traffic breaks that condition: hard documents come one after another, and then the mean
given the past is above the mean of all. Nothing can be proven about any order. So limits keep a
cluster from being taken for drift: an hour multiplies evidence by `HOUR` at most, and a document
adds evidence once. Limits only lower evidence, so the bound above still holds. An alarm takes five
bad hours or more. `benchmarks/guard_drift.py` counts false alarms in clustered traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import exp
from statistics import fmean
from typing import Annotated, Final, Literal

import msgspec

from cachetree import ModelId
from cachetree.planning import BlockQuality, PairProfile, PlanId
from sglang_droidspeak.request.outcomes import OUT_OF_SERVICE

TOP: Final = 20
"""Tokens that SGLang reports of each position."""
POSITIONS: Final = 8
"""Positions of an answer that are compared, from its first on."""

LogProbs = Mapping[int, float]
"""Log-probabilities of one position by token id: the most likely tokens, perhaps others too."""

SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Bets, as shares of the largest one, under which a value of 0 would leave nothing."""
NO_EVIDENCE: Final = (0.0,) * len(SHARES)
HOUR: Final = 10.0
"""The most by which an hour multiplies evidence."""

Evidence = tuple[float, ...]
"""Evidence under each bet, in the order of SHARES."""

ALARM: Final = 1e5
"""So many shadows of a healthy server come before a false alarm on average, at least."""
SUSPICION: Final = 2.0
NUM_FIRST: Final = 20
"""Shadows of a plan of which little is known yet. They begin with the first that chance chooses, so
that plans which nobody uses do not have every request looked at."""
NOISE: Final = 0.02
"""The distance that two exact runs may have, in half precision and other batches. All that is
allowed to a plan whose profile does not say how far it is from full prefill."""
HOUR_S: Final = 3600
MAX_DOCUMENTS: Final = 256
"""A document adds evidence once while it is among so many of its plan's last ones."""
ALL: Final = "all"
"""In place of a sender's id: every sender."""


class WatchedPlan(msgspec.Struct, frozen=True, kw_only=True):
    block: tuple[int, int] | None
    e_corrected: bool
    allowed: float = NOISE
    """Mean distance from exact runs."""
    quality: float = 0.0
    """That its profile promises; 0 of what only requests have named."""
    num_shadows: int = 0
    mean_tv: float = 0.0
    """Mean distance over all shadows."""
    evidence: Evidence = NO_EVIDENCE
    hour: int = 0
    """Hour since 1970 of the last shadow."""
    hour_began: Evidence = NO_EVIDENCE
    """Evidence at the beginning of that hour."""
    documents: tuple[str, ...] = ()
    """The last documents that added evidence, as digests."""

    @property
    def key(self) -> tuple[tuple[int, int] | None, bool]:
        """Among the plans of a pair."""
        return self.block, self.e_corrected

    @property
    def is_suspect(self) -> bool:
        return 0 < self.num_shadows < NUM_FIRST or suspicion(self.evidence) >= SUSPICION

    @property
    def order(self) -> tuple[float, int]:
        """The best first."""
        start, stop = self.block or (0, 0)
        return -self.quality, start - stop

    @property
    def layers(self) -> str:
        """Those that it recomputes, for a person."""
        return "no layer" if self.block is None else f"layers [{self.block[0]}, {self.block[1]})"


class WatchedPair(msgspec.Struct, frozen=True, kw_only=True):
    sender: ModelId
    receiver: ModelId
    profile: str
    """Digest of what the profile says: another one begins anew."""
    plans: tuple[WatchedPlan, ...]
    """Those that are not exact, the best first."""
    num_left: int
    """So many of them are in service."""

    @property
    def is_demoted(self) -> bool:
        """Not all of its plans are in service."""
        return self.num_left < len(self.plans)

    @property
    def in_service(self) -> tuple[WatchedPlan, ...]:
        return self.plans[: self.num_left]

    @property
    def out_of_service(self) -> Iterator[PlanId]:
        return self._ids(self.plans[self.num_left :])

    @property
    def strength(self) -> float:
        """Of the evidence against the plan in service that has most."""
        return max((strength(it.evidence) for it in self.in_service), default=0.0)

    @property
    def suspects(self) -> Iterator[PlanId]:
        """Plans in service of which every request is to be checked."""
        return self._ids(it for it in self.in_service if self.is_demoted or it.is_suspect)

    def _ids(self, plans: Iterable[WatchedPlan]) -> Iterator[PlanId]:
        return (PlanId(self.sender, self.receiver, *it.key) for it in plans)


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """How far the answer of one request was from an exact run."""

    plan: PlanId
    tv: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Total variation."""
    document: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Digest of the tokens that were read; empty: a document of its own."""
    hour: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """Hours since 1970. The front end says it, so that all ranks decide alike."""


class GuardQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the front end and an operator tell; without either, only how things are is asked."""

    shadow: Shadow | None = None
    missed: dict[
        Literal["dropped", "failed"], Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    ] = {}
    """Shadows that came to nothing, by what became of them."""
    reset: str | None = None
    """The id or name of a sender whose pairs begin anew, or `all`."""


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    shadow_rate: float
    pairs: tuple[WatchedPair, ...]
    suspects: tuple[PlanId, ...]
    names: dict[str, str] = {}
    """Of models, by id."""
    off: str = ""
    """Why the server reuses nothing, and what to do; empty where it does."""


def watched(profile: PairProfile) -> WatchedPair:
    """All plans in service, and no evidence."""
    plans = [_watched(it) for it in profile.blocks if not _is_exact(it, profile)]
    return WatchedPair(
        sender=profile.sender.model_id,
        receiver=profile.receiver.model_id,
        profile=blake2b(msgspec.json.encode(profile), digest_size=16).hexdigest(),
        plans=tuple(sorted(plans, key=lambda it: it.order)),
        num_left=len(plans),
    )


def after(pair: WatchedPair, shadow: Shadow) -> WatchedPair:
    """The pair with one more shadow; the same if its plan is out of service."""
    plan = shadow.plan
    key = plan.block, plan.e_corrected
    if key not in (it.key for it in pair.plans):
        new = WatchedPlan(block=plan.block, e_corrected=plan.e_corrected)
        left = sorted((*pair.in_service, new), key=lambda it: it.order)
        plans = (*left, *pair.plans[pair.num_left :])
        pair = msgspec.structs.replace(pair, plans=plans, num_left=len(left))
    for i, before in enumerate(pair.in_service):
        if before.key == key:
            seen = _with(before, shadow)
            is_alarm = strength(seen.evidence) >= ALARM
            return msgspec.structs.replace(
                pair,
                plans=(*pair.plans[:i], seen, *pair.plans[i + 1 :]),
                num_left=i if is_alarm else pair.num_left,
            )
    return pair


def _with(plan: WatchedPlan, shadow: Shadow) -> WatchedPlan:
    num = plan.num_shadows + 1
    mean_tv = plan.mean_tv + (shadow.tv - plan.mean_tv) / num
    plan = msgspec.structs.replace(plan, num_shadows=num, mean_tv=mean_tv)
    if shadow.document and shadow.document in plan.documents:
        return plan
    began = plan.hour_began if shadow.hour == plan.hour else plan.evidence
    return msgspec.structs.replace(
        plan,
        evidence=limited(observed(plan.evidence, shadow.tv, plan.allowed), began),
        hour=shadow.hour,
        hour_began=began,
        documents=(*plan.documents, shadow.document)[-MAX_DOCUMENTS:],
    )


def left_of(profile: PairProfile, pair: WatchedPair) -> PairProfile:
    """The profile without the plans that are out of service."""
    if not pair.is_demoted:
        return profile
    left = [it.key for it in pair.in_service]
    blocks = (it for it in profile.blocks if _is_exact(it, profile) or _watched(it).key in left)
    return profile.limited_to(tuple(blocks), OUT_OF_SERVICE)


def _is_exact(it: BlockQuality, profile: PairProfile) -> bool:
    return it.start <= profile.first_difference and it.stop == profile.receiver.num_layers


def _watched(it: BlockQuality) -> WatchedPlan:
    return WatchedPlan(
        block=(it.start, it.stop) if len(it.block) else None,
        e_corrected=it.e_map is not None,
        allowed=(it.tv_bound or 0.0) + NOISE,
        quality=it.quality,
    )


def observed(evidence: Evidence, x: float, allowed: float) -> Evidence:
    """The evidence with one more value, in [0, 1]; `allowed` is above 0."""
    return tuple(
        (1.0 + before) * (1.0 - share + share * x / allowed)
        for before, share in zip(evidence, SHARES, strict=True)
    )


def limited(evidence: Evidence, began: Evidence) -> Evidence:
    """At most HOUR times the evidence at the beginning of the hour, plus one."""
    return tuple(min(now, HOUR * (1.0 + then)) for now, then in zip(evidence, began, strict=True))


def strength(evidence: Evidence) -> float:
    """The mean over all bets, to be compared with a threshold."""
    return fmean(evidence)


def suspicion(evidence: Evidence) -> float:
    """A number that rises after fewer values than `strength` and proves nothing: at most 1 if all
    values are 0, 2 if they stay at half of what is allowed, and without bound beyond that."""
    return max(share * now for share, now in zip(SHARES, evidence, strict=True))


def distance(served: Sequence[LogProbs], exact: Sequence[LogProbs]) -> float:
    """Mean total variation, 0 to 1, over as many positions as both have, at least one."""
    pairs = zip(served, exact, strict=False)
    return fmean(total_variation(ours, theirs) for ours, theirs in pairs)


def total_variation(served: LogProbs, exact: LogProbs) -> float:
    """A lower bound of the total variation between both."""
    ours, theirs = ({token: exp(it) for token, it in one.items()} for one in (served, exact))
    return max(_excess(ours, theirs), _excess(theirs, ours))


def _excess(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Probability that the first gives to its known tokens above what the second can at most."""
    most = sorted(other.values(), reverse=True)[:TOP][-1]
    return min(1.0, sum(max(0.0, it - other.get(token, most)) for token, it in one.items()))
