"""`droidspeak doctor` says what works, what does not, and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from checkpoint_parts import write
from fault_proxy import Deed, FaultProxy, Towards, Via
from msgspec import structs
from safetensors.torch import load_file, save_file
from test_peers import FAMILY, served_info, serving  # noqa: F401
from test_planner import PAGE, planned
from test_policy import FAILED, FAR, MEASURED, PROFILES, links

from cachetree.cache import Cache
from cachetree.config import CacheConfig
from cachetree.disk import Directory
from cachetree.ids import Location, Span
from cachetree.planning import Link, full_prefill_s, index_profiles, times_of
from cachetree.transport import PeerConfig
from sglang_droidspeak.cli import ask as asking
from sglang_droidspeak.cli import doctor as checks
from sglang_droidspeak.cli import main
from sglang_droidspeak.cli.doctor import Check, break_even_byte_s
from sglang_droidspeak.engine import probe
from sglang_droidspeak.fleet.servers import free_port
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.answers import Answers
from sglang_droidspeak.request.meta_info import KEY
from sglang_droidspeak.request.report import Labels

NEAR = {"address": FAR, "state": "ready", "reason": "", "model": ""}
LOST = {"state": "connecting", "reason": "worker closed"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search through SGLang, which takes seconds and has its own test. Files of the
    example have paths from the root."""
    monkeypatch.setattr(probe, "compare", lambda _root: ([], []))
    monkeypatch.chdir(ROOT)


def by_name(results: Any) -> dict[str, Check]:
    return {it.name: it for it in results}


def doctor(capsys: Any, *argv: str) -> tuple[int, str]:
    return main(["doctor", *argv]), capsys.readouterr().out


def test_this_installation_is_well(capsys):
    code, out = doctor(capsys)
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "ok    SGLang",
        "ok    hooks",
        "ok    plugin",
        "ok    device",
    ]


def test_what_is_wrong_is_told_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr(probe, "compare", lambda _root: ([], ["a.b has another source"]))
    monkeypatch.setattr(checks, "version", lambda name: "0.5.22")
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    code, out = doctor(capsys, "--json")
    output = {it["name"]: it for it in json.loads(out)}
    assert (code, [it["ok"] for it in output.values()]) == (1, [False] * 4)
    assert output["SGLang"]["remedy"] == "pip install sglang==0.5.23"
    assert output["hooks"]["found"].startswith("1 of ")
    assert "WRONG plugin: SGLang sees none; install" in doctor(capsys)[1]


LINKER = "unified-cache-external-linker-config"


