"""SGLang puts adapters into a batch together, although one of them acts only from some token on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_overlap_loader import LoRAOverlapLoader
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.scheduler import Scheduler
from standins import Named

from benchmarks.random_adapters import write_adapter
from cachetree import ConfigError, ModelId
from profiles.random_models import shape, write_models
from sglang_droidspeak.adapters.activated import ActivatedAdapters
from sglang_droidspeak.adapters.hooks import AdapterHooks
from sglang_droidspeak.adapters.models import Models
from sglang_droidspeak.ranks import Ranks

MAX_LORAS = 5
LATE = "judge"
PLAIN = ("a", "b", "c", "d", "e", "f")


def ref(name: str, pinned: bool = False) -> LoRARef:
    return LoRARef(lora_id=name, lora_name=name, lora_path=name, pinned=pinned)


class Slots:
    """A stand-in for SGLang's LoRAManager and its pool's slots. Any slot may be evicted that a
    batch does not need."""

    validate_lora_batch = LoRAManager.validate_lora_batch

    def __init__(self, rng: random.Random, *pinned: str) -> None:
        self._rng = rng
        self.max_loras_per_batch, self.num_pinned_loras = MAX_LORAS, len(pinned)
        self.lora_refs = {it: ref(it, it in pinned) for it in (*PLAIN, LATE)}
        self.uid_to_buffer_id: dict[str | None, int] = {}
        self.memory_pool = self

    def fetch_new_loras(self, new: set[Any], running: set[Any] = frozenset()) -> None:  # type: ignore[assignment]
        needed = new | running
        assert len(needed) <= MAX_LORAS
        for uid in needed - self.uid_to_buffer_id.keys():
            if len(self.uid_to_buffer_id) == MAX_LORAS:
                others = self.uid_to_buffer_id.keys() - needed
                free = [it for it in others if it is None or not self.lora_refs[it].pinned]
                del self.uid_to_buffer_id[self._rng.choice(sorted(free, key=str))]
            self.uid_to_buffer_id[uid] = 0


def scheduler_of(slots: Slots, *, is_overlapped: bool) -> Any:
    loader: Any = LoRAOverlapLoader.__new__(LoRAOverlapLoader)
    loader.lora_manager, loader.lora_to_overlap_load_event = slots, {}
    event = SimpleNamespace(query=lambda: True, record=lambda _stream: None)
    stream = SimpleNamespace(wait_event=lambda _event: None)
    loader.device_module = SimpleNamespace(Event=lambda: event, current_stream=lambda: stream)
    loader.load_stream, loader.load_stream_context = stream, nullcontext()
    runner = SimpleNamespace(lora_manager=slots)
    return SimpleNamespace(
        lora_drainer=None,
        enable_lora_overlap_loading=is_overlapped,
        lora_overlap_loader=loader,
        tp_worker=SimpleNamespace(model_runner=runner),
    )


def hooks_of(ranks: Ranks) -> AdapterHooks:
    """Return hooks with models that are named like their folders."""
    models = Models(Named(ModelId("base")), 4, lambda folder: folder.name)
    return AdapterHooks(models, ActivatedAdapters(models), ranks, lambda _lora_id: None)


def of_one() -> ActivatedAdapters:
    models: Any = SimpleNamespace(invocation=lambda lora_id: (7,) if lora_id == LATE else ())
    return ActivatedAdapters(models)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_base_waits_while_other_adapters_have_all_slots(is_overlapped):
    """All slots hold adapters that ran before the first activated adapter was loaded."""
    slots, running = Slots(random.Random(0)), set(PLAIN[:MAX_LORAS])
    slots.fetch_new_loras(running)
    scheduler, req = scheduler_of(slots, is_overlapped=is_overlapped), SimpleNamespace(lora_id=None)
    can = Scheduler.can_schedule_lora_req
    assert not of_one().can_schedule(can, scheduler, req, running)  # type: ignore[arg-type]


@pytest.mark.parametrize("pinned", [(), ("a", "b", "c"), (LATE, "a", "b", "c")], ids=len)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_no_batch_has_more_than_it_can_hold_and_nobody_waits_for_ever(is_overlapped, pinned):
    rng = random.Random(len(pinned))
    slots = Slots(rng, *pinned)
    scheduler = scheduler_of(slots, is_overlapped=is_overlapped)
    activated = of_one()
    running: list[str | None] = []
    num_most = 0
    for _ in range(3000):
        lora_id = rng.choice([None, LATE, *PLAIN])
        req: Any = SimpleNamespace(lora_id=lora_id)
        if activated.can_schedule(Scheduler.can_schedule_lora_req, scheduler, req, set(running)):
            running.append(lora_id)
        else:
            assert running, "a request alone has room"
        needed = {*running, None} if LATE in running else set(running)
        if is_overlapped:
            assert needed <= slots.uid_to_buffer_id.keys()
        else:
            slots.fetch_new_loras(set(running))
            slots.fetch_new_loras(needed)
        num_most += len(needed) == MAX_LORAS
        while len(running) > rng.randrange(1, 12):
            running.remove(rng.choice(running))
        if rng.random() < 0.05:
            running.clear()
    assert num_most > 100


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an activated adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    (model,) = write_models(folder, shape("llama", layers=4, hidden=64, heads=2, kv_heads=1), ["m"])
    made = write_adapter(folder / "a", model)
    config = made / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [7]}))
    return made


class Loads:
    """A stand-in for SGLang's LoRAManager, without weights and with this hook."""

    load = LoRAManager._load_lora_adapter
    load_from_tensors = LoRAManager._load_lora_adapter_from_tensors

    def __init__(self, hooks: Any, max_loras_per_batch: int, refs: list[LoRARef]) -> None:
        self.max_loras_per_batch = max_loras_per_batch
        self.lora_refs = {it.lora_id: it for it in refs}
        self.target_modules = {"qkv_proj"}
        self.fails = False
        self.loras: dict[str, Any] = {}
        self.configs: dict[str, Any] = {}
        self.base_hf_config = SimpleNamespace(vocab_size=1)
        self.num_pinned_loras = 0
        self._hooks = hooks

    def has(self, ref: LoRARef) -> bool:
        return ref.lora_id in self.lora_refs

    def validate_new_adapter(self, config: Any, ref: LoRARef) -> None:
        self._hooks.validate(self, config, ref)

    def load_lora_weights(self, _ref: LoRARef, _tensors: Any = None) -> None:
        if self.fails:
            raise MemoryError("no memory")

    load_lora_weights_from_tensors = load_lora_weights

    def unload_lora_adapter(self, ref: LoRARef) -> None:
        del self.lora_refs[ref.lora_id]

    def create_lora_update_result(self, *, success: bool, error_message: str = "") -> Any:
        return SimpleNamespace(success=success, error_message=error_message)


