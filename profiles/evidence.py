"""The evidence in a profile: everything that the profiler measured, for people and for reports.

    split "train"     chooses the frontier: every block by KL, promising ones by the metric
    split "held_out"  judges: the frontier from most work to least, and the baselines

The frontier has the plans that beat all plans with fewer layers, by quality or by KL. Qualities are
means of the profile's metric over contexts, 0 to 1. A context counts as the mean over its
questions. Losses are differences of qualities. Times are in seconds. A layer's number is its index
in the model, from 0; spans are half-open.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from statistics import median

import msgspec

from cachetree import PairProfile, Span
from cachetree.planning import EMap, LayerTimes, Line, WrittenBlock, read_profile_as
from profiles.data.metrics import Metric, Quality
from profiles.data.tasks import TaskOptions


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over contexts, with its 95 % confidence interval by a bootstrap of contexts."""

    mean: float
    low: float
    high: float


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of answers over a plan's KV from answers by full prefill.

    Full prefill's greedy answer is fed in over the plan's KV. Values are means over the tokens of
    an answer, then over a context's questions, then over contexts.
    """

    kl: float
    """KL divergence of full prefill's next-token distribution from the plan's, in nats per
    token."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name of the data as the user gave it: a file's name, or `longbench:hotpotqa`."""
    sha256: str
    """Digest of the records that were used, written as JSON one after the other."""
    num_questions: int


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of full prefill with the questions' document, without it, and with another one."""

    num_contexts: int
    full_prefill: float
    """Quality with the document, on these contexts."""
    no_document: float
    other_document: float
    in_two_parts: float | None = None
    """Quality on each context's first question if its prompt is computed in two parts. None if the
    metric does not compare with full prefill's answers."""


class TaskScores(msgspec.Struct, frozen=True, kw_only=True):
    """One data set of a split, and the quality of sender, full prefill and full reuse on it."""

    name: str
    metric: str
    num_contexts: int
    num_questions: int
    sender: float
    full_prefill: float
    full_reuse: float
    controls: Controls | None = None
    """Controls of a held-out split. None if they were not measured, as in old profiles."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One half of the questions, and the quality of sender, full prefill and full reuse on it."""

    files: tuple[DataFile, ...]
    contexts: tuple[str, ...]
    """Digests of the contexts' texts (`profiles.data`). They show whether other data have the same
    contexts."""
    tasks: tuple[TaskScores, ...]
    num_questions: int
    mean_prefix_tokens: float
    """Mean number of tokens of the prefix that prompts share: whole pages, which are reused."""
    max_prefix_tokens: int
    prefix_tokens: tuple[int, ...] = ()
    """Number of prefix tokens of each context, in order; empty in old profiles."""
    mean_suffix_tokens: float
    """Mean number of prompt tokens behind the prefix."""
    sender: Interval
    """Quality of the sender's own answers."""
    full_prefill: Interval
    """Quality of the receiver's answers by full prefill."""
    full_reuse: Interval
    """Quality of the receiver with the sender's KV at all layers."""

    @property
    def num_contexts(self) -> int:
        return len(self.contexts)

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Numbers of prefix and suffix tokens for which TTFTs are predicted."""
        return round(self.mean_prefix_tokens), round(self.mean_suffix_tokens)


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """Effect on the answers if one layer's KV is the sender's, and the KV of all others is the
    receiver's own (§3)."""

    layer: int
    fidelity: Fidelity
    kl_by_context: tuple[float, ...]
    """Mean KL over the questions of each training document on which all blocks were compared, in
    the documents' order."""


class MeasuredBlock(WrittenBlock, frozen=True, kw_only=True):
    """Measurements of one block on the training split."""

    fidelity: Fidelity
    """Distance from full prefill on the questions on which the block was measured."""
    quality: float | None
    """Quality of the block's answers. None if they were not decoded, because another block with no
    more work stays closer to full prefill."""


class TaskLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one plan at one task of the held-out split."""

    quality: float
    bound: float
    """Upper bound on the share of full prefill's quality that the plan loses, with the gate's
    confidence."""
    needed: int | None
    """Number of contexts like these that would prove that the plan is within the tolerance. None if
    no number is enough."""
    num_contexts: int | None = None
    """Number of contexts that judged the plan, until it was proven or hopeless. None in old
    profiles, in which all contexts judged."""
    full_prefill: float | None = None
    """Full prefill's quality on the contexts that judged the plan."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out contexts for measuring baselines, and plans that the gate does not judge."""

    num_contexts: int
    full_prefill: float
    """Full prefill's quality on the questions of these contexts."""


