"""The pair profile: what an offline run found out about one (sender, receiver) pair."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cachetree.errors import ProfileError
from cachetree.family import ModelIdentity
from cachetree.ids import Span

VERSION = 1


class BlockQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of the receiver's answers when only layers `[start, stop)` are its own."""

    start: int
    stop: int
    quality: float
    """Mean of the profile's metric over its held-out questions, 0 to 1."""

    @property
    def block(self) -> Span:
        return Span(self.start, self.stop)


class PairProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the profiler, read by servers. Unknown fields are ignored, unknown versions not.

    `passed` is the gate: a server reuses a pair only if its profile passed.
    """

    version: int
    sender: ModelIdentity
    receiver: ModelIdentity
    metric: str
    data_sha256: str
    num_questions: int
    sender_quality: float
    full_prefill_quality: float
    full_reuse_quality: float
    tolerance: float
    """Largest accepted loss, relative to full prefill (0.05 = 5 %)."""
    blocks: tuple[BlockQuality, ...]
    recommended: BlockQuality | None
    passed: bool
    reason: str
    """Why the gate passed or failed, in one sentence for a person."""
    provenance: dict[str, str] = {}
    """Free text: package versions, hardware, date, command."""

    @property
    def quality_floor(self) -> float:
        return self.full_prefill_quality * (1.0 - self.tolerance)

    def transition_layers(self) -> frozenset[int]:
        """Layers at which a sender of this pair should keep E."""
        recommended = self.recommended
        return frozenset() if recommended is None else frozenset({recommended.start} - {0})


def read_profile(path: Path) -> PairProfile:
    """Read one profile; raises ProfileError naming the file and what is wrong with it."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ProfileError(f"profile {path} cannot be read: {exc.strerror}") from exc
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version != VERSION:
            raise ProfileError(
                f"profile {path} has version {version}; this release reads version {VERSION}, "
                "so make the profile again with `droidspeak profile`"
            )
        return msgspec.json.decode(raw, type=PairProfile)
    except msgspec.DecodeError as exc:
        raise ProfileError(f"profile {path} is not a pair profile: {exc}") from exc


def write_profile(profile: PairProfile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))


class _Versioned(msgspec.Struct):
    version: int
