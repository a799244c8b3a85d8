"""Questions and orders of an operator to a worker, over the same connection as its peers."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
import time
from collections.abc import Callable
from subprocess import PIPE, Popen

import msgspec
import pytest
from disk_parts import files_bytes
from kept_parts import PAGE_TOTAL, cache_of
from security_parts import new_party
from transport_parts import (
    E_LAYER,
    FAMILY,
    MODEL,
    PARTS,
    ask_status,
    eventually,
    new_tree,
    pages_of,
    store,
    worker_of,
)

from cachetree import Cache, ConfigError, Deadline, OrderDenied, PageHash, WorkerConfig
from cachetree.cli import main, status_of
from cachetree.cli.serve import parse_config, read_config
from cachetree.transport import ask, verbs
from cachetree.transport.admin import AdminService
from cachetree.tree.hashing import page_hashes

PAGES = pages_of(64)
OTHER = [*PAGES[:32], *pages_of(32, "other")]
OBEYS = WorkerConfig(admin=())

Run = Callable[..., dict[str, object]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that has to succeed, and return its JSON output."""

    def run(*argv: object) -> dict[str, object]:
        assert main([*map(str, argv), "--json", "--timeout", "5"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def hexes(pages: list[PageHash]) -> list[str]:
    return [page.hex() for page in pages]


def test_match_says_who_has_how_much(run, tmp_path):
    tokens = list(range(100))
    pages = page_hashes(tokens, 16)
    salted = page_hashes(tokens, 16, bytes(32))
    file = tmp_path / "tokens"
    file.write_text(" ".join(map(str, tokens)))
    holding = {"model": MODEL, "location": "local", "num_pages": 4, "e_pages": {str(E_LAYER): 4}}
    with cache_of() as cache:
        store(cache.tree, pages[:4])
        assert run("match", cache.address, "--pages", *hexes(pages))["holdings"] == [holding]
        options = ("--tokens", file, "--page-size", 16)
        assert run("match", cache.address, *options)["holdings"] == [holding]
        assert run("match", cache.address, *options, "--salt", "00" * 32)["holdings"] == []
        store(cache.tree, salted)
        (holding,) = run("match", cache.address, *options, "--salt", "00" * 32)["holdings"]  # type: ignore[misc]
        assert holding["num_pages"] == 6


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command, and return its output for a person."""
    assert main([*map(str, argv), "--timeout", "5"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_people_are_told_in_words(capsys):
    with socket.socket() as deaf, cache_of() as other:
        deaf.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        model = WorkerConfig(model="m\aya")
        with cache_of(peers=(other.address, nobody), worker=model) as cache:
            store(cache.tree, PAGES)
            eventually(lambda: cache.status().peers[0].state == "ready")
            eventually(lambda: cache.status().peers[1].error)
            text = said(capsys, "status", cache.address)
            output = said(capsys, "match", cache.address, "--pages", *hexes(PAGES))
            nothing = said(capsys, "match", cache.address, "--pages", "00" * 16)
    assert [line.split() for line in output.splitlines()] == [
        ["holdings"],
        ["model", "location", "num_pages", "e_pages"],
        [MODEL, "local", "64", f"{E_LAYER}:64"],
    ]
    assert nothing.split() == ["holdings", "none"]
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    for line in (
        ["model", "m ya"],
        ["pages", "64"],
        ["bytes", "640.0 KiB"],
        ["host bytes", "64.0 MiB"],
        ["pages by model"],
        [MODEL, "64"],
        ["failed handshakes", "0"],
        ["architecture", "LlamaForCausalLM"],
        ["disk", "none"],
        ["reads from"],
        ["address", "state", "reason", "model"],
        [other.address, "ready", "none", "none"],
        [
            nobody,
            "connecting",
            f"worker {nobody} closed the connection or cannot be reached",
            "none",
        ],
    ):
        assert line in lines, text
    assert not set("[]()='").intersection(text)


def test_reader_that_closes_the_pipe_early_is_no_error():
    """An example is `cachetree status | head -1`."""
    with (
        cache_of() as cache,
        Popen(
            [sys.executable, "-m", "cachetree.cli", "status", str(cache.address)],
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        ) as command,
    ):
        command.stdout.close()
        assert command.stderr.read() == ""
        assert command.wait() == 0


def test_interrupted_command_is_one_line(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert status_of("cachetree", interrupted) == 130
    assert capsys.readouterr().err == "cachetree: interrupted\n"


def test_a_command_says_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"cachetree \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_pin_of_what_is_not_there_is_no_success(capsys):
    with cache_of(worker=OBEYS) as cache:
        store(cache.tree, PAGES)
        for unknown in (["--pages", "00" * 16], ["--pages", *hexes(PAGES), "--model", "another"]):
            assert main(["pin", str(cache.address), *unknown, "--timeout", "5"]) == 1
            assert "nothing is pinned" in capsys.readouterr().err


def test_evict_takes_what_begins_so_and_what_nothing_else_stands_on(run):
    with cache_of(worker=OBEYS) as cache:
        store(cache.tree, PAGES)
        store(cache.tree, OTHER)
        answer = run("evict", cache.address, "--pages", *hexes(PAGES[:40]))
        assert answer["num_bytes"] == 32 * PAGE_TOTAL
        assert [match.num_pages for match in cache.match(PAGES)] == [32]
        assert [match.num_pages for match in cache.match(OTHER)] == [64]
        answer = run("evict", cache.address, "--pages", *hexes(OTHER))
        assert (answer["num_bytes"], cache.tree.num_bytes) == (64 * PAGE_TOTAL, 0)


def test_evict_knows_models_and_everything_that_nobody_reads(run):
    with cache_of(worker=OBEYS) as cache:
        store(cache.tree, PAGES)
        assert run("evict", cache.address, "--model", "another")["num_bytes"] == 0
        assert run("evict", cache.address, "--model", MODEL)["num_bytes"] == 64 * PAGE_TOTAL
        store(cache.tree, PAGES)
        lease = cache.tree.lease(MODEL, PAGES, "test", Deadline.after(5), PARTS)
        with lease:
            assert run("evict", cache.address, "--all")["num_bytes"] == 0, "it is read"
        assert run("evict", cache.address, "--all")["num_bytes"] == 64 * PAGE_TOTAL
        assert not cache.match(PAGES)


def test_evict_reaches_the_disk_too(run, tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}

    def on_disk(cache: Cache) -> int:
        status = cache.status().disk
        return status.num_pages

    with cache_of(worker=OBEYS, **disk) as cache:
        store(cache.tree, PAGES)
        store(cache.tree, OTHER)
        # Two files of KV, two of E.
        eventually(lambda: cache.status().disk.num_entries == 4 and not cache.status().held_bytes)
        assert on_disk(cache) == 96
        freed = run("evict", cache.address, "--pages", *hexes(OTHER))["num_disk_bytes"]
        assert freed >= 32 * PAGE_TOTAL  # type: ignore[operator]
        assert on_disk(cache) == 64
        assert [match.num_pages for match in cache.match(PAGES)] == [64, 64]
        run("evict", cache.address, "--all")
        assert on_disk(cache) == 0
        assert not cache.match(PAGES)
    assert files_bytes(tmp_path) < 8 << 20


def test_a_pin_keeps_a_prefix_for_a_while(run):
    with cache_of(worker=OBEYS) as cache:
        store(cache.tree, PAGES)
        prefix = ("--pages", *hexes(PAGES[:16]))
        assert run("pin", cache.address, *prefix)["pages_by_model"] == {MODEL: 16}
        status = run("status", cache.address)
        assert status["held_bytes"] == status["num_pinned_bytes"] == 16 * PAGE_TOTAL
        cache.tree.evict()
        assert [match.num_pages for match in cache.match(PAGES)] == [16]
        assert run("unpin", cache.address, *prefix)["was_pinned"] is True
        status = run("status", cache.address)
        assert status["held_bytes"] == status["num_pinned_bytes"] == 0
        assert run("unpin", cache.address, *prefix)["was_pinned"] is False
        run("pin", cache.address, *prefix, "--ttl", "0.01", "--model", MODEL)

        def is_gone() -> bool:
            cache.tree.sweep()
            cache.tree.evict()
            return not cache.match(PAGES)

        eventually(is_gone)


def test_a_worker_with_keys_obeys_its_administrators_alone(tmp_path, run):
    us, reader, admin, stranger = (
        new_party(tmp_path, name) for name in ("us", "reader", "admin", "stranger")
    )
    tree = new_tree(PAGES)
    settings = {**us.serving(reader), "admin": (admin.pair.public,)}
    with worker_of(tree, **settings) as worker:

        def as_(party: object) -> list[str]:
            return ["--key-file", party.key_file, "--server-key", us.public_file]  # type: ignore[attr-defined]

        assert run("match", worker.address, *as_(reader), "--pages", *hexes(PAGES))["holdings"]
        assert main(["evict", worker.address, *as_(reader), "--all", "--timeout", "5"]) == 1
        assert tree.num_bytes
        assert main(["evict", worker.address, *as_(stranger), "--all", "--timeout", "2"]) == 1
        assert tree.num_bytes
        freed = run("evict", worker.address, *as_(admin), "--all")["num_bytes"]
        assert freed == 64 * PAGE_TOTAL


def test_an_engines_worker_takes_no_orders(capsys):
    with cache_of() as cache:
        store(cache.tree, PAGES)
        for argv in (
            ["evict", cache.address, "--all"],
            ["pin", cache.address, "--pages", PAGES[0].hex()],
            ["unpin", cache.address, "--pages", PAGES[0].hex()],
        ):
            assert main(argv) == 1  # type: ignore[arg-type]
            assert "takes no orders" in capsys.readouterr().err
        assert cache.tree.num_pages == 64


def test_without_keys_only_a_loopback_worker_obeys():
    tree = new_tree(PAGES)
    listen = "tcp://0.0.0.0:0"
    with worker_of(tree, listen=listen, insecure=True, admin=()) as worker:
        port = worker.address.rpartition(":")[2]
        with pytest.raises(Exception, match="takes no orders"):
            ask(
                f"tcp://127.0.0.1:{port}",
                verbs.Evict(model="", pages=b""),
                verbs.Evicted,
                timeout_s=5,
            )
    assert tree.num_pages == 64
    with pytest.raises(ConfigError, match="admin lists keys"):
        WorkerConfig(admin=("ctpub-" + "0" * 64,))


def test_a_served_worker_obeys_unless_told_otherwise(tmp_path):
    file = tmp_path / "serve.yaml"
    content: dict[str, object] = {"family": msgspec.to_builtins(FAMILY)}
    file.write_text(json.dumps(content))
    worker = read_config(file).cache.worker
    assert worker.admin == ()
    content["cache"] = {"worker": {"admin": None}}
    file.write_text(json.dumps(content))
    assert read_config(file).cache.worker.admin is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 0}, "`int` >= 1 - at `$.family.num_layers`"),
        ({"hidden_size": -2}, "`int` >= 1 - at `$.family.hidden_size`"),
        ({"num_kv_heads": 0}, "`int` >= 1 - at `$.family.num_kv_heads`"),
        ({"head_dim": -4}, "`int` >= 1 - at `$.family.head_dim`"),
        ({"page_size": 0}, "`int` >= 1 - at `$.family.page_size`"),
        ({"tp_size": 0}, "`int` >= 1 - at `$.family.tp_size`"),
        ({"tp_rank": -1}, "`int` >= 0 - at `$.family.tp_rank`"),
        ({"tp_size": 2, "tp_rank": 2}, "family.tp_rank is 2; give at most 1"),
        ({"kv_dtype": "float8"}, "family.kv_dtype is 'float8'; give float32 or "),
        ({"model_dtype": "half"}, "family.model_dtype is 'half'; give float32 or "),
    ],
)
def test_a_family_that_cannot_be_is_refused(changed, said):
    content = {"family": {**msgspec.structs.asdict(FAMILY), **changed}}
    with pytest.raises(ConfigError, match=f"^file: .*{re.escape(said)}"):
        parse_config(content, "file")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["evict"], "say what to evict"),
        (["evict", "--all", "--model", "m"], "not both"),
        (["match"], "either by --pages, or by --tokens"),
        (["match", "--pages", "xy"], "32 hex digits"),
        (["match", "--tokens", "/nowhere", "--page-size", "16"], "cannot be read"),
        (["match", "--tokens", "/nowhere"], "--tokens needs --page-size"),
        (["match", "--tokens", "/", "--page-size", "16", "--salt", "abcd"], "--salt has 4 digits"),
        (["pin", "--pages", "00" * 16, "--ttl", "-1"], "above 0"),
    ],
)
def test_bad_words_are_one_clear_line(argv, named, capsys):
    with cache_of(worker=OBEYS) as cache:
        assert cache.address
        assert main([argv[0], cache.address, *argv[1:]]) == 1
        assert named in capsys.readouterr().err


@pytest.mark.parametrize("number", ["nan", "inf", "0", "-1"])
def test_a_number_that_means_nothing_is_refused_by_name(number, capsys):
    """A deadline of NaN never ends, and a wait for it never pauses."""
    with pytest.raises(SystemExit):
        main(["ping", "tcp://127.0.0.1:1", f"--timeout={number}"])
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.endswith(f"argument --timeout: {number} is no finite number above 0")


def test_questions_of_one_turn_are_counted_out_once():
    """The state of the worker is computed once a turn, because anyone may ask as often as they
    like."""
    numbers, answers = itertools.count(), []
    service = AdminService(new_tree(), None, numbers.__next__, time.monotonic)  # type: ignore[arg-type]
    for _ in range(2):
        for _ in range(3):
            service.serve(verbs.StatusRequest(), answers.append, is_admin=False)
        service.go_on()
    assert answers == [0, 0, 0, 1, 1, 1]


def test_an_order_with_half_a_page_is_refused():
    with worker_of(new_tree(), admin=()) as worker:
        with pytest.raises(OrderDenied, match="whole number"):
            order = verbs.Evict(model="", pages=b"half")
            ask(worker.address, order, verbs.Evicted, timeout_s=5)
        assert ask_status(worker.address, timeout_s=5).num_protocol_errors == 0


def test_missing_worker_is_one_clear_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        for verb in (["match", "--pages", "00" * 16], ["evict", "--all"]):
            assert main([verb[0], address, *verb[1:], "--timeout", "0.2"]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert "no worker answered" in line
            assert ("may still do it" in line) == (verb[0] == "evict")
