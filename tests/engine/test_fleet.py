"""The file of a fleet: its meaning, and errors that are found before anything is started."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import yaml
from engine_parts import eventually

from cachetree.checkpoint.family import Family
from cachetree.checkpoint.identity import read_model_identity
from cachetree.cli.serve import read_config
from cachetree.errors import ConfigError
from sglang_droidspeak.cli import main
from sglang_droidspeak.fleet import ports, servers
from sglang_droidspeak.fleet.fleet import Fleet, read_fleet, sglang_flags, shared_cores, specs
from sglang_droidspeak.fleet.servers import ServerSpec, WorkerSpec
from sglang_droidspeak.fleet.signals import terminable, uninterrupted

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fleet.yaml"
ENGINE = {"model-path": "m", "port": 1}
MODEL = ROOT / "examples" / "pairs" / "weights" / "sender"
FAMILY = {"model": str(MODEL), "kv_dtype": "bfloat16", "page_size": 32}


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_example_is_three_workers_and_four_engines_of_two_families(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    processes = specs(read_fleet(EXAMPLE), {"device": "cpu"})
    workers = [it for it in processes if isinstance(it, WorkerSpec)]
    engines = [it for it in processes if isinstance(it, ServerSpec)]
    assert (len(workers), len(engines)) == (3, 4)
    assert processes[:3] == workers, "workers start first"
    families = set()
    for worker in workers:
        config = tmp_path / f"{worker.name}.yaml"
        config.write_text(yaml.safe_dump(dict(worker.config)))
        families.add(read_config(config).family.kv_dtype)
    assert families == {"bfloat16", "float32"}
    assert all(it.options["device"] == "cpu" for it in engines)
    assert len({it.port for it in engines}) == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "no workers and no engines"),
        ({"engines": {"one": {"port": 1}}}, "engines.one has no model-path"),
        ({"engines": {"one": ENGINE, "two": ENGINE}}, "both have port 1"),
        ({"engines": {"one": {**ENGINE, "port": "x"}}}, "engines.one has port 'x'; give one of"),
        ({"engines": {"one": {**ENGINE, "port": 65536}}}, "engines.one has port 65536"),
        ({"engines": {"one": ENGINE}, "workers": {"one": {}}}, "the name one is used twice"),
        (
            {"engines": {"one": ENGINE}, "programs": {"two": {"command": ["florp"], "port": 2}}},
            "programs.two: there is no program florp; install it",
        ),
        ({"engines": {"one": ENGINE}, "programs": {"two": {"command": [], "port": 2}}}, "programs"),
        ({"engines": {"a/b": ENGINE}}, "'a/b' cannot be a name"),
        (
            {"engines": {"one": {**ENGINE, "droidspeak": {"hots_gb": 1}}}},
            "engines.one.droidspeak: there is no key hots_gb; did you mean host_gb?",
        ),
        ({"engins": {}}, "there is no key engins; did you mean engines?"),
        (
            {"engines": {"one": {**ENGINE, "mem-fraction-statc": 0.5}}},
            "engines.one has mem-fraction-statc, .* did you mean mem-fraction-static?",
        ),
        ({"engines": {"one": {**ENGINE, "florp": 1}}}, "engines.one has florp, which SGLang does"),
        ({"engines": {"one": {**ENGINE, "ssl-certfile": "c"}}}, "ssl-certfile, .* by itself"),
        ({"workers": {"one": {"familly": {}}}}, "workers.one: .*familly"),
        ({"workers": {"one": {"family": {**FAMILY, "page_sise": 1}}}}, "workers.one: .*page_sise"),
        (
            {"workers": {"one": {"family": {**FAMILY, "model": "nowhere"}}}},
            "workers.one: model folder nowhere",
        ),
        (
            {"workers": {"one": {"family": FAMILY, "cache": {"keeps": ["dns://engines"]}}}},
            "workers.one: .*keeps is 'dns://engines', which names no directory; write dns://",
        ),
        ({"servers": {}}, "servers"),
        (["x"], "fleet.yaml"),
    ],
)
def test_mistakes_are_named(content, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        read_fleet(written(tmp_path, content))


def test_every_option_of_sglang_is_known():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = {name[2:] for it in parser._actions for name in it.option_strings}
    assert len(options) > 500
    assert options <= sglang_flags()


def test_engines_share_the_cores_unless_told_otherwise(monkeypatch):
    engines = specs(Fleet(engines={"one": ENGINE, "two": {**ENGINE, "port": 2}}))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert shared_cores(engines) == {"OMP_NUM_THREADS": "4"}
    assert shared_cores(engines * 8) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert shared_cores(engines) == {"OMP_NUM_THREADS": "3"}


def test_a_program_is_ready_once_its_port_answers(tmp_path):
    port = servers.free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    programs = {"program": {"command": command, "port": port}}
    written_fleet = written(tmp_path, {"programs": programs, "engines": {"one": ENGINE}})
    program, engine = specs(read_fleet(written_fleet))
    assert (program.name, engine.name) == ("program", "one")
    with servers.running(program, folder=tmp_path) as (started,):
        with socket.create_connection(("127.0.0.1", port), 5):
            assert started.address == f"127.0.0.1:{port}"
        started.kill()
        with pytest.raises(servers.ServerFailed, match="program ended with"):
            started.is_ready()


def test_what_a_program_left_when_it_ended_ends_with_the_fleet(tmp_path):
    """The program is a wrapper that ends before its child. `droidspeak up` removes programs that
    have ended from its list."""
    left, go = tmp_path / "pid", tmp_path / "go"
    serve = f"{sys.executable} -m http.server {(port := servers.free_port())} --bind 127.0.0.1"
    command = ("sh", "-c", f"{serve} & echo $! > {left}; until [ -e {go} ]; do sleep 0.1; done")
    with servers.running(servers.ProgramSpec(command=command, port=port), folder=tmp_path) as all_:
        (program,) = all_
        go.touch()
        program._process.wait(20)
        all_.remove(program)
        os.kill(pid := int(left.read_text()), 0)
    ended(pid)


def ended(pid: int) -> None:
    """Wait until a child of another process has ended. Its new parent may collect it late."""
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 10)


def test_what_a_fleet_writes_is_for_its_owner_alone(tmp_path):
    """Configurations contain keys, and logs contain prompts. Files of an earlier run count, too."""
    spec = WorkerSpec(config={"family": FAMILY, "cache": {"worker": {"listen": "no"}}})
    umask = os.umask(0o022)
    try:
        for _ in range(2):
            with (
                pytest.raises(servers.ServerFailed),
                servers.running(spec, folder=tmp_path / "out"),
            ):
                pass
            written = sorted((tmp_path / "out").iterdir())
            assert [it.name for it in written] == ["worker.log", "worker.yaml"]
            assert [it.stat().st_mode & 0o777 for it in written] == [0o600] * 2
            assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
            for path in written:
                path.chmod(0o644)
    finally:
        os.umask(umask)


def test_whoever_was_given_the_number_of_what_ended_is_let_alone(tmp_path):
    spec = servers.ProgramSpec(command=("sleep", "60"), port=servers.free_port())
    was, other = spec.start(tmp_path, {}), spec.start(tmp_path, {})
    was.stop()
    was._process.pid = other.pid
    was.stop()
    with pytest.raises(subprocess.TimeoutExpired):
        other._process.wait(0.5)
    other.stop()
    assert not other.is_alive


def test_what_is_being_written_is_written_before_it_ends(tmp_path):
    """A worker, for example, writes the entries that wait for its disk. This may take more than two
    seconds."""
    port, file = servers.free_port(), tmp_path / "written"
    program = f"""
