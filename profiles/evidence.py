"""The evidence in a profile: everything that the profiler measured, for people and for reports.

    split "train"     chooses: every block by KL, the promising ones by the metric -> frontier
    split "held_out"  judges: the frontier from most work to least, and what one could do instead

Qualities are means of the profile's metric, 0 to 1, over contexts: each counts as the mean over its
questions. Losses are differences of them. Times are
seconds. A layer's number is its place in the model, counted from 0; spans are half-open.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from statistics import median

import msgspec

from cachetree import PairProfile, Span
from cachetree.planning import EMap, LayerTimes, WrittenBlock, read_profile_as
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over contexts and its 95 % confidence interval, bootstrapped over contexts."""

    mean: float
    low: float
    high: float


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """How closely the receiver follows itself when part of its KV is another's, teacher-forced.

    Means over the tokens of a question, then over a context's questions, then over contexts. The
    receiver's own greedy answer is given; the distance is to its own full prefill.
    """

    kl: float
    """KL divergence of full prefill's next-token distribution from this one's, nats per token, on
    the own answer."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """As it was given: a file's name, or `longbench:hotpotqa`."""
    sha256: str
    """Of the records used, one after the other, as JSON."""
    num_questions: int


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of full prefill where a task's document is not what the questions are about."""

    num_contexts: int
    full_prefill: float
    """With the document, on these contexts."""
    no_document: float
    other_document: float
    in_two_parts: float | None = None
    """Of the first question of each context, computed in two parts; None if the metric does not
    compare with full prefill's own answers."""


class TaskScores(msgspec.Struct, frozen=True, kw_only=True):
    """One data set of a split, and how the models do on it by themselves."""

    name: str
    metric: str
    num_contexts: int
    num_questions: int
    sender: float
    full_prefill: float
    full_reuse: float
    controls: Controls | None = None
    """Of a held-out split; None if they were not measured, as in old profiles."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One set of questions, and how the models do on it by themselves."""

    files: tuple[DataFile, ...]
    contexts: tuple[str, ...]
    """Digests of their texts, so that other data can be told to be other (`profiles.data`)."""
    tasks: tuple[TaskScores, ...]
    num_questions: int
    mean_prefix_tokens: float
    """Tokens in whole pages of the shared context: what is reused."""
    max_prefix_tokens: int
    prefix_tokens: tuple[int, ...] = ()
    """Of each context, in their order; old profiles do not say."""
    mean_suffix_tokens: float
    """Tokens after them, without the answer."""
    sender: Interval
    """The sender alone."""
    full_prefill: Interval
    """The receiver alone."""
    full_reuse: Interval
    """The receiver with the sender's KV at all layers."""

    @property
    def num_contexts(self) -> int:
        return len(self.contexts)

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Tokens of prefix and suffix for which TTFTs are predicted."""
        return round(self.mean_prefix_tokens), round(self.mean_suffix_tokens)


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What changes when one layer's KV is the sender's and all others the receiver's own (§3)."""

    layer: int
    fidelity: Fidelity
    kl_by_context: tuple[float, ...]
    """Means over the questions of each document of the training split that was swept, in order."""


class MeasuredBlock(WrittenBlock, frozen=True, kw_only=True):
    """One block on the training split."""

    fidelity: Fidelity
    """Over as many questions as it was measured on."""
    quality: float | None
    """None where its answers were not decoded: others stay closer and take no more work."""


class TaskLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan keeps at one task of the held-out split."""

    quality: float
    bound: float
    """Share of full prefill's quality that is lost at most, with the gate's confidence."""
    needed: int | None
    """Contexts like these that would show it to be within the tolerance; None where none would."""
    num_contexts: int | None = None
    """Contexts that it was judged on, until it was proven or hopeless. Old profiles: None, all."""
    full_prefill: float | None = None
    """Full prefill's quality on them."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The contexts of the held-out split that stand for all where the gate does not ask."""

    num_contexts: int
    full_prefill: float
    """Full prefill's quality on their questions."""