def configured(tmp_path: Path, change: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write the example with these settings and other options of SGLang. `...` leaves an option
    out."""
    options = yaml.safe_load((ROOT / "examples/receiver.yaml").read_text())
    small = {"peers": [], "host_gb": 0.01, "staging_gb": 0.01}
    options[LINKER]["linker_extra_config"] |= small | settings
    options = {key: it for key, it in (options | (change or {})).items() if it is not ...}
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def checked(*args: Any, **settings: Any) -> dict[str, Check]:
    """Return the checks of a server with this configuration."""
    return by_name(checks.configuration(configured(*args, **settings)))


def test_a_configuration_that_would_work(tmp_path, capsys):
    address = f"tcp://127.0.0.1:{free_port()}"
    disk = {"disk_path": str(tmp_path / "a/b"), "disk_gb": 0.02}
    with serving(address):
        code, out = doctor(
            capsys, "--config", str(configured(tmp_path, peers=[address], **disk)), "--json"
        )
    output = json.loads(out)
    assert code == 0
    names = [it["name"].split()[0] for it in output[4:]]
    assert names == ["settings", "profile", "memory", "disk", "peer"]
    assert output[5]["found"].endswith("; no controls were measured")


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        ({"host_gb": 1 << 19}, "memory", "are free"),
        ({"disk_path": "/tmp/no/such/folder", "disk_gb": 1 << 19}, "disk", "are free"),
        ({"disk_path": "/proc/nope", "disk_gb": 1.0}, "disk", "/proc/nope'"),
        ({"disk_path": "/dev/null/cache", "disk_gb": 1.0}, "disk", "Not a directory"),
        ({"hots_gb": 1}, "settings", "did you mean host_gb?"),
        ({"profiles": ["no.json"]}, "settings", "no.json"),
    ],
)
def test_a_configuration_that_would_not(tmp_path, settings, name, words):
    results = checked(tmp_path, **settings)
    assert not results[name].ok and words in results[name].found and results[name].remedy
    assert [it.ok for it in results.values()].count(False) == 1


@pytest.mark.parametrize(
    ("flag", "is_well"), [("tp-size", False), ("tensor-parallel-size", False), ("port", True)]
)
def test_each_rank_takes_as_much(tmp_path, monkeypatch, flag, is_well):
    monkeypatch.setattr("profiles.environment.free_memory_bytes", lambda: 3 << 29)
    disk = {"disk_path": str(tmp_path / "disk"), "disk_gb": 1.0}
    monkeypatch.setattr(checks.psutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 29))
    results = checked(tmp_path, {flag: 2}, host_gb=0.5, staging_gb=0.5, **disk)
    assert results["memory"].ok == results["disk"].ok == is_well
    taken = 1.0 if is_well else 2.0
    assert results["memory"].found == f"{taken} GiB are taken at start, 1.5 GiB are free"
    assert results["disk"].found == f"up to {taken} GiB more are written, 1.5 GiB are free"


@pytest.mark.parametrize("folder", [".", "rank0"])
def test_what_is_on_disk_already_needs_no_more_room(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(checks.psutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 29))
    disk = tmp_path / "disk"
    Directory(disk, None).close()
    (disk / folder).mkdir(exist_ok=True)
    for name, size in (("entry-1", 1 << 30), ("another", 5 << 30)):
        with (disk / folder / name).open("wb") as file:
            file.truncate(size)
    result = checked(tmp_path, disk_path=str(disk), disk_gb=2.0)["disk"]
    assert result.ok and result.found == "up to 1.0 GiB more are written, 1.5 GiB are free"


@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_of_another_process_is_told_and_a_free_one_stays_as_it_was(tmp_path, ranks):
    disk, change = tmp_path / "a/disk", {"tp-size": ranks}
    folder = disk / "rank1" if ranks > 1 else disk
    with closing(Directory(folder, None)):
        result = checked(tmp_path, change, disk_path=str(disk), disk_gb=0.1)["disk"]
        assert not result.ok and f"process {os.getpid()} is using" in result.found and result.remedy
    files = sorted(it.relative_to(tmp_path) for it in tmp_path.rglob("*"))
    assert checked(tmp_path, change, disk_path=str(disk), disk_gb=0.1)["disk"].ok
    assert sorted(it.relative_to(tmp_path) for it in tmp_path.rglob("*")) == files
    (folder / "entry-of-ours").touch(0o644)
    folder.chmod(0o755)
    assert checked(tmp_path, change, disk_path=str(disk), disk_gb=0.1)["disk"].ok
    assert (folder / "entry-of-ours").stat().st_mode & 0o777 == 0o644
    shutil.rmtree(tmp_path / "a")
    disk.mkdir(0o755, parents=True)
    assert checked(tmp_path, change, disk_path=str(disk), disk_gb=0.1)["disk"].ok
    assert not list(disk.iterdir()) and disk.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("is_enabled", [True, False])
def test_adapters_are_enabled_in_the_file(tmp_path, is_enabled):
    """If the file enables adapters, their profiles count as this server's, as at the server's
    start."""
    change = {"model-path": "examples/pairs/weights/foundation", "enable-lora": is_enabled}
    profiles = ["examples/pairs/sender_lora_to_receiver_lora.json"]
    assert checked(tmp_path, change, profiles=profiles)["settings"].ok == is_enabled


def test_a_peer_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE_S", 0.1)
    address = f"tcp://127.0.0.1:{free_port()}"
    peers = [address, "dns://:secret@127.0.0.1:1"]
    results = checked(tmp_path, peers=peers)
    assert results["peer dns://127.0.0.1:1"].ok
    assert not results[f"peer {address}"].ok
    assert "no worker answered" in results[f"peer {address}"].found


def test_what_sglang_takes_in_another_form(tmp_path):
    options = yaml.safe_load(configured(tmp_path).read_text())
    change = {
        "model": options["model-path"],
        "model-path": ...,
        LINKER: json.dumps(options[LINKER]),
    }
    assert checked(tmp_path, change)["settings"].ok
    (result,) = checked(tmp_path, change | {"model": ...}).values()
    assert result.found == "there is no model-path; add it"


def test_a_file_of_another_server(tmp_path):
    (tmp_path / "server.yaml").write_text("model-path: m\n")
    (results,) = checks.configuration(tmp_path / "server.yaml")
    assert "does not configure droidspeak" in results.found
    (tmp_path / "server.yaml").write_text("- model-path: x")
    (results,) = checks.configuration(tmp_path / "server.yaml")
    assert "server.yaml: Expected `object`, got `array`" in results.found


@pytest.mark.parametrize(
    ("page_size", "words"),
    [
        (..., ""),
        (1, "page_size is 1: "),
        (8, "page_size is 8: .*--page-size 16"),
        (None, "--page-size: invalid int value"),
        ("16", ""),
    ],
)
def test_pages_of_a_file(tmp_path, page_size, words):
    results = checked(tmp_path, {"page-size": page_size})["settings"]
    assert results.ok != bool(words) and re.search(words, results.found)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable-unified-cache-external-linker", ..., "no enable-.*-linker: true, and SGLang"),
        ("enable-unified-cache-external-linker", False, "no enable-.*-linker: true, and SGLang"),
        ("unified-cache-external-linker-backend", ..., 'no unified-.*-backend: "dynamic", and'),
        ("unified-cache-external-linker-backend", "mooncake", 'no unified-.*-backend: "dynamic"'),
    ],
)
def test_a_file_with_which_droidspeak_would_be_off(tmp_path, name, value, words):
    (results,) = checked(tmp_path, {name: value}).values()
    assert not results.ok and re.search(words, results.found) and results.remedy


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("DroidSpeakLinker", "DroidSpeakLinkr", "linker is DroidSpeakLinkr; did you mean"),
        ("droidspeak.linker", "droidspeek.linker", "did you mean sglang_droidspeak.linker?"),
        ("linker_module_path", "linker_modul_path", "linker_modul_path; did you mean linker_mod"),
        ("linker_extra_config", "linker_extra_cfg", "did you mean linker_extra_config?"),
        ("linker-config:", "linker-confg:", "linker-confg, which .* did you mean unified-cache"),
        ("page-size", "page-sise", "page-sise, which SGLang does not know; did you mean page-size"),
    ],
)
def test_a_mistyped_name_is_told_with_the_right_one(tmp_path, old, new, words):
    path = configured(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    (results,) = checks.configuration(path)
    assert not results.ok and re.search(words, results.found), results


def state(cache: Any, profiles: Any = PROFILES, *, off: str = "", **planner: Any) -> dict[str, Any]:
    """Return a server's response about this cache."""
    asked, _ = planned(**planner)
    asked.profiles, asked.off = profiles, off
    asked.failed = frozenset(pair for pair, it in profiles.items() if not it.is_usable)
    output = SimpleNamespace(internal_state={"model_path": "m"})
    labels: Any = Labels(Metrics(enabled=False), cache.names)
    answers = Answers(cache, asked, labels, {}, PAGE, None)  # type: ignore[arg-type]
    answers.add(output, SimpleNamespace(), SimpleNamespace(rid=None))  # type: ignore[arg-type]
    return output.internal_state


def say(info: SimpleNamespace, *args: Any, **response: Any) -> None:
    """Answer as a server with an empty cache does."""
    with Cache(FAMILY, CacheConfig(serves=False, host_bytes=1 << 20)) as cache:
        info.internal_state = state(cache, *args, **response)


def test_a_running_server(info, capsys):
    address = f"tcp://127.0.0.1:{free_port()}"
    with Cache(FAMILY, CacheConfig(peers=(address,), serves=False, host_bytes=1 << 20)) as cache:
        info.internal_state = state(cache)
        code, out = doctor(capsys, "--url", info.url)
        assert code == 1
        assert f"WRONG peer {address}: connecting" in out
        with serving(address):
            assert cache.wait_ready(20)
            info.internal_state = state(cache)
            code, out = doctor(capsys, "--url", info.url)
    lines = out.splitlines()[4:]
    assert [line.split(":")[0].split()[1] for line in lines] == [
        *("http", "backends", "clock", "memory,", "peer", "profile", "break-even")
    ]
    assert code == 0, out


def test_firewall_before_the_data_port_is_one_line(info):
    """The handshake passes, but everything that is sent to the data port is lost."""
    address, over = Location(f"tcp://127.0.0.1:{free_port()}"), threading.Event()
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(address, seed=1))
        stack.callback(over.set)  # Before the proxy waits for its threads.
        stack.enter_context(serving(address))

        def swallow() -> None:
            proxy.arm(first)
            over.wait()

        first = Deed(act=swallow, towards=Towards.WORKER, index=0, via=Via.DATA)
        proxy.arm(first)
        peer = PeerConfig(connect_s=0.5)
        config = CacheConfig(peers=(proxy.address,), peer=peer, serves=False, host_bytes=1 << 20)
        cache = stack.enter_context(Cache(FAMILY, config))
        until_s = time.monotonic() + 60
        while "bulk_port" not in str(info.internal_state):
            assert time.monotonic() < until_s
            time.sleep(0.01)
            info.internal_state = state(cache)
        (wrong,) = [it for it in checks.running(info.url, None) if not it.ok]
    assert wrong.name == f"peer {proxy.address}" and wrong.remedy
    assert re.search(r"was silent for .* at bulk_port \d+ of 127", wrong.found), wrong.found