import os, signal, socket, time
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3)
    open({str(file)!r}, "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
server = socket.create_server(("127.0.0.1", {port}))
while True:
    signal.pause()
"""
    words = (sys.executable, "-c", program)
    with servers.running(servers.ProgramSpec(command=words, port=port), folder=tmp_path):
        assert not file.exists()
    assert file.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_started_ends_with_its_starter(tmp_path, how):
    program = f"""
import sys
from pathlib import Path
from sglang_droidspeak.fleet.servers import ProgramSpec, running

command = [sys.executable, "-m", "http.server", "{(port := servers.free_port())}"]
with running(ProgramSpec(command=command, port={port}), folder=Path({str(tmp_path)!r})) as (it,):
    print(it.pid, flush=True)
    sys.stdin.read()
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.send_signal(how)
    starter.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_closed_terminal_that_is_ignored_hides_no_other_signal():
    """SIGHUP is ignored, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), terminable():
            signal.raise_signal(signal.SIGHUP)
            with uninterrupted():
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGTERM)
            raise AssertionError("nothing was raised")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_loads_longer_than_it_may_is_told_with_the_remedy(tmp_path, capsys):
    program = {"command": ["sleep", "60"], "port": servers.free_port()}
    worker = {"family": FAMILY, "cache": {"worker": {"listen": "tcp://127.0.0.1:0"}}}
    fleet = written(tmp_path, {"programs": {"one": program}, "workers": {"two": worker}})
    assert main(["up", str(fleet), "--out", str(tmp_path), "--start-timeout", "0"]) == 1
    remedy = "if it is still loading, give a larger --start-timeout"
    assert f"one is not ready after 0 s; {remedy}" in capsys.readouterr().err


def test_a_mistake_of_any_engine_is_told_before_anything_starts(tmp_path, capsys):
    engines = {
        name: {"model-path": str(MODEL), "port": servers.free_port(), "droidspeak": settings}
        for name, settings in (("one", {"host_gb": 0.01}), ("two", {"profiles": ["nope.json"]}))
    }
    out = tmp_path / "out"
    assert main(["up", str(written(tmp_path, {"engines": engines})), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("droidspeak: engines.two: profile nope.json ") and said.count("\n") == 1
    assert not out.exists()


def test_anchors_have_a_place(tmp_path):
    path = written(tmp_path, {"x-shared": {"a": 1}, "engines": {"one": ENGINE}})
    assert read_fleet(path) == Fleet(engines={"one": ENGINE})


def test_a_worker_reads_its_family_from_a_checkpoint(tmp_path):
    path = written(tmp_path, {"family": FAMILY})
    types = {"model_dtype": "bfloat16", "kv_dtype": "bfloat16"}
    expected = Family(**read_model_identity(MODEL).shape, **types, page_size=32)
    assert read_config(path).family == expected
    path = written(tmp_path, {"family": {**FAMILY, "model_dtype": "float16"}})
    assert read_config(path).family == msgspec.structs.replace(expected, model_dtype="float16")
    for wrong in ({**FAMILY, "kv_dtype": "int3"}, {**FAMILY, "model": "nowhere"}):
        with pytest.raises(ConfigError):
            read_config(written(tmp_path, {"family": wrong}))


@pytest.mark.parametrize(
    ("options", "env", "order"),
    [
        ({}, {}, ["start one", "one is ready", "start two", "two is ready"]),
        ({"device": "cpu"}, {}, ["start one", "start two", "one is ready", "two is ready"]),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, ["start one", "start two", "one is ready"]),
    ],
)
def test_servers_of_one_device_start_one_after_the_other(
    tmp_path, monkeypatch, options, env, order
):
    """If two servers started at once, SGLang would take memory for the KV of one that the other is
    about to use."""
    happened: list[str] = []

    class Started:
        def __init__(self, name: str) -> None:
            happened.append(f"start {name}")
            self.name, self.is_known = name, False
            self.terminate = self.stop = self.check = lambda: None

        def is_ready(self) -> bool:
            if not self.is_known:
                happened.append(f"{self.name} is ready")
            self.is_known = True
            return True

    class Wanted(ServerSpec):
        def start(self, *_: object) -> Any:
            return Started(self.name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wanted = [Wanted(name=name, model=MODEL, options=options) for name in ("one", "two")]
    with servers.running(*wanted, folder=tmp_path, env=env):
        assert happened[: len(order)] == order


def test_a_server_that_ends_while_the_next_one_loads_ends_the_start(tmp_path):
    class OnGpu(servers.ProgramSpec):
        def is_on_gpu(self, _env: object) -> bool:
            return True

        def answers(self, _log: Path) -> bool:
            return self.name == "one"

    one, two = (
        OnGpu(name=name, command=("sleep", seconds), port=servers.free_port())
        for name, seconds in (("one", "1"), ("two", "60"))
    )
    with (
        pytest.raises(servers.ServerFailed, match="one ended with 0"),
        servers.running(one, two, folder=tmp_path, start_timeout_s=8),
    ):
        raise AssertionError("it is not ready")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "localhost"])
def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path, host):
    with socket.create_server(("127.0.0.1", 0)) as v4:
        port = v4.getsockname()[1]
        server = ServerSpec(model=MODEL, host=host, port=port)
        with socket.create_server(("::1", port), family=socket.AF_INET6):
            for spec in (server, servers.ProgramSpec(command=("true",), port=port, name="server")):
                with (
                    pytest.raises(servers.ServerFailed, match=f"server has port {port} of .*give"),
                    servers.running(spec, folder=tmp_path),
                ):
                    raise AssertionError("it is not ready")
    assert not list(tmp_path.iterdir())
    server.check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_is_asked_itself_whatever_proxy_there_is(tmp_path, monkeypatch, host):
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{servers.free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{servers.free_port()}")
    written: list[str] = []
    monkeypatch.setattr(type(os.environ), "__setitem__", lambda _, name, __: written.append(name))
    with Server((host, 0), Ready) as server:
        server.timeout = 5
        threading.Thread(target=server.handle_request).start()
        spec = ServerSpec(model=MODEL, host=host, port=server.server_port)
        assert spec.answers(tmp_path)
    assert not written, "other threads read the environment"


def test_no_two_processes_are_given_one_port(monkeypatch):
    """One of two ports belongs to a live process, the other to a process that has ended."""
    first = servers.free_port(2)
    ports._given_out.pop().close()
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 2))
    ours = servers.free_port()
    program = f"""
from sglang_droidspeak.fleet import ports
ports._PORTS = {ports._PORTS!r}
print(ports.free_port())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert {ours, int(said.stdout)} == {first, first + 1}, said.stderr
    assert servers.free_port() == int(said.stdout)
    with pytest.raises(servers.ServerFailed, match="is free"):
        servers.free_port()
