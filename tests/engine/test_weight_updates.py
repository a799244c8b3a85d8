"""Weights that change in a running server. From the first write until the server knows its new
weights, it knows no model. An update that is refused before it writes changes nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import requests
import torch
from checkpoint_parts import write
from engine_parts import (
    CPU,
    PAGE,
    SLOW_DEVICE,
    Answer,
    Watcher,
    answer,
    eventually,
    profile_of,
    prompt,
)
from forked import ServerSpec
from line_parts import line_of
from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.utils.weight_checker import WeightChecker
from struck_parts import scraped

from cachetree.checkpoint.identity import read_model_identity, read_weights
from cachetree.planning import write_profile
from profiles.random_models import shape, write_models
from sglang_droidspeak import weights
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.engine import HookType, place_hooks, probe, release
from sglang_droidspeak.fleet.servers import Server, free_port, running
from sglang_droidspeak.weights import WeightUpdates

FILE = "model.safetensors"
HARMLESS = {
    "init_weights_update_group",
    "destroy_weights_update_group",
    "receive_weights_from_distributed",
    "end_weight_update",
}
"""Requests that write no weights, or write them only after another request of this list."""


class Weights(torch.nn.Module):
    """A model that takes one tensor and breaks at the next one."""

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
    """Return the checker of `POST /weights_checker`. It writes random weights first, to prove that
    an update writes all weights."""
    checker = WeightChecker.__new__(WeightChecker)  # As constructed, it asks for groups of ranks.
    checker._get_model = lambda: model
    return checker


def test_every_way_to_write_weights_is_seen_before_it_writes(monkeypatch):
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


class Two:
    """The two ranks of a server. The test says what the second one reports."""

    def __init__(self) -> None:
        self.others_least = 1

    def least(self, mine: Sequence[int]) -> list[int]:
        return [min(it, self.others_least) for it in mine]

    def share(self, mine: Any, _kind: object) -> Any:
        return mine


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WeightUpdates, Models, Two]:
    """A checkpoint of one tensor."""
    monkeypatch.setattr(weights, "user_cache", lambda: None)
    started = read_weights(write(tmp_path / "m", {"w": np.zeros(1, np.float32)}))
    models, two = Models(started.started_as, 1, str), Two()
    updates = WeightUpdates(started, models, two, lambda: None, lambda *_: None)  # type: ignore[arg-type]
    return updates, models, two


def settled(updates: WeightUpdates, models: Models) -> str | None:
    """Return the model's name after its weights have been read."""
    while models.unknown == "reading_weights":
        updates.settle()
    return models.of(None)


@pytest.mark.parametrize(
    ("written_here", "written_elsewhere"), [(True, False), (False, True), (False, False)]
)
def test_an_update_from_disk_that_breaks_off_leaves_no_name_if_any_rank_has_written(
    served, written_here, written_elsewhere
):
    updates, models, two = served
    before, two.others_least = models.of(None), not written_elsewhere

    def update(_updater: object, path: str) -> None:
        if written_here:
            updates.restore()
        raise OSError(path)

    with pytest.raises(OSError, match="broken"):
        updates.from_disk(update, None, "broken")
    two.others_least = 1
    has_name = not (written_here or written_elsewhere)
    assert settled(updates, models) == (before if has_name else None)


def test_ranks_that_have_other_weights_have_no_name(served):
    updates, models, two = served
    two.share = lambda *_: "another"  # type: ignore[method-assign]

    def load(updater: WeightUpdater, source: Any) -> tuple[bool, str]:
        updater.get_model().load_weights(source)
        return True, ""

    updates.by_name(load, updater_of(Weights()), [("w", torch.ones(1))])
    assert settled(updates, models) is None
    two.share = lambda mine, _: mine  # type: ignore[method-assign]
    updates.by_name(load, updater_of(Weights()), [("w", torch.ones(1))])
    assert settled(updates, models) is not None


