"""A server reports the workers that it reads from."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest
from answering import answering
from standins import made
from tree_parts import FAMILY

from cachetree.cache import Cache
from cachetree.checkpoint.family import Family
from cachetree.config import CacheConfig
from cachetree.ids import ModelId, PageHash
from cachetree.transport import WorkerConfig
from sglang_droidspeak.adapters.models import Owner
from sglang_droidspeak.cli import main
from sglang_droidspeak.fleet.servers import free_port
from sglang_droidspeak.linker import mark_log
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.request.planner import Planner, not_ready
from sglang_droidspeak.start.config import Settings


def serving(address: str, family: Family = FAMILY) -> Cache:
    return Cache(family, CacheConfig(worker=WorkerConfig(listen=address), host_bytes=1 << 20))


def test_the_cache_log_is_marked_and_the_count_is_of_those_not_ready(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cachetree.peer"), "filters", [])
    address = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    other = msgspec.structs.replace(FAMILY, page_size=2)
    config = CacheConfig(peers=tuple(address), serves=False, host_bytes=1 << 20)
    mark_log()
    with serving(address[0], other), serving(address[1]), Cache(FAMILY, config) as cache:
        while [it.state for it in cache.sources()] != ["refused", "ready"]:
            time.sleep(0.01)
        assert not_ready(cache.sources()) == "1 of 2 peers not ready"
        assert not_ready(cache.sources()[1:]) == ""
    lines = [it.getMessage() for it in caplog.records if it.name == "cachetree.peer"]
    assert lines
    assert all(line.startswith("droidspeak: peer tcp://") for line in lines)
    assert any("page_size is 2 there and 1 here" in line for line in lines)


@pytest.fixture(name="info")
def served_info() -> Iterator[SimpleNamespace]:
    """Run a stand-in for SGLang's server, with an internal state that `/server_info` returns."""
    state = SimpleNamespace(internal_state={})

    def answer(path: str, _question: object) -> tuple[int, object]:
        status = 200 if path == "/server_info" else 404
        return status, {"internal_states": [state.internal_state]}

    with answering(answer) as state.url:
        yield state


def test_the_command_shows_states_and_errors(info, capsys, monkeypatch):
    """The command ignores any proxy that the environment names."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    address = f"tcp://127.0.0.1:{free_port()}"
    with Cache(FAMILY, CacheConfig(peers=(address,), serves=False, host_bytes=1 << 20)) as cache:
        peers = msgspec.to_builtins(cache.sources())
        info.internal_state[KEY] = {"peers": peers, "names": {}, "savings": []}
        assert main(["peers", f"{info.url}/"]) == 1
        assert capsys.readouterr().out.split()[:2] == [address, "connecting"]
        with serving(address):
            assert cache.wait_ready(20)
            info.internal_state[KEY]["peers"] = msgspec.to_builtins(cache.sources())
            assert main(["peers", info.url]) == 0
        assert capsys.readouterr().out.split()[:2] == [address, "ready"]
    model = "a" * 32
    (peer,) = info.internal_state[KEY]["peers"]
    peer |= {"reason": "\x1b[2Jone\nline", "model": model}
    info.internal_state[KEY]["names"] = {model: "base"}
    assert main(["peers", info.url]) == 0
    assert capsys.readouterr().out.endswith("base (aaaaaaaa)  [2Jone line\n")
    saving = {"sender": model, "receiver": "b" * 32, "saved_s": 1234.56, "lost_s": 0.04}
    info.internal_state[KEY]["savings"] = [saving]
    assert main(["peers", info.url]) == 0
    line = "saved 1,234.6 s of prefill and lost 0.0 s since the start: base (aaaaaaaa) for bbbb"
    assert line in capsys.readouterr().out.splitlines()[1]


def test_the_command_says_what_is_not_such_a_server(info, capsys):
    assert KEY not in info.internal_state
    assert main(["peers", info.url]) == 1
    assert capsys.readouterr().err == f"droidspeak: {info.url} runs without droidspeak\n"
    info.internal_state[KEY] = {"error": "it broke"}
    assert main(["peers", info.url]) == 1
    assert capsys.readouterr().err == f"droidspeak: {info.url}: it broke\n"
    assert main(["peers", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does not answer as an SGLang server does" in capsys.readouterr().err


def test_a_prefix_that_nobody_has_is_told_with_the_peers_that_are_not_ready():
    address = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    config = CacheConfig(peers=tuple(address), serves=False, host_bytes=1 << 20)
    with serving(address[0]), Cache(FAMILY, config) as cache:
        server = SimpleNamespace(page_size=1, profiles=(), settings=Settings(min_tokens=1))
        server.identity = SimpleNamespace(num_layers=FAMILY.num_layers)
        planner = made(Planner, cache=cache, server=server)
        planner._models.owner_of.return_value = Owner(ModelId("m"), None, None)
        req = MagicMock()
        req.sampling_params.custom_params = None
        req.full_untruncated_fill_ids = [1, 2, 3]
        while cache.sources()[0].state != "ready":
            time.sleep(0.01)
        declined = planner.plan(req, [PageHash(bytes(16))] * 2, MagicMock(), num_waiting=0)
        assert (declined.outcome, declined.detail) == ("no_match", "1 of 2 peers not ready")


def test_a_server_without_peers_says_so(info, capsys):
    info.internal_state = {KEY: {"peers": [], "savings": []}}
    assert main(["peers", info.url]) == 0
    assert "reads from no peer" in capsys.readouterr().out


@pytest.mark.parametrize(("off", "status"), [("", 0), ("weights were updated", 1)])
def test_guard_fails_if_the_server_reuses_nothing(off, status):
    guard = {"shadow_rate": 0.0, "pairs": [], "suspects": [], "off": off, "names": {}}
    with answering(lambda _path, _question: (200, guard)) as url:
        assert main(["guard", url]) == status


@pytest.mark.parametrize("command", ["peers", "guard", "doctor --url", "explain id --url"])
def test_an_address_without_http_is_told_with_it(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "127.0.0.1:43001"])
    assert "127.0.0.1:43001 has no http://; write http://127" in capsys.readouterr().err