class FrontierPoint(WrittenBlock, frozen=True, kw_only=True, omit_defaults=True):
    """Measurements of one plan of the frontier. On the training split it beats, by quality or KL,
    all plans with fewer recomputed layers, or all of them that are expected to pass the gate."""

    e_map: EMap | None = None
    """The map that corrects E at the block's start. It was fitted on contexts of the training split
    or of `--fit-data`."""

    train_quality: float
    held_out: Interval
    tasks: tuple[TaskLoss, ...]
    """Results by task, in the order of the held-out split. Empty if the gate did not judge the
    plan."""
    shown: Shown | None = None
    """Contexts that measured the plan, if the gate did not judge it. None in old profiles."""
    fidelity: Fidelity
    """Distance from full prefill on the held-out split."""
    ttft_s: float
    """TTFT that the cost model predicts at the split's mean lengths, with KV and E loaded from the
    host."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Qualities of the held-out answers, from which the verdict can be computed again."""

    tasks: tuple[int, ...]
    """Index of each judged context's task, in the order in which contexts were judged."""
    full_prefill: tuple[tuple[Quality, ...], ...]
    """Full prefill's qualities by context, then by question."""
    plans: tuple[tuple[tuple[Quality, ...], ...], ...]
    """Qualities of every plan that the gate tried, in the gate's order, for each context, then each
    question. A plan's contexts end when it was proven or hopeless."""


class BaselineKind(StrEnum):
    """Other methods with which plans are compared. Values are in files and never change."""

    CACHEBLEND = "cacheblend"
    """Recompute all tokens at the first layer. At each later layer, recompute fewer: the tokens
    with the largest difference of KV at the layer before (CacheBlend, EuroSys '25, §4.3)."""
    TOKEN_SELECTION = "token_selection"
    """At all layers, recompute the tokens with the largest difference of KV at the first layer.
    Only in old profiles, which have no CacheBlend."""
    CRITICAL_LAYERS = "critical_layers"
    """Recompute the layers that change answers most if only that one layer is reused. Each run of
    neighbouring layers starts from E (fig. 10)."""
    SPLIT_BLOCK = "split_block"
    """Recompute the recommended plan's layers in several runs, with E loaded at the start of each.
    In old profiles, or if no plan is recommended, the plan is the one that the training split
    expected to pass."""
    SMALL_MODEL = "small_model"
    """Answer with a smaller model, by full prefill."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one baseline on the held-out split."""

    kind: BaselineKind
    recomputed_layers: float
    """Work, as a number of the receiver's layers. To recompute a tenth of the tokens counts as a
    tenth of all layers. So does a smaller model with a tenth of full prefill's TTFT."""
    runs: tuple[tuple[int, int], ...]
    """Recomputed layers, as spans of neighbouring layers. Empty for baselines that do not choose
    layers."""
    quality: Interval
    fidelity: Fidelity | None
    """Distance from full prefill. None for a smaller model, which has answers of its own."""
    ttft_s: float
    shown: Shown | None = None
    """Contexts on which the baseline was measured. None in old profiles, and for a smaller model,
    which answers all questions."""


