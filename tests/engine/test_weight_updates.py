"""Weights that change in a running server: from the first write on it shares nothing more.

Whether the update works does not matter: what is loaded may no longer be what was identified. An
update that is refused before it writes changes nothing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import requests
import torch
from engine_parts import CPU, ENV, Watcher, answer, eventually, profile_of, prompt
from forked import ServerSpec
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.utils.weight_checker import WeightChecker
from struck_parts import scraped

from cachetree.checkpoint.identity import read_model_identity
from cachetree.planning import write_profile
from profiles.random_models import shape, write_models
from sglang_droidspeak.engine import HookType, place_hooks, probe, release
from sglang_droidspeak.fleet.servers import Server, free_port, running
from sglang_droidspeak.linker import DroidSpeakLinker

HARMLESS = {
    "init_weights_update_group",
    "destroy_weights_update_group",
    "receive_weights_from_distributed",
    "end_weight_update",
}
"""They write no weights, or only after another one has been called."""


class Weights(torch.nn.Module):
    """A model that takes one tensor and breaks at the next."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, value in tensors:
            if name != "w":
                raise KeyError(name)
            self.w.copy_(value)


def unreadable(*_: object) -> None:
    raise OSError("no such folder")


def updater_of(model: Weights) -> WeightUpdater:
    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(
            dtype=torch.float32, quantization=None, revision=None, model_path=""
        ),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: SimpleNamespace(model=model),
    )


def checker_of(model: Weights) -> WeightChecker:
    """Of `POST /weights_checker`, by which it is proven that an update writes all weights: random
    ones come first."""
    checker = WeightChecker.__new__(WeightChecker)  # As constructed, it asks for groups of ranks.
    checker._get_model = lambda: model
    return checker


def test_every_way_to_write_weights_is_seen_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = Weights(), []

    def note(*_args: object, **_kwargs: object) -> None:
        seen.append(float(model.w))

    place_hooks(dict.fromkeys(release.WEIGHTS_WRITTEN, (note, HookType.BEFORE)))
    broken = [("w", torch.ones(1)), ("other", torch.ones(1))]
    ways: dict[str, Callable[[WeightUpdater], Any]] = {
        "begin_weight_update": lambda it: it.begin_weight_update(),
        "update_weights_from_disk": lambda it: it.update_weights_from_disk("here", "auto"),
        "load_weights_from_distributed": lambda it: it.load_weights_from_distributed(broken),
        "update_weights_from_tensor": lambda it: it.update_weights_from_tensor(broken),
        "update_weights_from_ipc": lambda it: it.update_weights_from_ipc(SimpleNamespace()),
    }
    public = {name for name, _ in inspect.getmembers(WeightUpdater, inspect.isfunction)}
    assert {it for it in public if not it.startswith("_")} == HARMLESS | ways.keys()
    monkeypatch.setattr(
        weight_updater, "get_model", lambda: SimpleNamespace(weight_cache_mode="off")
    )
    monkeypatch.setattr(weight_updater, "get_pp_stage_load_group", lambda: None)
    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", unreadable)
    assert not updater_of(model).update_weights_from_disk("nowhere", "auto")[0]
    assert not seen, "nothing is written"
    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", lambda *_: iter(broken))
    checker = checker_of(model)
    checker.handle("snapshot", role="target")  # Only reads.
    ways["reset_tensors"] = lambda _: checker.handle("reset_tensors", role="target")
    for name, update in ways.items():
        with torch.no_grad():
            model.w.zero_()
        with contextlib.suppress(Exception):
            update(updater_of(model))
        assert seen[:1] == [0.0], name
        seen.clear()


@pytest.mark.parametrize(
    ("written_here", "written_elsewhere"), [(True, False), (False, True), (False, False)]
)
def test_update_from_disk_turns_reuse_off_if_any_rank_has_written(
    written_here: bool, written_elsewhere: bool
) -> None:
    linker: Any = MagicMock()
    linker._planner.off = ""
    linker._ranks.least = lambda mine: [mine[0] and not written_elsewhere]
    linker._retire = partial(DroidSpeakLinker._retire, linker)
    linker._weights_change = partial(DroidSpeakLinker._weights_change, linker)
    linker._update_from_disk = partial(DroidSpeakLinker._update_from_disk, linker)
    hooks = DroidSpeakLinker._hooks(linker, MagicMock(), MagicMock())
    ((write, before),) = {hooks[it] for it in release.WEIGHTS_WRITTEN}
    from_disk, around = hooks[release.UPDATE_FROM_DISK]
    assert (before, around) == (HookType.BEFORE, HookType.AROUND)

    def update(path: str) -> None:
        if written_here:
            write()
        raise OSError(path)

    with pytest.raises(OSError, match="broken"):
        from_disk(update, "broken")
    is_off = linker._planner.off == "weights_updated"
    assert is_off == linker._cache.stop_serving.called == (written_here or written_elsewhere)