def test_the_speed_of_a_link_is_the_one_that_was_measured(monkeypatch):
    """A plan already expects an unused link to be faster. A person sees the measured speed."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with Cache(FAMILY, CacheConfig(peers=(address,), serves=False, host_bytes=1 << 20)) as cache:
        status = cache.status()
        monkeypatch.setattr(cache, "link", lambda _location: Link(byte_s=1e-12))
        assert state(cache)[KEY]["links"] == {}
        peers = tuple(structs.replace(it, bytes_per_s=1e8) for it in status.peers)
        monkeypatch.setattr(cache, "status", lambda: structs.replace(status, peers=peers))
        assert state(cache)[KEY]["links"] == {address: 1e8}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"health": {"live": True, "degraded": ["the disk is full"]}}, "memory, disk", "full"),
        ({"health": {"live": False, "degraded": []}}, "memory, disk", "stuck"),
        ({"peers": [NEAR], "links": {FAR: 1.0}}, f"link {FAR}", "1e-09 GB/s, break-even"),
        ({"peers": [NEAR | LOST]}, f"peer {FAR}", "connecting: worker closed"),
    ],
)
def test_a_running_server_that_is_not_well(info, change, name, words):
    say(info)
    info.internal_state[KEY] |= change
    results = by_name(checks.running(info.url, None))
    assert words in results[name].found and results[name].remedy
    assert [it.ok for it in results.values()].count(False) == 1


@pytest.mark.parametrize(("ahead_s", "is_well"), [(-60, False), (0, True), (60, False)])
def test_a_clock_that_is_wrong(info, monkeypatch, ahead_s, is_well):
    say(info)
    real_s = asking.time.time
    monkeypatch.setattr(asking, "time", SimpleNamespace(time=lambda: real_s() - ahead_s))
    results = by_name(checks.running(info.url, None))["clock"]
    assert results.ok == is_well
    assert is_well or results.found[0] == ("+" if ahead_s > 0 else "-")


def test_clock_that_is_off_by_less_than_a_second_is_well(info, monkeypatch):
    say(info)
    monkeypatch.setattr(checks, "state_of", lambda *_: (info.internal_state, -0.4))
    assert by_name(checks.running(info.url, None))["clock"].found == "well"


def test_break_even_of_a_slow_link_is_not_zero():
    slow = {"num_tokens": 16, "full_prefill_s": 1.0, "recompute_s": 0.0}
    (link,) = checks._links({}, [slow | {"e_bytes": 0, "kv_bytes": 2000}])
    assert link.found.startswith("break-even 2e-06 GB/s for 16 tokens")


def test_a_profile_that_failed_and_keys_that_are_missing(info):
    say(info, index_profiles([FAILED]))
    extra = {"listen": "tcp://0.0.0.0:1", "insecure": True}
    info.internal_state["unified_cache_external_linker_config"] = {"linker_extra_config": extra}
    results = by_name(checks.running(info.url, None))
    assert [name.split()[0] for name, it in results.items() if not it.ok] == ["keys"]
    (noted,) = [it for name, it in results.items() if name.startswith("profile")]
    assert "not used, as it did not pass its gate" in noted.found
    (pair,) = info.internal_state[KEY]["pairs"]
    peer = {"address": "tcp://x:1", "state": "ready", "model": pair["sender"], "reason": ""}
    info.internal_state[KEY]["peers"] = [peer]
    results = by_name(checks.running(info.url, None))
    wrong = [name.split()[0] for name, it in results.items() if not it.ok]
    assert wrong == ["keys", "profile"], "a peer has the sender of the pair"
    info.internal_state[KEY]["pairs"] = []
    assert by_name(checks.running(info.url, None))["profiles"].ok
    (nobody,) = checks.running(f"http://127.0.0.1:{free_port()}", None)
    assert not nobody.ok


def test_a_server_whose_settings_are_in_a_file_of_its_own_machine(info):
    say(info)
    extra = {"config": "/there/droidspeak.yaml"}
    info.internal_state["unified_cache_external_linker_config"] = {"linker_extra_config": extra}
    results = by_name(checks.running(info.url, None))
    (wrong,) = [it for it in results.values() if not it.ok]
    assert wrong.name == "backends, keys" and "/there/droidspeak.yaml" in wrong.found
    assert wrong.remedy and {"clock", "memory, disk"} <= results.keys()


def test_no_pair_is_usable_while_the_weights_are_unknown(info):
    say(info, off="weights_updated")
    wrong = {name: it for name, it in by_name(checks.running(info.url, None)).items() if not it.ok}
    assert [*wrong] == ["server"], "once, however many profiles there are"
    assert "not known what an update has written" in wrong["server"].found


def test_at_break_even_reuse_takes_as_long_as_a_full_prefill():
    planner, decision = planned(num_pages=128, staging_gb=2.0)
    price = msgspec.to_builtins(planner.price(decision.plan))
    least = break_even_byte_s(price)
    assert least is not None
    costs = replace(MEASURED, links=links({FAR: least}))
    reuse_s = times_of(decision.plan, PAGE, costs).ttft_s
    assert reuse_s == pytest.approx(full_prefill_s(Span(0, 128 * PAGE), costs.prefill))
    assert break_even_byte_s(price | {"recompute_s": None}) is None
    assert break_even_byte_s(price | {"recompute_s": 1e9}) == float("inf")


WEIGHTS = ROOT / "examples/pairs/weights"


def changed_adapter(tmp_path: Path, layers: range = range(12), **settings: Any) -> Path:
    """The shipped slim adapter on these layers only, with other settings in its config."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    factors = load_file(WEIGHTS / "slim_lora/adapter_model.safetensors")
    touched = {name: it for name, it in factors.items() if int(name.split(".")[4]) in layers}
    save_file(touched, folder / "adapter_model.safetensors")
    stated = json.loads((WEIGHTS / "slim_lora/adapter_config.json").read_text())
    named = {"base_model_name_or_path": str(WEIGHTS / "foundation")}
    (folder / "adapter_config.json").write_text(json.dumps({**stated, **named, **settings}))
    return folder