class CostModel(LayerTimes, frozen=True, kw_only=True):
    """Fitted times of this receiver on this device. n and m are the numbers of prefix and suffix
    tokens.

    one layer over n tokens       layer_s + n * layer_token_s + n * n * layer_token2_s
    only K and V of one layer     kv_s + n * kv_token_s
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
        """Relative error |predicted - measured| / measured of each held-out plan."""
        return [abs(it.predicted_s - it.measured_s) / it.measured_s for it in self.held_out]

    @property
    def error(self) -> float:
        """Median relative error of the held-out plans."""
        return median(self.errors)

    def layers_s(self, num_tokens: int, num_layers: float) -> float:
        """Seconds for `num_layers` full layers over a prefix."""
        per_layer = self.layer_s + num_tokens * (
            self.layer_token_s + num_tokens * self.layer_token2_s
        )
        return num_layers * per_layer

    def pass_s(self, num_tokens: int, num_layers: int) -> float:
        """Seconds for a pass over a prefix through at least one layer. The pass computes only K and
        V in its last layer."""
        full_s = self.layers_s(num_tokens, num_layers - 1)
        return full_s + self.kv_s + num_tokens * self.kv_token_s

    def load_time_s(self, num_bytes: float) -> float:
        return self.load_s + num_bytes * self.load_byte_s if num_bytes else 0.0

    def suffix_time_s(self, num_tokens: int, num_suffix: int) -> float:
        return self.suffix_s + num_suffix * (
            self.suffix_token_s + num_tokens * self.suffix_token2_s
        )

    def full_prefill_s(self, num_tokens: int, num_suffix: int) -> float:
        """TTFT of a full prefill: prefix and suffix in one pass."""
        return self.layers_s(num_tokens + num_suffix, self.num_layers)

    def ttft_s(self, runs: tuple[Span, ...], num_tokens: int, num_suffix: int) -> float:
        """TTFT if the layers of `runs` are recomputed and all other layers are loaded, one after
        the other.

        A run's last layer computes only K and V. A run starts from E, or at layer 0.
        """
        kv_bytes, e_bytes = (num_tokens * it for it in self.moved_bytes(runs))
        load_s = self.load_time_s(kv_bytes) + self.load_time_s(e_bytes)
        compute_s = sum(self.pass_s(num_tokens, len(run)) for run in runs if len(run))
        return load_s + compute_s + self.suffix_time_s(num_tokens, num_suffix)

    def moved_bytes(self, runs: tuple[Span, ...]) -> tuple[int, int]:
        """Return the bytes of KV and of E that a plan loads for each token. `runs` are the spans of
        layers that it recomputes."""
        num_recomputed = sum(len(run) for run in runs)
        num_e = sum(run.start > 0 for run in runs if len(run))
        return (self.num_layers - num_recomputed) * self.kv_bytes, num_e * self.e_bytes


class HeldOutTime(msgspec.Struct, frozen=True, kw_only=True):
    """One plan at a length that the cost model was not fitted on. A plan of all layers is a full
    prefill."""

    num_tokens: int
    num_suffix: int
    start: int
    stop: int
    predicted_s: float
    measured_s: float


class Making(msgspec.Struct, frozen=True, kw_only=True):
    """Command, settings and machine that made the profile."""

    date: str
    command: str
    versions: dict[str, str]
    hardware: str
    device: str
    dtype: str
    seed: int
    held_out_share: float = 0.5
    """Share of the contexts of `--data` that judged, unless there was `--held-out`."""
    group: int
    """Number of layers between two starts, or two stops, of blocks."""
    page_size: int
    template: str
    metric: Metric | None = None
    """The metric that the user stated; None if each data set has its own."""
    chat: bool = False
    """True if each prompt was a user's message in the tokenizer's chat template."""
    max_new: int
    """Longest answer in tokens; 0 if each data set says its own."""
    max_prompt_tokens: int | None = None
    """Tokens of the longest prompt; longer prompts were cut. None: as many as the model takes."""
    fitted: tuple[str, ...] = ()
    """Digests of the contexts of `--fit-data` on which maps were fitted."""
    e_correction: bool | None = None
    """True if plans with corrected E were tried. None in old profiles, which do not say."""
    pruned: bool
    """True if only blocks on the frontier of work against KL were decoded."""
    prefix_passes: int
    """Number of forward passes over prefixes of contexts: the sum of both models, of the two splits
    of the data, and of the baselines. A receiver's pass may begin at a later layer. Passes that
    were repeated after an interruption count."""
    sweep_passes_per_context: int
    """Number of passes over one training context that measured all blocks."""
    elapsed_s: float

    @property
    def options(self) -> TaskOptions:
        """Options that the user stated for every data set."""
        return TaskOptions(
            template=self.template or None,
            metric=self.metric,
            max_new=self.max_new or None,
            chat=self.chat,
        )


class MeasuredProfile(PairProfile, frozen=True, kw_only=True):
    """A profile with its evidence."""

    train: Split
    held_out: Split
    layers: tuple[LayerSensitivity, ...]
    measured: tuple[MeasuredBlock, ...]
    """Every block that was compared by KL, sorted by start, then by stop."""
    frontier: tuple[FrontierPoint, ...]
    """Plans on the training split's frontier, by size."""
    order: tuple[int, ...]
    """Indices of plans in `frontier`, in the order in which the gate tries these plans."""
    baselines: tuple[Baseline, ...]
    costs: CostModel
    made: Making
    judged: Judged | None = None
    """Qualities of the held-out answers, from which the verdict can be computed again. None in old
    profiles."""
    line: Line | None = None
    """Models of a line, as in `LineProfile`; None for a profile of one pair. Each pair of a line
    has tasks of its own."""


def read_measured(path: Path) -> MeasuredProfile:
    """Read a profile with its evidence; raises ProfileError naming the file and the problem."""
    return read_profile_as(MeasuredProfile, path)
