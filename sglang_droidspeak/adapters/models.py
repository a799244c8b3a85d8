"""The models that one server answers as: its base, and each loaded LoRA adapter.

Only this module knows which model is served now. A change of the base's weights begins a new
generation (one version of the weights). A request belongs to the generation in which it was last
seen in the queue. Only a request of the present generation has an `Owner`: the model under which
its KV is stored and reused. So all KV of a request that is stored or reused is from one version.
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
    """Do nothing: the default of the callbacks of `Models`."""


LoraId = str | None
"""SGLang's id of an adapter: a new one each time SGLang loads the adapter. None is the base."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Model that computes the first `num_tokens` tokens of a request. Only their KV is cached.

    An activated LoRA acts from its invocation on; the base computes the tokens before.
    """

    model: ModelId
    lora_id: LoraId
    """Adapter of the model. None is the base, which also computes the tokens before an activated
    LoRA's invocation."""
    num_tokens: int | None
    """Number of the request's first tokens that this model computes. None: all tokens."""

    def pages_of(self, pages: Sequence[PageHash], page_size: int) -> Sequence[PageHash]:
        """Return the request's leading pages that this model computes."""
        return pages if self.num_tokens is None else pages[: self.num_tokens // page_size]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of this server, identified by content: the base, with or without an adapter."""

    model_id: ModelId
    """Model id. Not valid while the base's weights are unknown."""
    digest: str
    """Digest of the adapter's files; empty without an adapter."""
    adapter: Adapter


@dataclass(slots=True, eq=False)
class _Reading:
    """A loaded adapter while a thread reads its files."""

    content: Future[tuple[str, Adapter, bytes]]
    """Digest and adapter that the thread has read, and the files' stamp (`stamp_of`) after that."""
    stamps: Sequence[bytes] = ()
    """Stamps of the files before and after SGLang loaded them. Empty after an unload."""

    def result(self) -> tuple[str, Adapter]:
        """Return the digest and adapter that the thread has read. Raises ConfigError if the files
        changed since SGLang began to load the adapter, or if SGLang has unloaded it."""
        digest, adapter, stamp = self.content.result()
        if not self.stamps:
            raise ConfigError("it is not loaded any more")
        if {*self.stamps, stamp} != {stamp}:
            raise ConfigError("its files changed while they were loaded")
        return digest, adapter


class Models:
    """The models of this server. Keys are adapter ids. Scheduler thread only.

    A thread hashes the files of each adapter that is loaded while the server runs. Until `settle`
    adds the adapter, it answers requests, but shares with no model.
    """

    def __init__(
        self, base: ModelIdentity, num_layers: int, digest_of: Callable[[Path], str]
    ) -> None:
        """`digest_of` returns the digest of an adapter's folder, or raises ConfigError."""
        self._num_layers = num_layers
        self._digest_of = digest_of
        self._base = base
        self._loaded: dict[LoraId, LoadedModel] = {None: self._made("", NO_ADAPTER)}
        self.unknown = ""
        """Outcome of every request while the base's weights are unknown: `reading_weights` or
        `weights_updated`. Empty while they are known."""
        self.generation = 0
        """Number of times that the base's weights were written."""
        self.place = ""
        """Suffix of the requests' `extra_key`. It separates the KV of the present version of the
        weights from earlier KV in SGLang's tree. Empty once SGLang has flushed its tree."""
        self.ids: set[str] = set()
        """Ids of all adapters that SGLang ever tried to load. SGLang's tree may have their KV."""
        self._invocations: dict[LoraId, tuple[int, ...]] = {}
        self._reading: dict[str, _Reading] = {}
        self.reader = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="droidspeak-weights")
        """Pool of threads that hash weights while the scheduler works."""
        self._differences: dict[LoraId, Mapping[ModelId, int]] = {}
        """Results of `first_differences` for the models that are loaded now."""
        self.known: Callable[[str, ModelId], object] = _nobody
        """Function that is called with an adapter's id and model id once both are known."""
        self.settle_base: Callable[[], object] = _nobody
        """Function by which ranks agree on the base's new weights, once all have read them."""

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def ids_now(self) -> set[ModelId]:
        """Ids of all loaded models with known content."""
        return set() if self.unknown else {it.model_id for it in self._loaded.values()}

    def change(self) -> None:
        """Begin a generation (one version of the weights): the base's weights will be written. No
        model is known until `become`."""
        self.unknown = "weights_updated"
        self.generation += 1
        self.place = prefixes.place_of_generation(self.generation)

    def become(self, base: ModelIdentity) -> None:
        """Set the base's identity after a change of its weights. All models are known again."""
        self._base, self.unknown = base, ""
        self._differences.clear()
        for lora_id, model in self._loaded.items():
            self._loaded[lora_id] = loaded = self._made(model.digest, model.adapter)
            if lora_id is not None:
                self.known(lora_id, loaded.model_id)

    def flushed(self) -> None:
        """Note that SGLang's tree is empty."""
        self.place = ""

    def of(self, lora_id: LoraId) -> ModelId | None:
        """Model id of an adapter, or of the base. None if its content is not known: a model of
        unknown content shares with no other."""
        loaded = self._loaded.get(lora_id)
        return None if loaded is None or self.unknown else loaded.model_id

    def invocation(self, lora_id: LoraId) -> tuple[int, ...]:
        """Return an adapter's invocation tokens. Empty if the adapter acts from the start."""
        return self._invocations.get(lora_id, ())

    def is_reading(self, lora_id: LoraId) -> bool:
        """Whether a thread is reading this adapter's content."""
        return lora_id in self._reading

    def owner_of(self, req: Req) -> Owner | None:
        """Return the model under which a request's KV is stored. None if that is unknown."""
        if prefixes.generation_of(req) != self.generation:
            return None
        at = prefixes.invoked_at(req)
        lora_id = req.lora_id if at is None else None
        model = self.of(lora_id)
        return None if model is None else Owner(model, lora_id, at)

    def first_differences(self, lora_id: LoraId) -> Mapping[ModelId, int]:
        """Return, for each other loaded model, the first layer at which it differs from the model
        of `lora_id`. Activated LoRAs are left out."""
        if lora_id not in self._differences:
            me = self._loaded[lora_id]
            self._differences[lora_id] = {
                it.model_id: it.adapter.first_difference(me.adapter, self._num_layers)
                for it in self._loaded.values()
                if it.model_id != me.model_id and not it.adapter.invocation
            }
        return self._differences[lora_id]

    def add(self, lora_id: str, folder: Path) -> None:
        """Read and add an adapter at start. Raises ConfigError if its folder cannot be read."""
        self.ids.add(lora_id)
        self._loaded[lora_id] = loaded = self._made(*self._read(folder))
        self._invocations[lora_id] = loaded.adapter.invocation
        self._differences.clear()
        self.known(lora_id, loaded.model_id)

    def load(self, lora_id: str, folder: Path, load: Callable[[], object]) -> None:
        """Call `load`, which loads an adapter on all ranks or on none, while a thread reads the
        adapter's content. If the invocation cannot be read, raises ConfigError or OSError and loads
        nothing."""
        self.ids.add(lora_id)
        before = stamp_of(folder)
        self._invocations[lora_id] = read_invocation(folder)
        reading = _Reading(self.reader.submit(lambda: (*self._read(folder), stamp_of(folder))))
        load()
        self._reading[lora_id] = reading  # All ranks read the same adapters.
        with contextlib.suppress(OSError):  # The reading thread reports this error.
            reading.stamps = (before, stamp_of(folder))

    def settle(self, ranks: Ranks) -> None:
        """Add adapters of which all ranks read the same digest. All ranks call it together."""
        self.settle_base()
        if not self._reading:
            return
        are_done = ranks.least([it.content.done() for it in self._reading.values()])
        for (lora_id, reading), is_done in zip(list(self._reading.items()), are_done, strict=True):
            if not is_done:
                continue
            del self._reading[lora_id]
            content = None
            try:
                content = reading.result()
            except Exception as exc:
                is_known = isinstance(exc, ConfigError | OSError)
                log.warning(
                    "adapter %s shares with no other model: %s", lora_id, exc, exc_info=not is_known
                )
            digest = None if content is None else content[0]
            is_agreed = ranks.share(digest, str | None) == digest
            if all(ranks.least([is_agreed])) and content is not None:
                self._loaded[lora_id] = loaded = self._made(*content)
                self._differences.clear()
                if not self.unknown:
                    self.known(lora_id, loaded.model_id)

    def drop(self, lora_id: str) -> None:
        self._loaded.pop(lora_id, None)
        self._invocations.pop(lora_id, None)
        if lora_id in self._reading:  # The entry stays until all ranks have read the adapter.
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
    """Return bytes that change if a file of the folder changes its name, size, time or inode."""
    files = [(it.name, it.stat()) for it in sorted(folder.iterdir()) if it.is_file()]
    return msgspec.json.encode(
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
    )
