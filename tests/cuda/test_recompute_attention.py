"""The attention of recomputed layers is made and run at start, and memory is left for it."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from engine_on_cuda import PAGE, Part, fork, land, load, on_device
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.mem_cache import kv_cache_configurator
from test_flashinfer import NAMES, Wrapper
from virtual_cuda import VirtualCuda

from cachetree.ids import Span
from profiles.random_models import random_prompt, shape, write_models
from sglang_droidspeak.engine.attention import attention_bytes, recompute_attention
from sglang_droidspeak.engine.layers import LayerStack
from sglang_droidspeak.start.config import LINKER_MODULE

MIB = 1 << 20
TOKENS = random_prompt(2 * PAGE + 5, seed=1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory) -> Path:
    config = shape(request.param, layers=4, hidden=64, heads=2, kv_heads=1)
    (path,) = write_models(tmp_path_factory.mktemp(request.param), config, ["model"])
    return path


class Start(msgspec.Struct, frozen=True):
    num_made: int
    is_servers_own: bool
    has_own_workspace: bool
    runs: list[list[int]]
    """Runs before the first request."""
    began_with_e: list[bool]
    num_made_later: int
    outcome: str
    table: list[int]
    """Row of the table that SGLang reserves for padding."""


def start(model: Path) -> Start:
    cuda, run, began_with_e = VirtualCuda(), LayerStack.run, []

    def watched(stack: LayerStack, block: Span, e: Any, batch: Any) -> None:
        began_with_e.append(e is not None)
        run(stack, block, e, batch)

    with (
        patch.object(LayerStack, "run", watched),
        on_device(load(model), model, (1,), cuda) as engine,
    ):
        (made,) = engine.made
        runs, table = list(made.runs), engine.runner.req_to_token_pool.req_to_token[0, :PAGE]
        warmed = list(began_with_e)
        slots = engine.slots(PAGE, 3 * PAGE)
        request = engine.loading(slots[: 2 * PAGE], Span(1, 3), cuda.page_locked(1 << 18))
        land(request.source.staging)
        (outcome,) = engine.run_with([request], Part(TOKENS, slots, 2 * PAGE))
        engine.close()
        return Start(
            num_made=1,
            is_servers_own=made is engine.runner.attn_backend,
            has_own_workspace=made.has_own_workspace and not engine.runner.init_new_workspace,
            runs=runs,
            began_with_e=warmed,
            num_made_later=len(engine.made) - 1,
            outcome=outcome,
            table=table.tolist(),
        )


def test_a_second_instance_has_run_with_and_without_tokens_before_when_requests_come(model):
    assert fork(partial(start, model), Start) == Start(
        num_made=1,
        is_servers_own=False,
        has_own_workspace=True,
        runs=[[0], [PAGE // 2], [PAGE // 2]],  # the last with E corrected by its one map
        began_with_e=[False, True, True],
        num_made_later=0,
        outcome="reused",
        table=[0] * PAGE,
    )


def taken(model: Path) -> tuple[int, int]:
    """Return the device memory that an instance of FlashInfer takes, and the memory that was
    predicted."""
    wrappers = []

    class Counted(Wrapper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            wrappers.append(self)

    names = {name: Counted if isinstance(it, type) else it for name, it in NAMES.items()}
    runner = load(model)
    predicted = attention_bytes("flashinfer", runner.model_config.hf_config.architectures)
    with patch.multiple(flashinfer_backend, create=True, **names):
        made = recompute_attention(runner, "flashinfer")
    return made.workspace_buffer.nbytes + len(wrappers) * 8 * MIB, predicted


def test_the_memory_of_flashinfer_is_known_before_it_is_made(model):
    taken_bytes, predicted = fork(partial(taken, model), tuple[int, int])
    assert taken_bytes == predicted > 384 * MIB


def test_flashinfer_has_eight_mebibytes_for_each_plan():
    for wrapper in (it for it in NAMES.values() if isinstance(it, type)):
        source = "".join(inspect.getsource(wrapper.real.__init__).split())
        assert source.count("self._int_workspace_buffer=torch.empty((8*1024*1024,),") == 1


def left_for_kv(model: Path, choice: str) -> int:
    """Return the bytes left for KV of 8 GiB, in a server with this choice of attention."""
    import sglang.srt.managers.scheduler  # noqa: F401  (its hooks are placed where it is loaded)

    config = {
        "linker": "DroidSpeakLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": {"recompute_attention": choice},
    }
    runner = load(
        model,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=config,
    )
    free = {"get_available_gpu_memory": lambda *_, **__: 8.0}
    with patch.multiple(kv_cache_configurator, **free):
        return runner.kv_cache_configurator._profile_available_bytes(8.0)


def test_it_is_left_out_of_what_kv_is_sized_by(model):
    choices = ("server", "flashinfer")
    without, beside = (fork(partial(left_for_kv, model, it), int) for it in choices)
    assert without - beside == fork(partial(taken, model), tuple[int, int])[1]
