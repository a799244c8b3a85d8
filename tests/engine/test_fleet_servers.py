"""The example's fleet, each process with a network of its own, with keys; one is cut off."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_parts import ENV, Answer, answer, eventually
from namespaces import Namespaces
from security_parts import Party, new_party
from shipped import prompt_of
from transport_parts import ask_status

from cachetree.transport import Credentials, credentials_of
from profiles.data.records import read_records
from sglang_droidspeak.fleet.fleet import read_fleet, specs
from sglang_droidspeak.fleet.servers import Process, Server, ServerSpec, WorkerSpec, running

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 4.0
MARGIN_S = 6.0
"""Seconds for full prefills of seven processes on two cores."""
DATA = ROOT / "examples" / "pairs" / "data" / "held_out.jsonl"
QUESTIONS = [prompt_of(record) for record in read_records(DATA)[::3]]
"""Questions, one about each document."""


@dataclass(frozen=True)
class Cluster:
    network: Namespaces
    processes: Mapping[str, Process]
    addresses: Mapping[str, str]
    """Addresses of workers, and of engines that listen, by name."""
    parties: Mapping[str, Party]

    def server(self, name: str) -> Server:
        process = self.processes[name]
        assert isinstance(process, Server)
        return process

    def credentials(self, worker: str) -> Credentials:
        return credentials_of(self.parties["answerer"].key_file, self.parties[worker].pair.public)

    def num_pages(self, worker: str) -> int:
        return ask_status(
            self.addresses[worker], timeout_s=10, credentials=self.credentials(worker)
        ).num_pages

    def read(self, name: str, text: str, *workers: str) -> None:
        """Have an engine read a text. Wait until the workers have it."""
        before = {worker: self.num_pages(worker) for worker in workers}
        self.server(name).generate(text, max_new_tokens=1)
        for worker in workers:
            eventually(lambda worker=worker: self.num_pages(worker) > before[worker], 60)

    def ask(self, name: str, text: str, **controls: Any) -> Answer:
        server = self.server(name)
        server.flush()
        return answer(server, text, max_new_tokens=6, droidspeak=controls)


@dataclass(frozen=True, kw_only=True)
class WorkerElsewhere(WorkerSpec):
    wrapper: tuple[str, ...]
    """Words before a command that run it in the network."""

    def words(self, folder: Path) -> Sequence[str]:
        return (*self.wrapper, *super().words(folder))


@dataclass(frozen=True, kw_only=True)
class ServerElsewhere(ServerSpec):
    wrapper: tuple[str, ...]

    def words(self, folder: Path) -> Sequence[str]:
        return (*self.wrapper, *super().words(folder))


def networked(network, folder):
    """Return the example's specifications. Every process runs on another machine, and has keys."""
    fleet = read_fleet(ROOT / "examples" / "fleet.yaml")
    parties = {name: new_party(folder / "keys", name) for name in network.names}
    shown = {name: it["cache"]["worker"]["listen"] for name, it in fleet.workers.items()}
    engines = {name: it["droidspeak"].get("listen") for name, it in fleet.engines.items()}
    moved = {
        listen: (name, listen.replace("127.0.0.1", network.address(name)))
        for name, listen in (shown | engines).items()
        if listen is not None
    }

    def reached(addresses: Sequence[str]) -> dict[str, str]:
        """Return the workers' addresses in the network, with the public key of each."""
        links = (moved[it] for it in addresses)
        return {address: parties[name].pair.public for name, address in links}

    everyone = [party.pair.public for party in parties.values()]
    networks = []
    for spec in specs(fleet, {"device": "cpu"}):
        wrapper = network.command(spec.name)
        own = parties[spec.name]
        if isinstance(spec, WorkerSpec):
            cache = dict(spec.config["cache"])
            _, listen = moved[cache["worker"]["listen"]]
            cache["worker"] = {
                "listen": listen,
                "key_file": own.key_file,
                "allowed_peers": everyone,
            }
            cache["peer_keys"] = reached(cache["keeps"])
            cache["keeps"] = list(cache["peer_keys"])
            cache["peer"] = {"key_file": own.key_file}
            changed = {"config": {**spec.config, "cache": cache}}
            networks.append(WorkerElsewhere(**vars(spec) | changed, wrapper=wrapper))
            continue
        assert isinstance(spec, ServerSpec)
        settings = dict(spec.droidspeak)
        peer_keys = reached(settings["peers"])
        settings["peers"] = list(peer_keys)
        if "listen" in settings:
            settings["listen"] = moved[settings["listen"]][1]
            settings["allowed_peers"] = everyone
        else:
            settings["host_gb"] = 0  # What it computed itself would be nearer than any worker.
        settings |= {
            "key_file": own.key_file,
            "peer_keys": peer_keys,
            "fetch_deadline_s": DEADLINE_S,
        }
        changed = {"host": network.address(spec.name), "droidspeak": settings}
        networks.append(ServerElsewhere(**vars(spec) | changed, wrapper=wrapper))
    return networks, dict(moved.values()), parties


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = read_fleet(ROOT / "examples" / "fleet.yaml")
    with (
        Namespaces([*fleet.workers, *fleet.engines]) as network,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        monkeypatch.chdir(ROOT)
        wanted, addresses, parties = networked(network, folder)
        with running(*wanted, folder=folder / "logs", env=ENV) as processes:
            named = {process.name: process for process in processes}
            yield Cluster(network, named, addresses, parties)


def test_each_family_shares_and_neither_meets_the_other(cluster):
    cluster.read("reader", QUESTIONS[0], "shelf-one", "shelf-two")
    cluster.read("reader-fp32", QUESTIONS[1], "shelf-fp32")
    for name, own, others in (
        ("answerer", QUESTIONS[0], QUESTIONS[1]),
        ("answerer-fp32", QUESTIONS[1], QUESTIONS[0]),
    ):
        reply = eventually(lambda: is_reused(it := cluster.ask(name, own)) and it)  # noqa: B023
        assert reply.provenance["block"] == [2, 5]
        assert cluster.ask(name, others).provenance["outcome"] == "no_match"


def is_reused(reply: Answer) -> bool:
    return reply.provenance["outcome"] == "reused"


def test_one_worker_is_cut_off_and_comes_back(cluster):
    text = QUESTIONS[2]
    cluster.read("reader", text, "shelf-one", "shelf-two")
    with_both = eventually(lambda: is_reused(it := cluster.ask("answerer", text)) and it)
    begun_at_s = time.monotonic()
    cluster.ask("answerer", text, mode="off")
    alone_s = time.monotonic() - begun_at_s
    cluster.network.cut("shelf-one")
    try:
        used = set()
        ends_at_s = time.monotonic() + 20
        while time.monotonic() < ends_at_s:
            begun_at_s = time.monotonic()
            reply = cluster.ask("answerer", text)
            assert time.monotonic() - begun_at_s < alone_s + DEADLINE_S + MARGIN_S
            if is_reused(reply):
                assert reply.ids == with_both.ids
                used.add(reply.provenance["location"])
        assert reply.provenance["location"] == cluster.addresses["shelf-two"], used
        # What is read meanwhile reaches the other worker, and nobody waits for this one.
        cluster.read("reader", QUESTIONS[3], "shelf-two")
        other = eventually(lambda: is_reused(it := cluster.ask("answerer", QUESTIONS[3])) and it)
        assert other.provenance["location"] == cluster.addresses["shelf-two"]
    finally:
        cluster.network.join("shelf-one")
    # Back again: with the other one away it alone has the prefix.
    cluster.network.cut("shelf-two")
    try:
        again = eventually(
            lambda: (
                (it := cluster.ask("answerer", text)).provenance["location"]
                == cluster.addresses["shelf-one"]
                and it
            ),
            120,
        )
        assert again.ids == with_both.ids
    finally:
        cluster.network.join("shelf-two")


def test_a_reader_that_is_killed_leaves_what_it_read(cluster):
    text = QUESTIONS[4]
    cluster.read("reader", text, "shelf-one", "shelf-two")
    cluster.server("reader").kill()
    assert eventually(lambda: is_reused(it := cluster.ask("answerer", text)) and it, 60)
