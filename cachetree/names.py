"""Readable names of models, for logs and metrics. Decisions use model ids only."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Final

from cachetree.ids import ModelId

MAX_NAME: Final = 64
"""Largest number of characters of a name. The characters after them are cut off."""
MAX_HEARD: Final = 1024
"""Largest number of models with a name from a peer. Names of further models are ignored."""

_ID: Final = re.compile(r"\b[0-9a-f]{32}\b")
_ODD: Final = re.compile(r"[^\w./:@+-]")
"""Characters that a terminal, a log line or a reader could misread."""


class ModelNames:
    """Names of models that one process knows: its own, its profiles' and its peers'.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_heard = 0
        self._supposed = set[str]()
        self.now: Mapping[str, str] = {}
        """Names by model id. Each change makes a new mapping, so readers need no lock."""

    def call(self, model: ModelId, name: str) -> None:
        """Set the name of a model of this server. It replaces a peer's name for the model."""
        with self._lock:
            self.now = {**self.now, model: _tidy(name)}

    def suppose(self, names: Mapping[str, str]) -> None:
        """Add provisional names, which profiles state. A name from this server or from a peer
        replaces them."""
        with self._lock:
            new = {it: _tidy(name) for it, name in names.items() if it not in self.now}
            self._supposed |= new.keys()
            self.now = {**self.now, **new}

    def hear(self, model: ModelId, name: str) -> None:
        """Add a peer's name for a model. Ignored if this server or another peer has named the
        model."""
        with self._lock:
            is_free = model not in self.now or model in self._supposed
            if name and is_free and self._num_heard < MAX_HEARD:
                self._num_heard += 1
                self._supposed.discard(model)
                self.now = {**self.now, model: _tidy(name)}


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Replace each model id in a text by `name (first eight digits)`, if the id has a name.

    >>> with_names("of " + 32 * "a", {32 * "a": "base"})
    'of base (aaaaaaaa)'
    """

    def named(match: re.Match[str]) -> str:
        name = names.get(match[0])
        return f"{name} ({match[0][:8]})" if name else match[0]

    return _ID.sub(named, text)


def _tidy(name: str) -> str:
    return _ODD.sub("_", name[:MAX_NAME])
