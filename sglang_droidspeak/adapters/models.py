"""The models that one server answers as: its base, and each LoRA adapter while it is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cachetree import ConfigError, ModelId, PageHash
from cachetree.checkpoint import NO_ADAPTER, Adapter, acting, read_adapter, read_invocation
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req
from sglang_droidspeak.ranks import Ranks

log = logging.getLogger(__name__)


def _nobody(*_known: object) -> None:
    """Nobody asks."""


LoraId = str | None
"""SGLang's name for one loading of an adapter, never given out again; None is the base."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose KV the beginning of a request is, as far as the cache deals with it."""

    model: ModelId
    lora_id: LoraId
    """Of that model: an activated LoRA reads what comes before its invocation as the base does."""
    num_tokens: int | None
    """None for all of the request."""

    def pages_of(self, pages: Sequence[PageHash], page_size: int) -> Sequence[PageHash]:
        """Those of the request's pages that are its."""
        return pages if self.num_tokens is None else pages[: self.num_tokens // page_size]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an adapter, or none, makes of the base; by content."""

    model_id: ModelId
    adapter: Adapter


@dataclass(slots=True, eq=False)
class _Reading:
    """An adapter that was loaded, and whose files a thread reads."""

    found: Future[tuple[LoadedModel, bytes]]
    """And the stamp of the files after they were read."""
    stamps: Sequence[bytes] = ()
    """Before and after they were loaded; none while they are not."""

    def result(self) -> LoadedModel:
        """Raises ConfigError where it is not known what was loaded."""
        found, stamp = self.found.result()
        if not self.stamps:
            raise ConfigError("it is not loaded any more")
        if {*self.stamps, stamp} != {stamp}:
            raise ConfigError("its files changed while they were loaded")
        return found


class Models:
    """Which model an adapter's id stands for. Scheduler thread only.

    What is loaded while the server runs is read, every byte of it, by a thread beside: until
    `settle` finds that done, the adapter serves and shares with nobody.
    """

    def __init__(self, base: ModelId, num_layers: int, identify: Callable[[Path], ModelId]) -> None:
        self._num_layers = num_layers
        self._identify = identify
        self._loaded: dict[LoraId, LoadedModel] = {None: LoadedModel(base, NO_ADAPTER)}
        self.ids: set[str] = set()
        """Of all adapters that were ever to be loaded: SGLang's tree may have KV of them."""
        self._invocations: dict[LoraId, tuple[int, ...]] = {}
        self._reading: dict[str, _Reading] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="droidspeak-adapters")
        self._differences: dict[LoraId, Mapping[ModelId, int]] = {}
        """Found of the models that are loaded now."""
        self.known: Callable[[str, ModelId], object] = _nobody
        """Called with each adapter whose content has become known, and the model that it makes."""

    def __len__(self) -> int:
        return len(self._loaded)

    def of(self, lora_id: LoraId) -> ModelId | None:
        """None for an adapter whose content is not known: it shares with nobody."""
        loaded = self._loaded.get(lora_id)
        return None if loaded is None else loaded.model_id

    def invocation(self, lora_id: LoraId) -> tuple[int, ...]:
        """Tokens from which an adapter acts; empty where it acts from the start."""
        return self._invocations.get(lora_id, ())

    def is_reading(self, lora_id: LoraId) -> bool:
        """Whether it will be known soon what this adapter is."""
        return lora_id in self._reading

    def owner_of(self, req: Req) -> Owner | None:
        """None where it is not known what the adapter is."""
        at = prefixes.invoked_at(req)
        lora_id = req.lora_id if at is None else None
        model = self.of(lora_id)
        return None if model is None else Owner(model, lora_id, at)

    def first_differences(self, lora_id: LoraId) -> Mapping[ModelId, int]:
        """By other model that is loaded: the first layer at which it differs from this one."""
        if lora_id not in self._differences:
            me = self._loaded[lora_id]
            self._differences[lora_id] = {
                it.model_id: it.adapter.first_difference(me.adapter, self._num_layers)
                for it in self._loaded.values()
                if it.model_id != me.model_id and not it.adapter.invocation
            }
        return self._differences[lora_id]

    def add(self, lora_id: str, folder: Path) -> None:
        """Raises ConfigError where the folder's content cannot be read."""
        self.ids.add(lora_id)
        self._loaded[lora_id] = loaded = self._read(folder)
        self._invocations[lora_id] = loaded.adapter.invocation
        self._differences.clear()
        self.known(lora_id, loaded.model_id)

    def load(self, lora_id: str, folder: Path, load: Callable[[], object]) -> None:
        """Have `load` read the adapter, on all ranks or on none, and a thread find out which one it
        is; raises ConfigError and OSError before where it cannot be told where the adapter acts."""
        self.ids.add(lora_id)
        before = _stamp(folder)
        self._invocations[lora_id] = read_invocation(folder)
        reading = _Reading(self._reader.submit(lambda: (self._read(folder), _stamp(folder))))
        load()
        self._reading[lora_id] = reading  # The same ones on all ranks.
        with contextlib.suppress(OSError):  # Which the thread finds, too.
            reading.stamps = (before, _stamp(folder))

    def settle(self, ranks: Ranks) -> None:
        """Know those that all ranks have read, and read alike; all ranks call it at once."""
        if not self._reading:
            return
        are_done = ranks.least([it.found.done() for it in self._reading.values()])
        for (lora_id, reading), is_done in zip(list(self._reading.items()), are_done, strict=True):
            if not is_done:
                continue
            del self._reading[lora_id]
            found = None
            try:
                found = reading.result()
            except Exception as exc:
                is_known = isinstance(exc, ConfigError | OSError)
                log.warning(
                    "adapter %s shares with no other model: %s", lora_id, exc, exc_info=not is_known
                )
            model = None if found is None else found.model_id
            is_agreed = ranks.share(model, ModelId | None) == model
            if all(ranks.least([is_agreed])) and found is not None:
                self._loaded[lora_id] = found
                self._differences.clear()
                self.known(lora_id, found.model_id)

    def drop(self, lora_id: str) -> None:
        self._loaded.pop(lora_id, None)
        self._invocations.pop(lora_id, None)
        if lora_id in self._reading:  # It stays there until all ranks have read it.
            self._reading[lora_id].stamps = ()
        self._differences.clear()

    def _read(self, folder: Path) -> LoadedModel:
        where, ignored = acting(folder)
        log.info("droidspeak: adapter %s %s", folder, where)
        if ignored:
            log.warning(
                "droidspeak: adapter %s: SGLang ignores %s of its config, and answers as another "
                "model than PEFT does; merge it into its base, or train it without",
                folder,
                ", ".join(ignored),
            )
        return LoadedModel(self._identify(folder), read_adapter(folder, self._num_layers))


def _stamp(folder: Path) -> bytes:
    """Changes when a file of the folder does, as far as its size and times tell."""
    files = [(it.name, it.stat()) for it in sorted(folder.iterdir()) if it.is_file()]
    return msgspec.json.encode(
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
    )
