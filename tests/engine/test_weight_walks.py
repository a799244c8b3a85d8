"""Random updates of weights between random requests. Each name has to be that of the weights that
computed the pages.

A dictionary stands for SGLang. It says which weights are in memory now, and which weights have
computed each page of the tree. Updates come as tensors, from folders and from outside. They are
whole, partial, in another layout or broken, on this rank or on another one. A page that was
computed by two kinds of weights belongs to no model.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from checkpoint_parts import CONFIG, write
from engine_parts import PAGE
from line_parts import line_of
from profile_parts import identity
from standins import made

from cachetree.checkpoint.codecs import Codec
from cachetree.checkpoint.identity import read_weights
from cachetree.ids import ModelId
from sglang_droidspeak import weights as weights_module
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import prefixes
from sglang_droidspeak.engine.asking import unsent
from sglang_droidspeak.linker import DroidSpeakLinker
from sglang_droidspeak.request.planner import Planner
from sglang_droidspeak.store.insertions import Insertions, Offload
from sglang_droidspeak.weights import WeightUpdates

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
KINDS = (1.0, 2.0)
"""Values that may fill a tensor."""
RANDOM, ANYTHING = -1.0, -2.0
MAX_RUNNING = 5

Content = tuple[float, ...]
"""Kind of value in each tensor."""


def tensors(content: Content) -> dict[str, np.ndarray]:
    return {
        name: np.full((4, 4), kind, np.float32) for name, kind in zip(NAMES, content, strict=True)
    }


class Threads:
    """Threads that hash a folder when the test says so. Tensors are hashed at once."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except Exception as exc:  # noqa: BLE001  # As an executor does.
                future.set_exception(exc)

        if function is weights_module._read_tensor:
            run()
        else:
            self._waiting.append(run)
        return future

    def run(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


class Walk:
    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.content: Content = (1.0,) * len(NAMES)
        self.folders: dict[Content, Path] = {}
        self.folder = folder
        served = read_weights(self._written(self.content)).sketched(self._written(self.content))
        self.changes = self.num_stored = self.num_noted = 0
        self.ranks: Any = SimpleNamespace(least=self._least, share=lambda mine, _: mine)
        self.others_differ = False
        self.is_raw = False
        """Whether SGLang has not yet made the weights into the form that its kernels read."""
        self.models = Models(served.started_as, 1, str)
        self.models.reader = self.threads = Threads()  # type: ignore[assignment]
        self.updates = WeightUpdates(served, self.models, self.ranks, self._change, lambda *_: None)
        self.models.settle_base = self.updates.settle
        self.planner = made(
            Planner,
            cache=SimpleNamespace(family=SimpleNamespace(codec=Codec.NONE)),
            models=self.models,
            activated=ActivatedAdapters(self.models),
        )
        pool: Any = SimpleNamespace(is_read=True, note=self._noted, held=self._held)
        offloader: Any = SimpleNamespace(is_stopped=False, put=self._stored)
        self.insertions = Insertions(self.models, pool, offloader, PAGE)
        self.tree: dict[str, Content | None] = {}
        """Model that computed each page, by SGLang's name of the page."""
        self.queue: list[Any] = []
        self.running: list[tuple[Any, list[Content | None]]] = []
        """Running requests, each with the models that have computed its pages."""
        self.names: dict[Content, ModelId] = {}
        for content in [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 2.0, 1.0), (2.0, 1.0, 2.0)]:
            self._name(content)

    def _written(self, content: Content) -> Path:
        if content not in self.folders:
            path = self.folder / "-".join(map(str, content))
            self.folders[content] = write(path, tensors(content), CONFIG)
        return self.folders[content]

    def _name(self, content: Content) -> ModelId:
        if content not in self.names:
            self.names[content] = read_weights(self._written(content)).started_as.model_id
        return self.names[content]

    def _least(self, mine: Sequence[int]) -> list[int]:
        return [it and not self.others_differ for it in mine]

    def _change(self) -> None:
        self.changes += 1

    @property
    def now(self) -> Content | None:
        """Return the model that computes now."""
        return None if self.is_raw else self.content

    # Updates.

    def _load(self, tensors: Any) -> None:
        """Load tensors as the model itself does: it takes the ones with names that it knows."""
        content = dict(zip(NAMES, self.content, strict=True))
        for name, tensor in tensors:
            if tensor is None:
                raise RuntimeError("it broke off")
            content[name] = float(torch.as_tensor(tensor).flatten()[0])
        self.content = tuple(content[name] for name in NAMES)

    def by_name(self) -> None:
        updater: Any = SimpleNamespace()
        model = torch.nn.Module()
        model.load_weights = self._load  # type: ignore[assignment]
        updater.get_model = lambda: model
        names = self.rng.sample(NAMES, self.rng.choice([1, 2, 3, 3]))
        kind = self.rng.choice(KINDS)
        tensors = [(name, torch.full((4, 4), kind)) for name in names]
        way = self.rng.choice(["good"] * 20 + ["fused", "typed", "direct", "broken"])

        def original(_updater: object, _given: object, load_format: str | None = None) -> Any:
            if way == "broken":
                with contextlib.suppress(RuntimeError):
                    broken = [(name, it + 10) for name, it in tensors]
                    self._load(broken[:1])
                    raise RuntimeError
                return False, "it broke off"
            if way == "direct":  # Names of the model's own parameters.
                self.content = (ANYTHING,) * len(NAMES)
                return True, ""
            load = updater.get_model().load_weights
            if way == "typed":
                load([(name, it.double()) for name, it in tensors])
            elif way == "fused":
                load([*tensors, ("qkv_proj", torch.ones(1))])
                self.content = (ANYTHING, *self.content[1:])
            else:
                load(tensors[:1])
                load(tensors[1:])
            return True, ""

        self.updates.by_name(original, updater, tensors)

    def session(self) -> None:
        self.updates.restore()
        self.is_raw = True
        self.step_some()
        has_loaded = False
        if self.rng.random() < 0.8:
            for _ in range(self.rng.randint(1, 3)):
                is_by_name = self.rng.random() < 0.9
                (self.by_name if is_by_name else self.from_disk)()
                has_loaded |= is_by_name
                self.step_some()
        else:  # By RDMA, at any time until the end.
            self.content = (RANDOM,) * len(NAMES)
            self.step_some()
            self.content = (ANYTHING,) * len(NAMES)
        self.is_raw = False
        self.updates.end(None, None, run_post_load=not has_loaded)

    def from_disk(self) -> None:
        content = tuple(self.rng.choice(KINDS) for _ in NAMES)
        path = self._written(content)
        others = {name: it + 5 for name, it in tensors(content).items()}
        way = self.rng.choice(["good"] * 12 + ["missing", "broken", "changed", "npcache"])

        def original(_updater: object, _path: str, _format: str) -> Any:
            if way == "missing":
                return False, "no such folder"
            self.updates.restore()
            self.content = content
            if way == "broken":
                self.content = (ANYTHING, *content[1:])
                return False, "it broke off"
            if way == "npcache":
                self.content = (ANYTHING, *content[1:])
            if way == "changed":
                write(path, others, CONFIG)
            return True, ""

        if way == "changed":
            path = write(self.folder / "changing", tensors(content), CONFIG)
        form = "npcache" if way == "npcache" else "auto"
        self.updates.from_disk(original, None, str(path), form)

    def reset(self) -> None:
        self.updates.reset()
        self.content = (RANDOM,) * len(NAMES)

    def update(self) -> None:
        self.others_differ = self.rng.random() < 0.05
        self.rng.choice(
            [self.session] * 6 + [self.from_disk] * 8 + [self.by_name] * 3 + [self.reset] * 2
        )()
        if self.rng.random() < 0.3:
            self.flush()

    # Requests.

    def arrive(self) -> None:
        length = self.rng.randint(1, 4)
        choices = [self.rng.randrange(2) for _ in range(length)]
        tokens = [choice for choice in choices for _ in range(PAGE)]
        req = unsent(tokens, None, None, None)
        req.full_untruncated_fill_ids = array("q", tokens)
        self.queue.append(req)

    def admit(self) -> None:
        """Admit the waiting requests. They are matched again after each change, as the linker
        does."""
        if not self.queue or len(self.running) > MAX_RUNNING:
            return
        req = self.queue.pop(0)
        self.planner.meet(req)
        pages = self._pages(req)
        read = [self.tree.get(page, ...) for page in pages]
        num_read = next((at for at, it in enumerate(read) if it is ...), len(pages))
        computed: list[Any] = read[:num_read]
        is_pure = all(it == self.now for it in computed)
        computed += [self.now if is_pure else None] * (len(pages) - num_read)
        self.running.append((req, computed))

    def retract(self) -> None:
        if self.running:
            self.queue.append(self.running.pop(self.rng.randrange(len(self.running)))[0])

    def finish(self) -> None:
        """End the running requests. Weights that changed meanwhile have computed the answer and
        perhaps a part of the prompt."""
        if not self.running:
            return
        req, computed = self.running.pop(self.rng.randrange(len(self.running)))
        self.computed = [it if it == self.now else None for it in computed]
        pages = self._pages(req)
        new = [page for page in pages if page not in self.tree]
        self.tree |= {
            page: it for page, it in zip(pages, self.computed, strict=True) if page in new
        }

        def insert(*_: object, **__: object) -> None:
            if new:
                transfer: Any = SimpleNamespace(
                    keys=new, device_indices=torch.arange(len(new) * PAGE)
                )
                self.insertions.offload([transfer], tuple)

        self.insertions.checkpoint(insert, None, req, up_to=len(pages) * PAGE)

    def flush(self) -> None:
        """Flush SGLang's tree. SGLang refuses while requests run."""
        if not self.running:
            self.tree.clear()
            self.models.flushed()

    def _pages(self, req: Any) -> list[str]:
        num_tokens = len(req.full_untruncated_fill_ids)
        return [it.hex() for it in prefixes.own_pages_of(req, num_tokens, PAGE)]

    def _held(self, *_: object) -> Any:
        return SimpleNamespace(exact=0)

    def _noted(self, _place: object, model: ModelId, pages: Sequence[object], *_: object) -> None:
        self.num_noted += 1
        assert [self._name(it) for it in self.computed[: len(pages)] if it] == [model] * len(pages)

    def _stored(self, offload: Offload | None) -> bool:
        if offload is not None:
            self.num_stored += 1
            stored = self.computed[-len(offload.pages) :]
            assert [self._name(it) for it in stored if it] == [offload.model] * len(stored)
        return True

    def step_some(self) -> None:
        requests = [self.arrive, self.arrive, self.admit, self.admit, self.finish, self.finish]
        for _ in range(self.rng.randrange(6)):
            self.rng.choice([*requests, self.retract, self.threads.run, self.models_settle])()

    def step(self) -> None:
        self.rng.choice([self.step_some] * 6 + [self.update])()

    def models_settle(self) -> None:
        self.models.settle(self.ranks)
        if not self.models.unknown:
            assert not self.is_raw
            assert self.models.of(None) == self._name(self.content)
            folder = self._written(self.content)
            written = read_weights(folder).sketched(folder)
            distances = self.updates._weights.distances_from(written)
            assert distances is not None and not any(distances), "sketches are of what is served"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_no_kv_has_the_name_of_other_weights(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(weights_module, "user_cache", lambda: None)
    walk = Walk(tmp_path, seed)
    for _ in range(2000):
        walk.step()
    assert walk.changes > 100 and walk.num_stored > 40 and walk.num_noted > 40
    walk.others_differ = False
    walk.reset()
    assert walk.models.of(None) is None
    whole = [(name, torch.full((4, 4), 2.0)) for name in NAMES]
    model = torch.nn.Module()
    model.load_weights = walk._load  # type: ignore[assignment]
    updater: Any = SimpleNamespace(get_model=lambda: model)
    walk.updates._is_open = False
    walk.updates.by_name(lambda *_: (model.load_weights(whole), (True, ""))[1], updater, whole)
    walk.threads.run()
    walk.models_settle()
    assert walk.models.of(None) == walk._name((2.0, 2.0, 2.0)), "all was written, all is known"


def test_a_shared_store_is_asked_for_the_present_model_and_for_what_it_inherits_from():
    start, profiled = ModelId("start"), ModelId("profiled")
    started_with = {start: frozenset({1}), profiled: frozenset({2})}
    linker = MagicMock(_started_as=start, _started_with=started_with, _senders=dict(started_with))
    linker._cache.names.now = {}
    linker._ranks.share = lambda mine, _: mine
    line = line_of([identity("v1"), identity("v2")], proven=(0.0,) * 11)
    near, far = (line.inherited(identity("v1"), identity("v2"), (it,) * 11) for it in (0.0, 0.1))
    inherited = {near.sender.model_id: frozenset({1})}
    served = ("first", [near], inherited), ("second", [far], {}), (start, [], {})
    for model, heirs, more in served:
        linker._lines.follow = lambda *_, heirs=heirs: heirs
        DroidSpeakLinker._weights_known(linker, SimpleNamespace(model_id=model), None, "")  # type: ignore[arg-type]
        assert linker._senders == started_with | {model: frozenset({1})} | more
        linker._guard.inherit.assert_called_with(heirs)
