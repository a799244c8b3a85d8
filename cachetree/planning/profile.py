"""The pair profile: the profiler's verdict about one (sender, receiver) pair.

A profile's file also has the evidence for the verdict (`profiles.evidence`), which servers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from cachetree.checkpoint import ModelIdentity
from cachetree.errors import UNREADABLE, ProfileError, written
from cachetree.files import replacing
from cachetree.ids import EMPTY_SPAN, Span

PROFILE_VERSION = 6


class WrittenBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block as a profile writes it: layers `[start, stop)` are recomputed."""

    start: int
    stop: int

    @property
    def block(self) -> Span:
        return Span(self.start, self.stop)


class EMap(msgspec.Struct, frozen=True, kw_only=True):
    """A linear map that corrects the sender's E before a block begins, so that it is closer to the
    receiver's E. Its tensors are in a file beside the profile (`cachetree.corrections`)."""

    layer: int
    dtype: str
    sha256: str
    """Digest of the map's tensors."""

    @property
    def name(self) -> str:
        return f"layer {self.layer}"


class BlockQuality(WrittenBlock, frozen=True, kw_only=True, omit_defaults=True):
    """Quality of the receiver's answers with one block."""

    quality: float
    """Mean of the profile's metric over its held-out contexts, 0 to 1."""
    e_map: EMap | None = None
    """Map that corrects E at the block's start. None: the block uses the sender's E as it is."""
    tv_bound: float | None = None
    """Upper bound, with 99 % confidence, on the mean total variation from full prefill, along the
    first tokens of full prefill's greedy answers. The drift guard measures the same distance along
    served answers. None if not measured."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one full layer over a prefix of n tokens: layer_s + n * layer_token_s + n² *
    layer_token2_s, measured on the machine that made the profile."""

    layer_s: float
    layer_token_s: float
    layer_token2_s: float


class PairProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as the profiler writes it and servers read it. Servers ignore unknown fields, but
    refuse unknown versions.

    Servers use `blocks` only if the profile passed. The `lossless` block needs no pass.
    """

    version: int
    sender: ModelIdentity
    receiver: ModelIdentity
    sender_name: str = ""
    """Readable name of the sender, as the profiler got it. Empty in old profiles, like
    `receiver_name`."""
    receiver_name: str = ""
    metric: str
    data_sha256: str
    num_questions: int
    sender_quality: float
    full_prefill_quality: float
    full_reuse_quality: float
    tolerance: float
    """Largest accepted loss, relative to full prefill (0.05 = 5 %)."""
    blocks: tuple[BlockQuality, ...]
    """Blocks that a server may use: the block of all layers, and the blocks that the gate has
    proven to lose at most `tolerance` at every task (`profiles.stats.gate`)."""
    recommended: BlockQuality | None
    """Block among `blocks` that recomputes the fewest layers. None if the pair did not pass."""
    passed: bool
    reason: str
    """One sentence for people on why the gate passed or failed."""
    first_difference: int = 0
    """First layer at which the two models' tensors differ; the profiler compares them byte by byte.
    Below it their KV is bit-identical. 0 if layer 0 differs, or if nothing is known."""

    measured_tokens: int | None = None
    """Number of tokens, in whole pages, of the longest prompts for which servers use the profile.
    At least 20 held-out contexts reach this length, or all contexts if there are fewer. The loss of
    reuse grows with the length. None if a profile does not say."""

    controls: str = ""
    """One sentence for people: the quality of full prefill without the documents, and with other
    documents. Empty if not measured, as in old profiles."""

    costs: LayerTimes | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the profile names layers that the receiver lacks."""
        named = [it.block for it in (*self.blocks, self.recommended) if it is not None]
        num_layers = self.receiver.num_layers
        for block in (Span(0, self.first_difference), *named):
            if block.stop > num_layers:
                raise ValueError(f"layers {block.start}:{block.stop} of a model of {num_layers}")

    @property
    def names(self) -> dict[str, str]:
        """Readable names by model id, without names that the profile lacks."""
        said = (self.sender, self.sender_name), (self.receiver, self.receiver_name)
        return {model.model_id: name for model, name in said if name}

    @property
    def pair(self) -> str:
        """Readable names of sender and receiver: `name (first eight digits of its id) → ...`."""
        sender = f"{self.sender_name or 'sender'} ({self.sender.model_id[:8]})"
        return f"{sender} → {self.receiver_name or 'receiver'} ({self.receiver.model_id[:8]})"

    @property
    def e_maps(self) -> tuple[EMap, ...]:
        """Maps of the profile's plans, each once."""
        maps = {it.e_map.sha256: it.e_map for it in self.blocks if it.e_map is not None}
        return tuple(maps.values())

    def uncorrected(self) -> PairProfile:
        """Return the profile without the plans that correct E. If only the plan of all layers is
        left, the returned profile counts as not passed."""
        plain = tuple(it for it in self.blocks if it.e_map is None)
        if len(plain) == len(self.blocks):
            return self
        return self.limited_to(plain, "all of its plans correct E; set e_correction to profile")

    def limited_to(self, blocks: tuple[BlockQuality, ...], reason: str) -> Self:
        """Return the profile with only these plans. If only the plan of all layers is left, the
        returned profile counts as not passed, for `reason`."""
        left = [it for it in blocks if len(it.block) < self.receiver.num_layers]
        return msgspec.structs.replace(
            self,
            blocks=blocks,
            recommended=min(left, key=lambda it: len(it.block), default=None),
            passed=self.passed and bool(left),
            reason=reason if self.passed and not left else self.reason,
        )

    def covers(self, num_tokens: int) -> bool:
        """Return whether servers may use the profile for prefixes of this length."""
        return self.measured_tokens is None or num_tokens <= self.measured_tokens

    @property
    def lossless(self) -> Span | None:
        """The lossless block: its recompute gives exactly the receiver's KV.

        The block has all layers from the first one at which the two models' tensors differ. Empty
        if no tensor differs: all KV may be loaded. None if layer 0 differs, or no comparison was
        made.
        """
        if not self.first_difference:
            return None
        num_layers = self.receiver.num_layers
        differs = self.first_difference < num_layers
        return Span(self.first_difference, num_layers) if differs else EMPTY_SPAN

    @property
    def is_usable(self) -> bool:
        """Return whether a server may use the profile: it has passed, or has a lossless block."""
        return self.passed or self.lossless is not None

    def transition_layers(self) -> frozenset[int]:
        """Layers at which a sender of this pair should keep E."""
        starts = {(self.lossless or EMPTY_SPAN).start}
        if self.recommended and self.passed:
            starts.add(self.recommended.start)
        return frozenset(starts - {0})


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Models, each trained from the one before it, and the distances between their weights."""

    models: tuple[ModelIdentity, ...]
    names: tuple[str, ...]
    """Readable names of the models, in the same order."""
    distances: tuple[tuple[float, ...], ...]
    """Relative change of the weights from each model to the next, see
    `cachetree.checkpoint.sketches`."""

    def __str__(self) -> str:
        return " → ".join(self.names)

    def excess(self, change: Sequence[float]) -> str:
        """Describe a layer at which `change` is larger than the measured change of weights. Empty
        if, for one measured pair of the line, `change` is no larger at any layer."""
        beyond = [_farthest(change, proven) for proven in self.distances]
        changed, proven, place = min(beyond, key=lambda it: it[0] - it[1])
        if changed <= proven:
            return ""
        where = f"layer {place - 1}" if place else "the embeddings"
        return (
            f"{where} changed by {changed:.2g} of its weights, and the line {self} is proven for "
            f"{proven:.2g}"
        )


def _farthest(change: Sequence[float], proven: Sequence[float]) -> tuple[float, float, int]:
    """Find the layer at which `change` exceeds `proven` most. Return both values there, and the
    layer's index plus 1 (0: the embeddings)."""
    places = zip(change, proven, range(len(change)), strict=True)
    return max(places, key=lambda it: it[0] - it[1])