def test_tensors_by_name_make_the_checkpoint_that_has_them(served, tmp_path, monkeypatch):
    monkeypatch.setattr(
        weight_updater, "get_model", lambda: SimpleNamespace(weight_cache_mode="off")
    )
    monkeypatch.setattr(weight_updater, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(
        weight_updater.torch, "get_device_module", lambda _: MagicMock(current_device=lambda: "cpu")
    )
    updates, models, _ = served
    before, updater = models.of(None), updater_of(Weights())
    original = WeightUpdater.update_weights_from_tensor
    for value in (1.0, 0.0):
        name = read_weights(write(tmp_path / str(value), {"w": np.full(1, value, np.float32)}))
        assert updates.by_name(original, updater, [("w", torch.full((1,), value))])[0]
        assert models.of(None) is None, "not before all ranks agree"
        assert settled(updates, models) == name.started_as.model_id
    assert models.of(None) == before and models.generation == 2
    updates.by_name(original, updater, [("w", torch.ones(1))], load_format="direct")
    assert settled(updates, models) is None
    with pytest.raises(KeyError):
        updates.by_name(original, updater, [("w", torch.ones(1)), ("other", torch.ones(1))])
    assert settled(updates, models) is None and not vars(updater.get_model()).get("load_weights")


def test_the_probe_names_every_hooked_function():
    hooked = {
        value
        for name, value in vars(release).items()
        if name.isupper() and not name.startswith("_")
        if isinstance(value, str) and value.startswith("sglang.srt.")
    }
    hooked -= {release.SCHEDULER_MODULE, release.NATIVE_HASH}  # That one is imported there.
    assert hooked | {*release.WEIGHTS_WRITTEN} <= probe.USED.keys()


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any, Watcher]]:
    """A server, a peer, and the checkpoints `model`, which the server starts with, `near`, which is
    within its line, and `other`, which is too far."""
    folder = tmp_path_factory.mktemp("updates")
    config = shape("llama", layers=4, hidden=128, heads=2, kv_heads=2)
    model, other = write_models(folder, config, ["model", "other"], seed=9)
    near = shutil.copytree(model, folder / "near")
    changed = {name: it * 1.01 for name, it in load_file(model / FILE).items()}
    save_file(changed, near / FILE, metadata={"format": "pt"})
    pair, line = folder / "pair.json", folder / "line.json"
    write_profile(profile_of(*(read_model_identity(it) for it in (other, model))), pair)
    write_profile(line_of([read_model_identity(it) for it in (near, model)], (0.02,) * 5), line)
    address = f"tcp://127.0.0.1:{free_port()}"
    settings = {"listen": address, "host_gb": 0.25, "profiles": [str(pair)], "capture_layers": [2]}
    settings |= {"lines": [str(line)], "guard_path": str(folder / "guard.json"), "shadow_rate": 0}
    spec = ServerSpec(
        model=model, name="s", options={**CPU, "enable-metrics": True}, droidspeak=settings
    )
    with running(spec, folder=folder / "logs", env=SLOW_DEVICE) as servers:
        watcher = Watcher(model, [address])
        yield servers[0], SimpleNamespace(model=model, other=other, near=near), watcher
        watcher.close()


def usable(server: Server) -> set[float]:
    """Return the values of the server's metrics about its pairs."""
    samples = scraped(f"{server.url}/metrics").items()
    return {value for (name, *_), value in samples if name == "droidspeak:pair_usable"}


def value_of(server: Server, metric: str, label: str) -> float:
    samples = scraped(f"{server.url}/metrics").items()
    return sum(it for (name, *labels), it in samples if name == metric and label in labels)


def update(server: Server, path: str, **body: Any) -> bool:
    reply = requests.post(f"{server.url}/{path}", json=body, timeout=60)
    return reply.json()["success"]


def known(server: Server) -> Answer:
    """Return the answer to another prompt, once the server knows its weights."""

    def found() -> Answer | None:
        reply = answer(server, prompt(40, seed=99), max_new_tokens=1)
        return None if reply.provenance["outcome"] == "reading_weights" else reply

    return eventually(found)