class FrontierPoint(WrittenBlock, frozen=True, kw_only=True, omit_defaults=True):
    """No block of at most its size is as good on the training split, or none stays as close to
    full prefill there."""

    e_map: EMap | None = None
    """What corrects E at its start, fitted on contexts of the training split or of `--fit-data`."""

    train_quality: float
    held_out: Interval
    tasks: tuple[TaskLoss, ...]
    """In the order of the held-out split's; none where the gate does not ask about the plan."""
    shown: Shown | None = None
    """On which it was measured where the gate does not ask; old profiles do not say."""
    fidelity: Fidelity
    """On the held-out split."""
    ttft_s: float
    """Predicted by the cost model at the split's mean lengths, KV and E loaded from the host."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Qualities of the held-out answers, so that anybody can compute the verdict again."""

    tasks: tuple[int, ...]
    """Place of each context's task, in the order in which contexts were judged."""
    full_prefill: tuple[tuple[float, ...], ...]
    """By context, then by question."""
    plans: tuple[tuple[tuple[float, ...], ...], ...]
    """Likewise of every plan that the gate tried, in its order; each on the first contexts."""


class BaselineKind(StrEnum):
    """What one could do instead. Values are in files and never change."""

    CACHEBLEND = "cacheblend"
    """All tokens at the first layer, and at each one after it fewer of them: those whose KV
    differed most at the layer before (CacheBlend, EuroSys '25, §4.3)."""
    TOKEN_SELECTION = "token_selection"
    """Tokens whose first-layer KV differs most, recomputed at all layers; in profiles of before
    CacheBlend was measured."""
    CRITICAL_LAYERS = "critical_layers"
    """The layers of the largest single-layer loss, each run of them from E (fig. 10)."""
    SPLIT_BLOCK = "split_block"
    """The layers of a plan, reloading E between them: as many transitions as runs. It is the
    recommended plan, or the expected one where none is; in old profiles always the latter."""
    SMALL_MODEL = "small_model"
    """A smaller model by full prefill."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative on the held-out split."""

    kind: BaselineKind
    recomputed_layers: float
    """Compute in layers of the receiver: a share of tokens counts as that share of all layers."""
    runs: tuple[tuple[int, int], ...]
    """Layers recomputed, a span per transition; empty where it is not about layers."""
    quality: Interval
    fidelity: Fidelity | None
    """None for another model, which has another distribution to follow."""
    ttft_s: float
    shown: Shown | None = None
    """On which it was measured; None for a smaller model, which answers all questions, and in old
    profiles, which do not say."""


