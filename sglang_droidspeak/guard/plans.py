"""Decide which plans of a pair are in service, by the evidence against each. Pure.

An alarm takes a plan out of service, together with all plans of its profile that promise no more
quality. The pair continues with the best remaining plan, if there is one. Exact plans always stay.
All answers by a plan are compared at first, while there is some evidence against it, and after an
alarm against another plan of its pair. With `gate: none`, a block that requests name is watched as
a plan that promises no quality.

How far an answer was from an exact prefill
-------------------------------------------

SGLang reports the most likely tokens of the answer and of an exact prefill (the two sides). No
other token is more likely than the last of them. Total variation is the largest difference between
the probabilities that both sides give to a set of tokens. It has a lower bound: sum how much more
one side gives to each token than the other side can give at most. The bound is 0 if both sides are
equal. The bound is close to the total variation if few tokens have nearly all of the probability.

Has the mean of these distances risen above what is allowed?
------------------------------------------------------------

A Shiryaev-Roberts e-detector for the mean of values in [0, 1] (Shin, Ramdas and Rinaldo,
"E-detectors: a nonparametric framework for sequential change detection", NEJSDS 2024):

    evidence' = (evidence + 1) * (1 + bet * (x - allowed)),   averaged over several bets

Assume that each value's mean, given all values before it, is at most `allowed`. Then the second
factor's mean is at most 1. So evidence grows by at most 1 per comparison (shadow) on average, for
any distribution. So does the sum of the evidence against all plans of a server. So an alarm at
`ALARM` comes after at least `ALARM` comparisons of the server on average, for any number of plans.
How many answers are compared may depend on the evidence, because each decision about the next
comparison uses only the past.

Ordinary traffic breaks the assumption: hard documents come one after another, and then the mean
given the past is above the overall mean. No bound holds for all orders of documents. So two limits
protect from false alarms: an hour multiplies evidence by at most `HOUR`, and a document adds
evidence once. Limits only lower evidence, so the bound above still holds. An alarm takes at least
five bad hours. `benchmarks/guard_drift.py` counts false alarms in clustered traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import exp
from statistics import fmean
from typing import Annotated, Final, Literal

import msgspec

from cachetree import ModelId
from cachetree.planning import BlockQuality, LineProfile, PairProfile, PlanId
from sglang_droidspeak.guard.probation import Probation
from sglang_droidspeak.request.outcomes import OUT_OF_SERVICE

TOP: Final = 20
"""Number of tokens that SGLang reports for each position."""
POSITIONS: Final = 8
"""Number of an answer's first positions that are compared."""

LogProbs = Mapping[int, float]
"""Log-probabilities of the most likely tokens at one position, and perhaps of others. Keys are
token ids."""

SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Bets: how strongly one distance changes the evidence. They are shares of the largest bet, under
which a single distance of 0 would leave no evidence."""
NO_EVIDENCE: Final = (0.0,) * len(SHARES)
HOUR: Final = 10.0
"""Largest factor by which evidence may grow in one hour."""

Evidence = tuple[float, ...]
"""Evidence under each bet, in the order of SHARES."""

ALARM: Final = 1e5
"""Evidence that raises an alarm. On average, a healthy server makes at least this number of
comparisons before a false alarm."""
SUSPICION: Final = 2.0
NUM_FIRST: Final = 20
"""Number of comparisons for which a plan counts as new. After a first one, chosen by chance, every
request by a new plan is compared."""
NOISE: Final = 0.02
"""Largest distance that two exact prefills have, in half precision and in different batches. If a
profile does not say how far a plan is from full prefill, the plan is allowed only this distance."""
HOUR_S: Final = 3600
MAX_DOCUMENTS: Final = 256
"""Number of latest documents that a plan remembers. A remembered document adds no evidence."""
ALL: Final = "all"
"""Value of `GuardQuestion.reset` that stands for all senders."""


class WatchedPlan(msgspec.Struct, frozen=True, kw_only=True):
    block: tuple[int, int] | None
    e_corrected: bool
    allowed: float = NOISE
    """Allowed mean distance from exact prefills."""
    quality: float = 0.0
    """Quality that the profile promises. 0 for a block that a request named and no profile has."""
    num_shadows: int = 0
    mean_tv: float = 0.0
    """Mean distance over all comparisons."""
    evidence: Evidence = NO_EVIDENCE
    hour: int = 0
    """Hours since 1970, at the last comparison."""
    hour_began: Evidence = NO_EVIDENCE
    """Evidence at the beginning of the hour of the last comparison."""
    documents: tuple[str, ...] = ()
    """Digests of the last documents that added evidence."""
    probation: Probation | None = None
    """Evidence about an inherited plan on probation. None afterwards, and for a measured plan."""

    @property
    def key(self) -> tuple[tuple[int, int] | None, bool]:
        """Key that identifies the plan within its pair."""
        return self.block, self.e_corrected

    @property
    def is_suspect(self) -> bool:
        if self.probation is not None:
            return True
        return 0 < self.num_shadows < NUM_FIRST or suspicion(self.evidence) >= SUSPICION

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: the plan with the highest promised quality is first. If two promise the same,
        the plan that recomputes more layers is first."""
        start, stop = self.block or (0, 0)
        return -self.quality, start - stop

    @property
    def layers(self) -> str:
        """Recomputed layers, as text for a person."""
        return "no layer" if self.block is None else f"layers [{self.block[0]}, {self.block[1]})"