@pytest.mark.parametrize(
    ("num_slots", "pinned", "is_pinned", "is_refused"),
    [(1, 0, False, True), (2, 1, False, True), (2, 0, True, False), (3, 1, False, False)],
)
def test_one_that_no_batch_could_hold_is_refused_before_it_is_loaded(
    adapter, num_slots, pinned, is_pinned, is_refused
):
    hooks = hooks_of(Ranks(None))
    manager = Loads(hooks, num_slots, [ref(f"p{i}", pinned=True) for i in range(pinned)])
    late = LoRARef(lora_id="x", lora_name=LATE, lora_path=str(adapter), pinned=is_pinned)
    result = hooks.load(Loads.load, manager, late)
    assert result.success == manager.has(late) == (not is_refused)
    if is_refused:
        assert f"{LATE} takes two slots" in result.error_message
        assert "--max-loras-per-batch leaves 1" in result.error_message
    else:
        hooks.activated.require_room(manager)


class OtherRank(Ranks):
    """A rank next to another one, which has enough memory or not."""

    def __init__(self, *, is_well: bool) -> None:
        super().__init__(None)
        self._is_well = is_well

    def least(self, values: Sequence[int]) -> Sequence[int]:
        return [min(it, self._is_well) for it in values]


@pytest.mark.parametrize("is_well", [False, True])
@pytest.mark.parametrize("broken", [None, "folder", "invocation", "load"])
def test_all_ranks_have_a_new_adapter_or_none_has(adapter, tmp_path, broken, is_well):
    """All ranks end with the same adapters, whichever rank failed, at whichever step."""
    hooks = hooks_of(OtherRank(is_well=is_well))
    models = hooks.models
    folder = shutil.copytree(adapter, tmp_path / "a")
    if broken == "folder":
        shutil.rmtree(folder)
        folder.write_text("no folder")
    if broken == "invocation":
        (folder / "adapter_config.json").write_text("{")
    manager = Loads(hooks, 4, [])
    manager.fails = broken == "load"
    late = LoRARef(lora_id="x", lora_name=LATE, lora_path=str(folder), pinned=False)
    result = hooks.load(Loads.load, manager, late)
    is_loaded = broken is None and is_well
    assert result.success == manager.has(late) == models.is_reading("x") == is_loaded
    assert bool(models.invocation("x")) == is_loaded
    assert is_loaded or result.error_message


def test_a_pinned_one_leaves_room_for_those_that_are_there(adapter):
    hooks = hooks_of(Ranks(None))
    hooks.models.add("x", adapter)
    manager = Loads(hooks, 3, [ref("x"), ref("p", True)])
    hooks.activated.require_room(manager)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for pinned in (True, False):
        late = LoRARef(lora_id="q", lora_name="q", lora_path=str(adapter), pinned=pinned)
        for result in (manager.load(late), manager.load_from_tensors(late, {}, config)):
            assert result.success == (not pinned)
            assert pinned == ("--max-loras-per-batch leaves 1" in result.error_message)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_one_whose_batches_lm_head_could_not_read_is_refused(is_pinned):
    """On CUDA SGLang chooses the rows of lm_head by the lengths that a batch states."""
    manager, late = Loads(None, 4, [ref("a")]), ref(LATE, is_pinned)
    manager.target_modules |= {"lm_head"}
    of_one().require_room(manager)
    with pytest.raises(ConfigError, match=f"activated LoRA {LATE} .* lm_head; list the modules"):
        of_one().require_room(manager, late)


@pytest.mark.parametrize(
    ("stated", "says", "warns"),
    [
        ({}, "acts from its invocation on, tokens [7]", ""),
        ({"alora_invocation_tokens": None}, "acts on whole prompts", ""),
        ({"alora_invocation_tokens": []}, "acts on whole prompts", ""),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 4}}, "acts", "use_rslora, rank_pattern"),
    ],
    ids=str,
)
def test_the_log_says_where_an_adapter_acts_and_what_sglang_ignores(
    adapter, tmp_path, caplog, stated, says, warns
):
    folder = shutil.copytree(adapter, tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | stated))
    caplog.set_level("INFO")
    hooks_of(Ranks(None)).models.add("x", folder)
    lines = [it.getMessage() for it in caplog.records if f"adapter {folder}" in it.getMessage()]
    assert says in lines[0] and len(lines) == 1 + bool(warns)
    assert warns in lines[-1]