def test_the_probe_names_every_hooked_function() -> None:
    hooked = {
        value
        for name, value in vars(release).items()
        if name.isupper() and not name.startswith("_")
        if isinstance(value, str) and value.startswith("sglang.srt.")
    }
    hooked -= {release.SCHEDULER_MODULE, release.NATIVE_HASH}  # That one is imported there.
    assert hooked | {*release.WEIGHTS_WRITTEN} <= probe.USED.keys()


NAMES = ("whole", "begun", "reset")
"""Updates that work, that never come to an end, and that are none."""


@dataclass(frozen=True)
class Updated:
    """Servers of one model, and checkpoints to update them from."""

    servers: dict[str, Server]
    models: dict[str, Path]
    watchers: dict[str, Watcher]
    pages: dict[str, int]
    """Ports on which their caches answer monitors and routers."""

    def update(self, name: str, model: str = "whole") -> bool:
        """Whether SGLang says that it worked.

        From files that break off it never does: it reads them again to undo it, and ends.
        """
        path, body = "update_weights_from_disk", {"model_path": str(self.models[model])}
        if name == "begun":  # From now on weights may be written from outside.
            path, body = "begin_weight_update", {}
        if name == "reset":  # To random ones, before an update that is to be proven.
            path, body = "weights_checker", {"action": "reset_tensors"}
        reply = requests.post(f"{self.servers[name].url}/{path}", json=body, timeout=60)
        return reply.json()["success"]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updated]:
    folder = tmp_path_factory.mktemp("updates")
    config = shape("llama", layers=4, hidden=128, heads=2, kv_heads=2)
    model, whole = write_models(folder, config, ["model", "whole"], seed=9)
    models = {"model": model, "whole": whole, "missing": folder / "missing"}
    pair = folder / "pair.json"
    write_profile(profile_of(*(read_model_identity(it) for it in (whole, model))), pair)
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in NAMES}
    pages = {name: free_port() for name in NAMES}
    specs = [
        ServerSpec(
            model=model,
            name=name,
            options={**CPU, "enable-metrics": True},
            droidspeak={
                "listen": addresses[name],
                "host_gb": 0.25,
                "profiles": [str(pair)],
                "http": str(pages[name]),
            },
        )
        for name in NAMES
    ]
    with running(*specs, folder=folder / "logs", env=ENV) as servers:
        watchers = {name: Watcher(model, [addresses[name]]) for name in NAMES}
        yield Updated(dict(zip(NAMES, servers, strict=True)), models, watchers, pages)
        for watcher in watchers.values():
            watcher.close()


def usable(server: Server) -> set[float]:
    """What its metrics say of its pairs."""
    found = scraped(f"{server.url}/metrics").items()
    return {value for (name, *_), value in found if name == "droidspeak:pair_usable"}


@pytest.mark.server
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_stored_served_or_reused_any_more(updated: Updated, name: str) -> None:
    server, model, watcher = updated.servers[name], updated.models["model"], updated.watchers[name]
    tokens = prompt(100, seed=1)
    before = answer(server, tokens)
    watcher.wait_for(tokens, model)
    server.flush()
    assert answer(server, tokens).provenance["location"] == "local"
    eventually(lambda: usable(server) == {1.0})
    if name == "whole":
        assert not updated.update(name, "missing")
        server.flush()
        kept = answer(server, tokens)
        assert kept.provenance["location"] == "local", "nothing was written, and nothing changes"
        assert kept.logprobs == before.logprobs and usable(server) == {1.0}
    assert updated.update(name)
    eventually(lambda: watcher.num_pages(tokens, model) == 0)
    server.flush()
    after = answer(server, tokens)
    assert (after.provenance["outcome"], after.provenance["reused_tokens"]) == (
        "weights_updated",
        0,
    )
    page = f"http://127.0.0.1:{updated.pages[name]}"
    assert requests.get(f"{page}/health", timeout=10).status_code == 200
    assert (after.logprobs == before.logprobs) == (name == "begun")
    eventually(lambda: usable(server) == {0.0})
    answer(server, prompt(100, seed=2))
    assert watcher.num_pages(prompt(100, seed=2), model) == 0