class LineProfile(PairProfile, frozen=True, kw_only=True):
    """Profile with one choice of plans for a line of models. Sender and receiver are the last pair
    of the line. It passed if every pair of the line passed."""

    line: Line

    @property
    def names(self) -> dict[str, str]:
        """Names of the line's models by model id."""
        models = (it.model_id for it in self.line.models)
        return dict(zip(models, self.line.names, strict=True))

    def inherited(
        self, sender: ModelIdentity, receiver: ModelIdentity, change: Sequence[float]
    ) -> LineProfile:
        """Return the profile of a later pair, with weights that differ by `change`. It passes with
        the line's plans if no measured change is exceeded."""
        pair = msgspec.structs.replace(
            self,
            sender=sender,
            receiver=receiver,
            sender_name="",
            receiver_name="",
            first_difference=0,
            reason=f"inherited from the line {self.line}",
        )
        excess = self.line.excess(change)
        all_layers = (it for it in self.blocks if len(it.block) == receiver.num_layers)
        return pair.limited_to(tuple(all_layers), excess) if excess else pair


Schema = TypeVar("Schema", bound=PairProfile)


def profile_files(path: Path) -> list[Path]:
    """Return the profiles of a folder, or the file itself."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def read_profile(path: Path) -> PairProfile:
    """Read a profile's verdict; raises ProfileError naming the file and the problem."""
    return read_profile_as(PairProfile, path)


def read_profile_as(schema: type[Schema], path: Path) -> Schema:
    """Read the fields of a profile that `schema` has. Raises ProfileError like `read_profile`."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ProfileError(f"profile {written(path)} cannot be read: {exc.strerror}") from exc
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version != PROFILE_VERSION:
            raise ProfileError(
                f"profile {path} has version {version}; this release reads version "
                f"{PROFILE_VERSION}, so make the profile again with `droidspeak profile`"
            )
        return msgspec.json.decode(raw, type=schema)
    except UNREADABLE as exc:
        raise ProfileError(
            f"profile {path} is not a pair profile: {exc}; `droidspeak profile` makes them"
        ) from exc


def read_line(path: Path) -> LineProfile:
    """Read the profile of a line. Raises ProfileError like `read_profile`, also if the profile is
    of a single pair."""
    read_profile(path)
    try:
        profile = read_profile_as(LineProfile, path)
    except ProfileError as exc:
        raise ProfileError(
            f"profile {path} is of one pair, and of no line of models; make one of a line with "
            "`droidspeak profile --line`, or name the file under `profiles`"
        ) from exc
    line, num_places = profile.line, profile.receiver.num_layers + 1
    sizes = [len(line.names), len(line.distances) + 1, *map(len, line.distances)]
    if sizes != [len(line.models)] * 2 + [num_places] * (len(line.models) - 1) or sizes[0] < 2:
        raise ProfileError(
            f"profile {path} has a line of {len(line.models)} models with {len(line.distances)} "
            "rows of distances, and needs two models or more and a row for each pair; make it again"
        )
    return profile


def require_one_each(profiles: Mapping[Path, PairProfile]) -> None:
    """Raise ProfileError if two files have different profiles of one pair: it is unclear which
    counts."""
    paths: dict[tuple[ModelIdentity, ModelIdentity], Path] = {}
    for file, profile in profiles.items():
        other = paths.setdefault((profile.sender, profile.receiver), file)
        if profiles[other] != profile:
            raise ProfileError(
                f"profiles {other} and {file} are of one pair, {profile.sender.model_id} → "
                f"{profile.receiver.model_id}; move one of them away"
            )


def write_profile(profile: PairProfile, path: Path) -> None:
    """Write a profile. A reader of the file sees either the whole old one or the whole new one."""
    with replacing(path) as fresh:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=0))


class _Versioned(msgspec.Struct):
    version: int
