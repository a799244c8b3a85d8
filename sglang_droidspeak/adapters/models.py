"""The models that one server answers as: its base, and each LoRA adapter while it is loaded.

This is the only place that knows which model is served now. A change of the base's weights begins a
new generation: a request belongs to the generation in which it was last met in the queue, and only
a request of the present one has an owner. So what is planned, noted or stored is of weights that
were the same from the request's first computed token on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cachetree import ConfigError, ModelId, PageHash
from cachetree.checkpoint import (
    NO_ADAPTER,
    Adapter,
    ModelIdentity,
    acting,
    read_adapter,
    read_invocation,
)
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.names import Req
from sglang_droidspeak.ranks import Ranks

log = logging.getLogger(__name__)


_MAX_THREADS: Final = 4


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
    """Stale while the base is unknown."""
    digest: str
    """Content of the adapter's files; empty for none."""
    adapter: Adapter


@dataclass(slots=True, eq=False)
class _Reading:
    """An adapter that was loaded, and whose files a thread reads."""

    found: Future[tuple[str, Adapter, bytes]]
    """And the stamp of the files after they were read."""
    stamps: Sequence[bytes] = ()
    """Before and after they were loaded; none while they are not."""

    def result(self) -> tuple[str, Adapter]:
        """Raises ConfigError where it is not known what was loaded."""
        digest, adapter, stamp = self.found.result()
        if not self.stamps:
            raise ConfigError("it is not loaded any more")
        if {*self.stamps, stamp} != {stamp}:
            raise ConfigError("its files changed while they were loaded")
        return digest, adapter


class Models:
    """Which model an adapter's id stands for. Scheduler thread only.

    What is loaded while the server runs is read, every byte of it, by a thread beside: until
    `settle` finds that done, the adapter serves and shares with nobody.
    """

    def __init__(
        self, base: ModelIdentity, num_layers: int, digest_of: Callable[[Path], str]
    ) -> None:
        """`digest_of` reads an adapter's folder; raises ConfigError."""
        self._num_layers = num_layers
        self._digest_of = digest_of
        self._base = base
        self._loaded: dict[LoraId, LoadedModel] = {None: self._made("", NO_ADAPTER)}
        self.unknown = ""
        """Outcome of every request while the base is unknown: `reading_weights` or
        `weights_updated`. Empty while the base is known."""
        self.generation = 0
        """How often the base's weights were written."""
        self.place = ""
        """End of the present generation's namespaces in SGLang's tree. The tree may have KV of
        earlier generations until SGLang flushes it."""
        self.ids: set[str] = set()
        """Of all adapters that were ever to be loaded: SGLang's tree may have KV of them."""
        self._invocations: dict[LoraId, tuple[int, ...]] = {}
        self._reading: dict[str, _Reading] = {}
        self.reader = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="droidspeak-weights")
        """Hashes weights beside the scheduler. Its threads begin with the first that it reads."""
        self._differences: dict[LoraId, Mapping[ModelId, int]] = {}
        """Found of the models that are loaded now."""
        self.known: Callable[[str, ModelId], object] = _nobody
        """Called with each adapter whose content has become known, and the model that it makes."""
        self.settle_base: Callable[[], object] = _nobody
        """Called where ranks may agree on what they have read."""

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def ids_now(self) -> set[ModelId]:
        """Models of known content."""
        return set() if self.unknown else {it.model_id for it in self._loaded.values()}

    def change(self) -> None:
        """The base's weights are about to be written. Until `become` no model is known."""
        self.unknown = "weights_updated"
        self.generation += 1
        self.place = prefixes.place_of_generation(self.generation)

    def become(self, base: ModelIdentity) -> None:
        """Name the present generation's weights: they are known by now."""
        self._base, self.unknown = base, ""
        self._differences.clear()
        for lora_id, it in self._loaded.items():
            self._loaded[lora_id] = loaded = self._made(it.digest, it.adapter)
            if lora_id is not None:
                self.known(lora_id, loaded.model_id)

    def flushed(self) -> None:
        """SGLang's tree has nothing of any generation."""
        self.place = ""

    def of(self, lora_id: LoraId) -> ModelId | None:
        """None for a model whose content is not known: it shares with nobody."""
        loaded = self._loaded.get(lora_id)
        return None if loaded is None or self.unknown else loaded.model_id

    def invocation(self, lora_id: LoraId) -> tuple[int, ...]:
        """Tokens from which an adapter acts; empty where it acts from the start."""
        return self._invocations.get(lora_id, ())

    def is_reading(self, lora_id: LoraId) -> bool:
        """Whether it will be known soon what this adapter is."""
        return lora_id in self._reading

    def owner_of(self, req: Req) -> Owner | None:
        """None where it is not known which model computes all of the request's KV."""
        if prefixes.generation_of(req) != self.generation:
            return None
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
        self._loaded[lora_id] = loaded = self._made(*self._read(folder))
        self._invocations[lora_id] = loaded.adapter.invocation
        self._differences.clear()
        self.known(lora_id, loaded.model_id)

    def load(self, lora_id: str, folder: Path, load: Callable[[], object]) -> None:
        """Have `load` read the adapter, on all ranks or on none, and a thread find out which one it
        is; raises ConfigError and OSError before where it cannot be told where the adapter acts."""
        self.ids.add(lora_id)
        before = stamp_of(folder)
        self._invocations[lora_id] = read_invocation(folder)
        reading = _Reading(self.reader.submit(lambda: (*self._read(folder), stamp_of(folder))))
        load()
        self._reading[lora_id] = reading  # The same ones on all ranks.
        with contextlib.suppress(OSError):  # Which the thread finds, too.
            reading.stamps = (before, stamp_of(folder))

    def settle(self, ranks: Ranks) -> None:
        """Know those that all ranks have read, and read alike; all ranks call it at once."""
        self.settle_base()
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
            digest = None if found is None else found[0]
            is_agreed = ranks.share(digest, str | None) == digest
            if all(ranks.least([is_agreed])) and found is not None:
                self._loaded[lora_id] = loaded = self._made(*found)
                self._differences.clear()
                if not self.unknown:
                    self.known(lora_id, loaded.model_id)

    def drop(self, lora_id: str) -> None:
        self._loaded.pop(lora_id, None)
        self._invocations.pop(lora_id, None)
        if lora_id in self._reading:  # It stays there until all ranks have read it.
            self._reading[lora_id].stamps = ()
        self._differences.clear()

    def _made(self, digest: str, adapter: Adapter) -> LoadedModel:
        identity = self._base.with_adapter(digest) if digest else self._base
        return LoadedModel(identity.model_id, digest, adapter)

    def _read(self, folder: Path) -> tuple[str, Adapter]:
        where, ignored = acting(folder)
        log.info("droidspeak: adapter %s %s", folder, where)
        if ignored:
            log.warning(
                "droidspeak: adapter %s: SGLang ignores %s of its config, and answers as another "
                "model than PEFT does; merge it into its base, or train it without",
                folder,
                ", ".join(ignored),
            )
        return self._digest_of(folder), read_adapter(folder, self._num_layers)


def stamp_of(folder: Path) -> bytes:
    """Changes when a file of the folder does, as far as its size and times tell."""
    files = [(it.name, it.stat()) for it in sorted(folder.iterdir()) if it.is_file()]
    return msgspec.json.encode(
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
    )