class CostModel(LayerTimes, frozen=True, kw_only=True):
    """Times of this receiver on this device, fitted; n and m are prefix and suffix tokens.

    one layer over n tokens       layer_s + n * layer_token_s + n * n * layer_token2_s
    K and V alone of one layer    kv_s + n * kv_token_s
    suffix, all layers and head   suffix_s + m * suffix_token_s + m * n * suffix_token2_s
    load of b bytes               load_s + b * load_byte_s
    """

    kv_s: float
    kv_token_s: float
    suffix_s: float
    suffix_token_s: float
    suffix_token2_s: float
    load_s: float
    load_byte_s: float
    kv_bytes: int
    """Bytes of one token's KV at one layer, in the dtype measured."""
    e_bytes: int
    """Bytes of one token's E."""
    num_layers: int
    held_out: tuple[HeldOutTime, ...]
    """Plans at other lengths, predicted and measured."""

    @property
    def errors(self) -> list[float]:
        """|predicted - measured| / measured of each held-out plan."""
        return [abs(it.predicted_s - it.measured_s) / it.measured_s for it in self.held_out]

    @property
    def error(self) -> float:
        """Their median."""
        return median(self.errors)

    def layers_s(self, num_tokens: int, num_layers: float) -> float:
        """`num_layers` full layers over a prefix."""
        per_layer = self.layer_s + num_tokens * (
            self.layer_token_s + num_tokens * self.layer_token2_s
        )
        return num_layers * per_layer

    def pass_s(self, num_tokens: int, num_layers: int) -> float:
        """A pass over a prefix through one layer or more, the last of them K and V alone."""
        full_s = self.layers_s(num_tokens, num_layers - 1)
        return full_s + self.kv_s + num_tokens * self.kv_token_s

    def load_time_s(self, num_bytes: float) -> float:
        return self.load_s + num_bytes * self.load_byte_s if num_bytes else 0.0

    def suffix_time_s(self, num_tokens: int, num_suffix: int) -> float:
        return self.suffix_s + num_suffix * (
            self.suffix_token_s + num_tokens * self.suffix_token2_s
        )

    def full_prefill_s(self, num_tokens: int, num_suffix: int) -> float:
        """TTFT of the receiver alone: prefix and suffix in one pass."""
        return self.layers_s(num_tokens + num_suffix, self.num_layers)

    def ttft_s(self, runs: tuple[Span, ...], num_tokens: int, num_suffix: int) -> float:
        """TTFT when the layers of `runs` are recomputed and the others loaded, one after the other.

        Each run ends in K and V alone, and starts from E, but for one that starts at layer 0.
        """
        kv_bytes, e_bytes = (num_tokens * it for it in self.moved_bytes(runs))
        load_s = self.load_time_s(kv_bytes) + self.load_time_s(e_bytes)
        compute_s = sum(self.pass_s(num_tokens, len(run)) for run in runs if len(run))
        return load_s + compute_s + self.suffix_time_s(num_tokens, num_suffix)

    def moved_bytes(self, runs: tuple[Span, ...]) -> tuple[int, int]:
        """Of one token, what is loaded from elsewhere: KV, and E."""
        num_recomputed = sum(len(run) for run in runs)
        num_e = sum(run.start > 0 for run in runs if len(run))
        return (self.num_layers - num_recomputed) * self.kv_bytes, num_e * self.e_bytes


class HeldOutTime(msgspec.Struct, frozen=True, kw_only=True):
    """One plan at a length that the cost model was not fitted on; all layers are a full prefill."""

    num_tokens: int
    num_suffix: int
    start: int
    stop: int
    predicted_s: float
    measured_s: float


class Making(msgspec.Struct, frozen=True, kw_only=True):
    """How the profile was made."""

    date: str
    command: str
    versions: dict[str, str]
    hardware: str
    device: str
    dtype: str
    seed: int
    group: int
    """Grid of the blocks, in layers."""
    page_size: int
    template: str
    metric: Metric | None = None
    """As it was stated; None where each data set has its own."""
    chat: bool = False
    """Whether each prompt was a user's message in the tokenizer's chat template."""
    max_new: int
    """Longest answer in tokens; 0 where each data set says it."""
    max_prompt_tokens: int | None = None
    """To which prompts were cut; None for what the model takes."""
    fitted: tuple[str, ...] = ()
    """Digests of the contexts of `--fit-data` that maps were fitted on."""
    pruned: bool
    """Whether only plans on the frontier of the fast measure were decoded."""
    prefix_passes: int
    """Runs of the receiver's layers, from some layer to the last, over one context's prefix; and
    the sender's one. All splits and baselines, and what an interruption had repeated."""
    sweep_passes_per_context: int
    """Of those, what every block of one training context took."""
    elapsed_s: float

    @property
    def options(self) -> TaskOptions:
        """What was stated about every data set."""
        return TaskOptions(
            template=self.template or None,
            metric=self.metric,
            max_new=self.max_new or None,
            chat=self.chat,
        )


class MeasuredProfile(PairProfile, frozen=True, kw_only=True):
    """A whole profile."""

    train: Split
    held_out: Split
    layers: tuple[LayerSensitivity, ...]
    measured: tuple[MeasuredBlock, ...]
    """Every block of the grid, by start, then by stop."""
    frontier: tuple[FrontierPoint, ...]
    """By size."""
    order: tuple[int, ...]
    """Places in the frontier of what the gate tries, the first one first."""
    baselines: tuple[Baseline, ...]
    costs: CostModel
    made: Making
    judged: Judged | None = None
    """None in old profiles."""


def read_measured(path: Path) -> MeasuredProfile:
    """A profile with its evidence; raises ProfileError naming the file and what is wrong."""
    return read_profile_as(MeasuredProfile, path)