class WatchedPair(msgspec.Struct, frozen=True, kw_only=True):
    sender: ModelId
    receiver: ModelId
    profile: str
    """Digest of the profile's content. If the digest changes, the evidence begins anew."""
    plans: tuple[WatchedPlan, ...]
    """Plans that are not exact, sorted by `WatchedPlan.order`."""
    num_left: int
    """Number of plans in service: the first ones of `plans`."""

    @property
    def is_demoted(self) -> bool:
        """Whether some of the pair's plans are out of service."""
        return self.num_left < len(self.plans)

    @property
    def in_service(self) -> tuple[WatchedPlan, ...]:
        return self.plans[: self.num_left]

    @property
    def state(self) -> str:
        """State of a pair that inherits a plan, as a label of a metric."""
        if not self.plans:
            return "too_far"
        if not self.in_service:
            return "out_of_service"
        on_probation = any(it.probation is not None for it in self.in_service)
        return "probation" if on_probation else "in_service"

    @property
    def out_of_service(self) -> Iterator[PlanId]:
        return self._ids(self.plans[self.num_left :])

    @property
    def strength(self) -> float:
        """Strongest evidence against a plan in service; 0 if there is none."""
        return max((strength(it.evidence) for it in self.in_service), default=0.0)

    @property
    def suspects(self) -> Iterator[PlanId]:
        """Plans in service for which every answer is compared."""
        return self._ids(it for it in self.in_service if self.is_demoted or it.is_suspect)

    def _ids(self, plans: Iterable[WatchedPlan]) -> Iterator[PlanId]:
        return (PlanId(self.sender, self.receiver, *it.key) for it in plans)


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one comparison: the distance of a request's answer from an exact prefill."""

    plan: PlanId
    tv: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Distance between answer and exact prefill: the mean total variation."""
    document: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Digest of the tokens with reused KV. If empty, the request is a document of its own."""
    hour: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """Hours since 1970. The front end sets it, so that all ranks decide alike."""


class GuardQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message to the drift guard. With no field set, it only asks for the state."""

    shadow: Shadow | None = None
    missed: dict[
        Literal["dropped", "failed"], Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    ] = {}
    """Number of comparisons without a result, for each cause."""
    reset: str | None = None
    """Id or name of a sender, or `all`. The evidence about the sender's pairs begins anew."""


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    shadow_rate: float
    pairs: tuple[WatchedPair, ...]
    suspects: tuple[PlanId, ...]
    names: dict[str, str] = {}
    """Names of models by id."""
    off: str = ""
    """Reason why the server reuses nothing, with the remedy. Empty if it reuses."""


