"""What messages ask for, checked before anything is done with it; all raise ProtocolError."""

from __future__ import annotations

from collections.abc import Sequence

from cachetree.errors import ProtocolError
from cachetree.ids import Kind, PageHash, Step, entry_steps
from cachetree.transport.config import PeerConfig, WorkerConfig
from cachetree.transport.frames import MIN_FRAME_BYTES, Flow
from cachetree.transport.wire import Fetch, Wanted
from cachetree.tree import split_hashes


def pages_of(named: bytes) -> tuple[PageHash, ...]:
    """The pages that a message names."""
    try:
        return split_hashes(named)
    except ValueError as exc:
        raise ProtocolError(str(exc)) from exc


def steps_of(message: Fetch, num_layers: int) -> tuple[Step, ...]:
    """The steps a Fetch names: each once, and of a kind and a layer that exist."""
    try:
        steps = tuple(Step(Kind(kind), layer) for kind, layer in message.steps)
    except ValueError as exc:
        raise ProtocolError(f"a fetch names an unknown kind: {exc}") from exc
    if len(set(steps)) != len(steps):
        raise ProtocolError("a fetch names a step twice")
    for step in steps:
        if not 0 <= step.layer < num_layers:
            raise ProtocolError(f"a fetch names layer {step.layer} of {num_layers}")
    return steps


def steps_of_store(num_layers: int, e_layers: Sequence[int]) -> tuple[Step, ...]:
    """What a Store moves, in order, if such layers can be."""
    if tuple(e_layers) != tuple(sorted(set(e_layers))):
        raise ProtocolError(f"a store names E of layers {list(e_layers)}, which do not rise")
    if any(not 0 <= layer < num_layers for layer in e_layers):
        raise ProtocolError(f"a store names E of layers {list(e_layers)} of {num_layers}")
    return entry_steps(num_layers, e_layers)


def flow_of(message: Fetch | Wanted, config: PeerConfig | WorkerConfig) -> Flow:
    """What its sender and we both keep to."""
    window_bytes = min(message.window_bytes, config.window_bytes)
    frame_bytes = min(message.frame_bytes, config.frame_bytes, window_bytes // 2)
    if frame_bytes < MIN_FRAME_BYTES:
        raise ProtocolError(
            f"the other side asks for frames of {message.frame_bytes} in a window of "
            f"{message.window_bytes}; the least is {MIN_FRAME_BYTES} and twice that"
        )
    return Flow(frame_bytes, window_bytes)
