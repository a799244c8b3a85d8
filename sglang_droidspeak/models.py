"""The models that one server answers as: its base, and each LoRA adapter while it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cachetree.adapters import Adapter, read_adapter
from cachetree.errors import ConfigError
from cachetree.ids import ModelId, PageHash
from sglang_droidspeak import prefixes

if TYPE_CHECKING:
    from sglang_droidspeak.compat.names import Req

log = logging.getLogger(__name__)

LoraId = str | None
"""SGLang's name for one loading of an adapter, never given out again; None is the base."""


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of one request, as far as the cache deals with it, and whose KV it is."""

    model: ModelId
    lora_id: LoraId
    """Of that model: an activated LoRA reads what comes before its invocation as the base does."""
    num_tokens: int | None
    """None for all of the request."""

    def of(self, pages: Sequence[PageHash], page_size: int) -> Sequence[PageHash]:
        """Those of the request's pages that belong to it."""
        return pages if self.num_tokens is None else pages[: self.num_tokens // page_size]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an adapter, or None, makes of the base; by content."""

    model_id: ModelId
    adapter: Adapter | None

    def first_difference(self, other: LoadedModel, num_layers: int) -> int:
        if self.adapter is None:
            return num_layers if other.adapter is None else other.adapter.first_difference(None)
        return self.adapter.first_difference(other.adapter)


class Models:
    """Which model an adapter's id stands for. Scheduler thread only."""

    def __init__(self, base: ModelId, num_layers: int, identify: Callable[[Path], ModelId]) -> None:
        self._num_layers = num_layers
        self._identify = identify
        self._loaded: dict[LoraId, LoadedModel] = {None: LoadedModel(base, None)}
        self._differences: dict[LoraId, Mapping[ModelId, int]] = {}
        self._lora_ids: Mapping[ModelId, LoraId] = {}

    def __len__(self) -> int:
        return len(self._loaded)

    def of(self, lora_id: LoraId) -> ModelId | None:
        """None for an adapter whose content is not known: it shares with nobody."""
        loaded = self._loaded.get(lora_id)
        return loaded.model_id if loaded is not None else None

    @property
    def lora_ids(self) -> Mapping[ModelId, LoraId]:
        """One of each model that is loaded."""
        if not self._lora_ids:
            self._lora_ids = {it.model_id: lora_id for lora_id, it in self._loaded.items()}
        return self._lora_ids

    def invocation(self, lora_id: LoraId) -> tuple[int, ...]:
        """Tokens from which an adapter acts; empty where it acts from the start."""
        loaded = self._loaded.get(lora_id)
        adapter = loaded.adapter if loaded is not None else None
        return adapter.invocation if adapter is not None else ()

    def part_of(self, req: Req) -> Part | None:
        """None where it is not known what the adapter is."""
        at = prefixes.invoked_at(req)
        lora_id = req.lora_id if at is None else None
        model = self.of(lora_id)
        return None if model is None else Part(model, lora_id, at)

    def first_differences(self, lora_id: LoraId) -> Mapping[ModelId, int]:
        """By other model that is loaded: the first layer at which it differs from this one."""
        if lora_id not in self._differences:
            me = self._loaded[lora_id]
            self._differences[lora_id] = {
                it.model_id: it.first_difference(me, self._num_layers)
                for it in self._loaded.values()
                if it.model_id != me.model_id and not (it.adapter and it.adapter.invocation)
            }
        return self._differences[lora_id]

    def add(self, lora_id: str, folder: Path) -> None:
        """Raises ConfigError where the folder's content cannot be read."""
        adapter = read_adapter(folder, self._num_layers)
        self._loaded[lora_id] = LoadedModel(self._identify(folder), adapter)
        self._forget()

    def load(self, lora_id: str, folder: Path, load: Callable[[], object]) -> None:
        """Note the adapter that `load` reads. Where its files change meanwhile it is not known."""
        before = _stamp(folder)
        load()
        try:
            self.add(lora_id, folder)
            if _stamp(folder) != before:
                raise ConfigError(f"the files of adapter {folder} changed while they were loaded")
        except (ConfigError, OSError) as exc:
            self.drop(lora_id)
            log.warning("adapter %s shares with no other model: %s", lora_id, exc)

    def drop(self, lora_id: str) -> None:
        self._loaded.pop(lora_id, None)
        self._forget()

    def _forget(self) -> None:
        """What was found of the models that were loaded until now."""
        self._differences.clear()
        self._lora_ids = {}


def _stamp(folder: Path) -> bytes:
    """Changes when a file of the folder does, as far as its size and times tell."""
    files = [(it.name, it.stat()) for it in sorted(folder.iterdir()) if it.is_file()]
    return msgspec.json.encode(
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
    )