def watched(profile: PairProfile) -> WatchedPair:
    """Return a pair with all plans of its profile in service, and no evidence. Inherited plans are
    on probation."""
    plans = [_watched(it) for it in profile.blocks if not _is_exact(it, profile)]
    if isinstance(profile, LineProfile):
        plans = [msgspec.structs.replace(it, probation=Probation()) for it in plans]
    return WatchedPair(
        sender=profile.sender.model_id,
        receiver=profile.receiver.model_id,
        profile=blake2b(msgspec.json.encode(profile), digest_size=16).hexdigest(),
        plans=tuple(sorted(plans, key=lambda it: it.order)),
        num_left=len(plans),
    )


def after(pair: WatchedPair, shadow: Shadow) -> WatchedPair:
    """Return the pair after one more comparison. If the compared plan is out of service, return the
    same object."""
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
            is_alarm = strength(seen.evidence) >= ALARM or (
                seen.probation is not None and seen.probation.is_alarm
            )
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
    probation = plan.probation and plan.probation.after(shadow.tv, plan.allowed)
    if probation is not None and probation.is_over:
        probation = None
    began = plan.hour_began if shadow.hour == plan.hour else plan.evidence
    return msgspec.structs.replace(
        plan,
        evidence=limited(observed(plan.evidence, shadow.tv, plan.allowed), began),
        hour=shadow.hour,
        hour_began=began,
        documents=(*plan.documents, shadow.document)[-MAX_DOCUMENTS:],
        probation=probation,
    )


def left_of(profile: PairProfile, pair: WatchedPair) -> PairProfile:
    """Return the profile without the plans that are out of service."""
    if not pair.is_demoted:
        return profile
    left = [it.key for it in pair.in_service]
    blocks = (it for it in profile.blocks if _is_exact(it, profile) or _watched(it).key in left)
    return profile.limited_to(tuple(blocks), OUT_OF_SERVICE)


def _is_exact(block: BlockQuality, profile: PairProfile) -> bool:
    return block.start <= profile.first_difference and block.stop == profile.receiver.num_layers


def _watched(block: BlockQuality) -> WatchedPlan:
    return WatchedPlan(
        block=(block.start, block.stop) if len(block.block) else None,
        e_corrected=block.e_map is not None,
        allowed=(block.tv_bound or 0.0) + NOISE,
        quality=block.quality,
    )


def observed(evidence: Evidence, x: float, allowed: float) -> Evidence:
    """Return the evidence after a distance `x` in [0, 1]. `allowed` (> 0) is the allowed mean."""
    return tuple(
        (1.0 + before) * (1.0 - share + share * x / allowed)
        for before, share in zip(evidence, SHARES, strict=True)
    )


def limited(evidence: Evidence, began: Evidence) -> Evidence:
    """Return the evidence, at most HOUR * (1 + the evidence at the beginning of the hour)."""
    return tuple(min(now, HOUR * (1.0 + then)) for now, then in zip(evidence, began, strict=True))


def strength(evidence: Evidence) -> float:
    """Return the mean evidence over all bets. At ALARM the plan is stopped."""
    return fmean(evidence)


def suspicion(evidence: Evidence) -> float:
    """Return a sign of drift that rises earlier than `strength`, but proves nothing. If all
    distances are 0, it is at most 1. If they are half of the allowed mean, it is at most 2. For
    larger distances it has no bound."""
    return max(share * now for share, now in zip(SHARES, evidence, strict=True))


def distance(served: Sequence[LogProbs], exact: Sequence[LogProbs]) -> float:
    """Return the mean total variation, 0 to 1, over the positions that both answers have."""
    pairs = zip(served, exact, strict=False)
    return fmean(total_variation(ours, theirs) for ours, theirs in pairs)


def total_variation(served: LogProbs, exact: LogProbs) -> float:
    """Return a lower bound of the total variation between both sides at one position."""
    ours, theirs = ({token: exp(it) for token, it in one.items()} for one in (served, exact))
    return max(_excess(ours, theirs), _excess(theirs, ours))


def _excess(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return how much more probability `one` gives to its reported tokens than `other` can give to
    them at most, summed over the tokens for which it is more."""
    most = sorted(other.values(), reverse=True)[:TOP][-1]
    return min(1.0, sum(max(0.0, it - other.get(token, most)) for token, it in one.items()))