def test_an_adapter_on_all_layers_shares_nothing_exactly(capsys):
    code, out = doctor(capsys, "--adapter", str(WEIGHTS / "slim_lora"))
    assert code == 1
    assert "acts on whole prompts" in out and "changes q_proj, v_proj from layer 0 on" in out
    (wrong,) = re.findall(r"(?m)^WRONG (.*)", out)
    assert wrong.startswith("shares exactly: no: it changes KV from token 0 and layer 0 on")
    assert all(it in wrong for it in ("droidspeak distill", "upper layers", "droidspeak profile"))


def test_an_adapter_on_upper_layers_shares_those_below(tmp_path, capsys):
    folder = str(changed_adapter(tmp_path, range(9, 12)))
    code, out = doctor(capsys, "--adapter", folder)
    assert code == 0
    assert "shares exactly: yes: layers below 9 of 12; from layer 9 on all are recomputed" in out


def test_an_activated_adapter_shares_all_before_its_invocation(tmp_path, capsys):
    folder = changed_adapter(tmp_path, alora_invocation_tokens=[4, 6])
    code, out = doctor(capsys, "--adapter", str(folder))
    assert code == 0
    assert "acts from its invocation on, tokens [4, 6]" in out
    assert "shares exactly: yes: all layers of what comes before the invocation" in out
    assert "--lora-target-modules q_proj v_proj" in out