def unknown(server: Server, tokens: list[int]) -> Answer:
    reply = answer(server, tokens)
    assert (reply.provenance["outcome"], reply.provenance["reused_tokens"]) == (
        "weights_updated",
        0,
    )
    return reply


@pytest.mark.server
def test_each_checkpoint_keeps_its_kv_over_updates(updated):
    server, models, watcher = updated
    tokens, num_pages = prompt(100, seed=1), 100 // PAGE
    tokens_of_a = prompt(100, seed=4)
    before, of_kept = answer(server, tokens), answer(server, tokens_of_a)
    for stored in (tokens, tokens_of_a):
        watcher.wait_for(stored, models.model)
    eventually(lambda: usable(server) == {1.0})
    assert not update(server, "update_weights_from_disk", model_path=str(models.model / "missing"))
    server.flush()
    assert answer(server, tokens).provenance["location"] == "local", "nothing was written"

    assert update(server, "update_weights_from_disk", model_path=str(models.other))
    known(server)
    assert watcher.num_pages(tokens, models.model) == num_pages, "a sender for the new one"
    other = answer(server, tokens)
    assert other.provenance["outcome"] == "gate_failed" and other.logprobs != before.logprobs
    assert "changed by" in other.provenance["detail"], "and no further than the line has proven"
    watcher.wait_for(tokens, models.other)
    answer(server, prompt(100, seed=3))
    watcher.wait_for(prompt(100, seed=3), models.other)

    assert update(server, "begin_weight_update")
    unknown(server, tokens)
    state = {name: it.contiguous() for name, it in load_file(models.model / FILE).items()}
    payload = b64encode(pickle.dumps([*state.items()])).decode()
    assert update(server, "update_weights_from_tensor", serialized_named_tensors=[payload])
    unknown(server, prompt(100, seed=2))
    assert usable(server) == {0.0}
    assert update(server, "end_weight_update")
    known(server)
    eventually(lambda: usable(server) == {1.0})
    again = answer(server, tokens_of_a)
    assert (again.provenance["location"], again.provenance["exact"]) == ("local", True)
    assert again.logprobs == of_kept.logprobs, "the same content is the same model"
    assert watcher.num_pages(prompt(100, seed=2), models.model) == 0
    server.flush()
    assert answer(server, prompt(100, seed=3)).provenance["outcome"] == "reused", "from the other"


@pytest.mark.server
def test_an_heir_of_a_line_reuses_on_probation_and_every_answer_is_compared(updated):
    server, models, watcher = updated
    tokens = prompt(100, seed=7)
    assert update(server, "update_weights_from_disk", model_path=str(models.model))
    known(server)
    answer(server, tokens)
    watcher.wait_for(tokens, models.model)
    assert update(server, "update_weights_from_disk", model_path=str(models.near))
    known(server)
    compared = "droidspeak:shadows_total", "compared"
    num_before = value_of(server, *compared)
    heir = answer(server, tokens).provenance
    sender = read_model_identity(models.model).model_id
    assert (heir["outcome"], heir["sender"], heir["block"]) == ("reused", sender, None)
    assert value_of(server, "droidspeak:heirs", "probation") == 1.0
    eventually(lambda: value_of(server, *compared) > num_before)


@pytest.mark.server
@pytest.mark.parametrize("way", ["from outside", "reset"])
def test_what_is_written_without_names_is_unknown_until_all_is_written(updated, way):
    server, models, watcher = updated
    tokens = prompt(100, seed=len(way))
    if way == "reset":
        assert update(server, "weights_checker", action="reset_tensors")
    else:
        assert update(server, "begin_weight_update") and update(server, "end_weight_update")
    known(server)
    server.flush()
    unknown(server, tokens)
    assert update(server, "update_weights_from_disk", model_path=str(models.model))
    assert known(server).provenance["outcome"] != "weights_updated"
    assert watcher.num_pages(tokens, models.model) == 0
