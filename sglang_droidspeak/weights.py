"""Hooks on SGLang's weight updates. They find out which model is served after an update.

before a write   A new version of the weights begins. The model is unknown: full prefills only.
tensors          Tensors that an update loads by the checkpoint's names are hashed as they load.
folder           After an update from a folder, a thread hashes the folder's files.
settled          All ranks know the same weights: the model has an id, and reuse begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from cachetree import ConfigError, ModelId
from cachetree.checkpoint import (
    Layout,
    ModelIdentity,
    Sketch,
    Weights,
    bytes_digest,
    sketch_of,
    user_cache,
)
from sglang_droidspeak.adapters.models import Models, stamp_of
from sglang_droidspeak.engine import Hooks, HookType, release
from sglang_droidspeak.ranks import Ranks
from sglang_droidspeak.start.refuse import READ_AS_SAFETENSORS

log = logging.getLogger(__name__)

TYPES: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""Names of torch dtypes in safetensors headers."""

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(eq=False)
class WeightUpdates:
    """Follow updates of the served weights. SGLang runs the same updates on all ranks, in the same
    order. Scheduler thread only."""

    _weights: Weights
    _models: Models
    _ranks: Ranks
    _changed: Callable[[], object]
    """Function that is called when an update begins, before its first write."""
    _known: Callable[[ModelIdentity, Weights, str], object]
    """Function that is called once all ranks know the new weights. It takes the model, its weights,
    and its folder's name (empty if no folder was loaded)."""
    _reading: Future[Weights] | None = field(default=None, init=False)
    """Weights after the last update, while a thread reads them. All ranks read, or none."""
    _folder: str = field(default="", init=False)
    """Name of the folder that `_reading` reads."""
    _why: str = field(default="", init=False)
    """Reason, for the log, why the weights are unknown. May be empty."""
    _loads_folder: bool = field(default=False, init=False)
    _is_open: bool = field(default=False, init=False)
    """True between SGLang's begin and end of a session of updates. In between, other processes may
    write the weights."""

    def table(self) -> Hooks:
        return {
            release.WEIGHTS_RESTORED: (self.restore, HookType.BEFORE),
            release.WEIGHTS_RESET: (self.reset, HookType.BEFORE),
            release.UPDATE_FROM_DISK: (self.from_disk, HookType.AROUND),
            **dict.fromkeys(release.UPDATES_BY_NAME, (self.by_name, HookType.AROUND)),
            release.END_UPDATE: (self.end, HookType.AFTER),
        }

    def restore(self, *_args: object, **_kwargs: object) -> None:
        """Begin a new version of the weights: SGLang will load a folder, or a session of updates
        begins."""
        self._is_open |= not self._loads_folder
        self._begin()

    def reset(self, *_args: object, **_kwargs: object) -> None:
        """Begin a new version of the weights: SGLang will write random weights."""
        self._begin()
        self._forget("weights were reset")

    def from_disk(self, original: Any, updater: Any, path: str, *args: Any, **rest: Any) -> Any:
        """Load weights from the folder `path`, and agree with the other ranks on the result.

        If any rank has written weights, the weights of all ranks count as changed. If no rank has,
        as with a missing folder, nothing changes.
        """
        generation, before, stamp = self._models.generation, self._weights, _stamp(path)
        result: tuple[bool, str] = False, ""
        self._loads_folder = True
        try:
            result = original(updater, path, *args, **rest)
            return result
        finally:
            self._loads_folder = False
            has_written = self._models.generation != generation
            if not all(self._ranks.least([not has_written])):
                if not has_written:
                    self._begin()
                self._forget("" if result[0] else result[1] or "the update broke off")
                read: Callable[[], Weights] = before.unknown
                if result[0] and has_written and "weight_name_filter" not in rest:
                    load_format, stamps = rest.get("load_format", *args[:1]), (stamp, _stamp(path))
                    read = partial(_read, before, Path(path), stamps, load_format)
                self._end(read, Path(path).name)

    def by_name(self, original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an update, and hash each tensor that the model loads by a name of the checkpoint.

        An update by other names leaves the weights unknown: it writes tensors that SGLang has
        fused, cut or packed.
        """
        self._begin()
        loading = _Loading(updater.get_model(), self._weights, self._models.reader)
        self._forget("the update broke off")
        with loading:
            is_done, message = original(updater, *args, **kwargs)
        others = {kwargs.get("load_format"), *args[1:2]} - {None, "flattened_bucket"}
        why = f"load_format {others.pop()}" if others else loading.why
        self._why = why if is_done else message
        if is_done and not why:
            self._weights = loading.weights
        self._end(lambda: self._weights)
        return is_done, message

    def end(self, _result: None, _updater: object, *, run_post_load: bool) -> None:
        """End a session of updates. `run_post_load` means that other processes wrote the weights,
        so these are unknown."""
        self._begin()
        self._is_open = False
        if run_post_load:
            self._forget("another process wrote the weights")
        self._end(lambda: self._weights)

    def settle(self) -> None:
        """Give the model its id once all ranks know the same weights. All ranks call it in the same
        scheduler step. Does nothing while a rank still reads."""
        if self._reading is None or not all(self._ranks.least([self._reading.done()])):
            return
        reading, self._reading = self._reading, None
        try:
            self._weights = reading.result()
        except Exception as exc:
            self._forget(str(exc))
            if not isinstance(exc, ConfigError | OSError):
                log.exception("droidspeak: the new weights were not read")
        identity = self._weights.identity
        model = None if identity is None else identity.model_id
        is_agreed = self._ranks.share(model, ModelId | None) == model
        if all(self._ranks.least([is_agreed and identity is not None])) and identity is not None:
            self._models.become(identity)
            self._known(identity, self._weights, self._folder)
            return
        if identity is not None:
            self._forget("the ranks have other weights")
        self._models.unknown = "weights_updated"
        log.warning(
            "droidspeak: weights were updated, and the served model is unknown: %s; nothing is "
            "reused until an update names every tensor",
            self._why or "not every tensor is known",
        )

    def _begin(self) -> None:
        if not self._models.unknown:
            log.info("droidspeak: weights are updated in place; full prefills until they are known")
        self._reading = None
        self._models.change()
        self._changed()

    def _forget(self, why: str) -> None:
        self._weights, self._why = self._weights.unknown(), why

    def _end(self, read: Callable[[], Weights], folder: str = "") -> None:
        if self._is_open:
            return
        self._models.unknown = "reading_weights"
        self._folder = folder
        self._reading = self._models.reader.submit(read)


class _Loading:
    """Hash all tensors that a model loads by name inside the `with` block."""

    def __init__(self, model: Any, weights: Weights, threads: Executor) -> None:
        self.weights = weights
        """Weights of the model, with all tensors that were loaded by name so far."""
        self._odd = ""
        self._has_loaded = False
        self._model = model
        self._threads = threads
        self._load = model.load_weights

    @property
    def why(self) -> str:
        """Reason why the weights are unknown after the `with` block; empty if they are known."""
        return self._odd if self._has_loaded else "nothing was loaded by the checkpoint's names"

    def __enter__(self) -> None:
        self._model.load_weights = self._load_hashed

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights

    def _load_hashed(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        reading: dict[str, Future[tuple[str, Sketch | None]]] = {}
        self._has_loaded = True
        result = self._load(self._seen(tensors, reading), *args, **kwargs)
        # Wait here: after the return, the caller may overwrite the tensors.
        contents = {name: it.result() for name, it in reading.items()}
        self.weights = self.weights.after(
            {name: digest for name, (digest, _) in contents.items()},
            {name: sketch for name, (_, sketch) in contents.items() if sketch is not None},
        )
        return result

    def _seen(
        self, tensors: Tensors, reading: dict[str, Future[tuple[str, Sketch | None]]]
    ) -> Iterator[Any]:
        for name, tensor in tensors:
            layout = TYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)
            try:
                if self.weights.takes(name, layout):
                    content = tensor.detach().cpu()
                    reading[name] = self._threads.submit(
                        _read_tensor, self.weights, name, layout, content
                    )
            except ConfigError as exc:
                self._odd = str(exc)
            yield name, tensor


def _read_tensor(
    weights: Weights, name: str, layout: Layout, content: torch.Tensor
) -> tuple[str, Sketch | None]:
    """Return the digest of a tensor. Return its sketch, too, if `weights.sketches` is not None: a
    few numbers that tell how far two tensors are apart."""
    raw = memoryview(content.contiguous().reshape(-1).view(torch.uint8).numpy())
    sketch = None if weights.sketches is None else sketch_of(name, layout[0], raw)
    return bytes_digest(*layout, raw), sketch


def _read(before: Weights, folder: Path, stamps: Iterable[bytes], load_format: str) -> Weights:
    """Return the weights after a folder was loaded. Raises ConfigError if they cannot be known."""
    if load_format not in READ_AS_SAFETENSORS:
        raise ConfigError(f"load_format {load_format} reads other files than safetensors")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no local folder")
    weights = before.after_folder(folder, user_cache())
    if {*stamps} != {stamp_of(folder)}:
        raise ConfigError(f"files of {folder} changed while they were loaded")
    return weights


def _stamp(path: str) -> bytes:
    return stamp_of(Path(path)) if Path(path).is_dir() else b""