def test_keys_that_sglang_ignores_are_wrong(tmp_path, capsys):
    folder = changed_adapter(tmp_path, alora_invocation_tokens=[4], use_rslora=True)
    code, out = doctor(capsys, "--adapter", str(folder))
    assert code == 1 and "WRONG config: SGLang ignores use_rslora; merge" in out


def test_a_base_that_is_not_here_is_asked_for(tmp_path, capsys):
    named = {"base_model_name_or_path": "somebody/model"}
    folder = str(changed_adapter(tmp_path, range(9, 12), **named))
    assert "base: is not here; give --model" in doctor(capsys, "--adapter", folder)[1]
    output = doctor(capsys, "--adapter", folder, "--model", str(WEIGHTS / "foundation"))[1]
    assert "layers below 9 of 12" in output


@pytest.mark.parametrize(
    ("settings", "base", "words"),
    [
        ({}, "slim_lora", "no model.safetensors.index.json"),
        ({"alora_invocation_tokens": [4, 512]}, "foundation", r"tokens \[512\], .*of 512: no"),
        ({"alora_invocation_tokens": 4}, "foundation", "a list of token ids is needed"),
        ({"peft_type": "IA3"}, "foundation", "peft_type = 'IA3'"),
    ],
)
def test_a_folder_that_is_no_adapter_of_a_base_is_one_line(tmp_path, capsys, settings, base, words):
    folder = str(changed_adapter(tmp_path, **settings))
    assert main(["doctor", "--adapter", folder, "--model", str(WEIGHTS / base)]) != 0
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and re.search(words, output.err)


def test_an_adapter_of_another_base_is_one_line(tmp_path, capsys):
    write(tmp_path / "another")
    folder = str(changed_adapter(tmp_path))
    assert main(["doctor", "--adapter", folder, "--model", str(tmp_path / "another")]) != 0
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "give the base that it was trained on" in output.err
    assert main(["doctor", "--adapter", str(tmp_path / "nothing")]) != 0
    assert capsys.readouterr().err.count("\n") == 1
