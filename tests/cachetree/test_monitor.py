"""Metrics and health of a cache, as a monitor sees them."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from disk_parts import files_bytes
from fault_proxy import Fault, FaultProxy, Strike, Towards, Via
from kept_parts import PAGE_TOTAL, cache_of, fetched, reader_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serve_parts import serving
from test_security_settings import has_ipv6
from transport_parts import E_LAYER, FAST, MODEL, PAGE_BYTES, PARTS, eventually, pages_of, store

from cachetree import LOCAL, Cache, CacheStatus, CacheTree, ConfigError, Deadline, ModelId
from cachetree.metrics import METRICS, StatusCollector, StatusPage, health_of, http
from cachetree.transport import parse_http

PAGES = pages_of(64)
MOST_THREADS = 32


def scraped(cache: Cache) -> dict[tuple[str, ...], float]:
    """Return a scrape: values by (name, label values...)."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(cache.status))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextlib.contextmanager
def page_of(cache: Cache) -> Iterator[StatusPage]:
    with StatusPage(parse_http("0"), cache.status) as page:
        yield page


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read()


def test_the_metrics_say_what_happened(tmp_path):
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 64 << 20}
    with (
        cache_of() as engine,
        cache_of(keeps=(engine.address,), **disk) as worker,
        reader_of(worker.address) as cache,
    ):
        store(engine.tree, PAGES)
        eventually(lambda: cache.match(PAGES) and cache.match(PAGES)[0].e_pages == {E_LAYER: 64})
        fetched(cache, worker.address, PAGES)
        eventually(lambda: worker.status().disk.num_entries == 2)  # type: ignore[union-attr]
        # The receiver may have the last frame before the worker has counted it.
        eventually(lambda: worker.status().worker.num_streams == 0)  # type: ignore[union-attr]
        of_worker, of_cache = scraped(worker), scraped(cache)
    sent = 64 * 4 * PAGE_BYTES
    expected = {
        ("cachetree:bytes", "memory"): 64 * PAGE_TOTAL,
        ("cachetree:pages", "memory"): 64,
        ("cachetree:pages", "disk"): 64,
        ("cachetree:budget_bytes", "disk"): 64 << 20,
        ("cachetree:hits_total", "memory"): 1,
        ("cachetree:served_fetches_total", "ok"): 1,
        ("cachetree:sent_bytes_total",): sent,
        ("cachetree:pulls_total", engine.address, "fetched"): 2,
        ("cachetree:pulls_total", engine.address, "failed"): 0,
        ("cachetree:pulled_bytes_total", engine.address): 64 * PAGE_TOTAL,
        ("cachetree:waiting_pulls", engine.address): 0,
        ("cachetree:streams",): 0,
    }
    assert {key: of_worker.get(key) for key in expected} == expected
    assert of_worker["cachetree:bytes", "disk"] >= 64 * PAGE_TOTAL
    assert of_worker["cachetree:disk_written_bytes_total",] >= 64 * PAGE_TOTAL
    assert of_cache["cachetree:fetches_total", worker.address, "ok"] == 1
    assert of_cache["cachetree:fetched_bytes_total", worker.address] == sent
    assert of_cache["cachetree:peer_ready", worker.address] == 1
    assert of_cache["cachetree:breaker_open", worker.address] == 0
    assert ("cachetree:pulls_total", worker.address, "fetched") not in of_cache
    assert files_bytes(tmp_path / "disk")


def test_a_fetch_of_what_is_gone_is_a_miss():
    with cache_of() as worker:
        with cache_of(peers=(worker.address,), serves=False) as cache:
            assert cache.wait_ready(20)
            with pytest.raises(Exception, match="no longer here"):
                fetched(cache, worker.address, PAGES)
        of_worker = scraped(worker)
    assert of_worker["cachetree:misses_total", "memory"] == 1
    assert of_worker["cachetree:served_fetches_total", "stale"] == 1
    assert ("cachetree:hits_total", "memory") not in of_worker


def test_repeated_requests_of_a_fetch_are_counted():
    with cache_of() as worker, FaultProxy(worker.address, seed=0) as proxy:
        store(worker.tree, PAGES)
        framed = msgspec.structs.replace(FAST, shared_memory=False)
        with cache_of(peers=(proxy.address,), peer=framed, serves=False) as cache:
            assert cache.wait_ready(20)
            assert scraped(cache)["cachetree:retries_total", proxy.address] == 0
            proxy.arm(Strike(Fault.RESET, Towards.PEER, 5, Via.DATA))
            fetched(cache, proxy.address, PAGES)
            assert scraped(cache)["cachetree:retries_total", proxy.address] == 1


def test_labels_are_bounded():
    with cache_of(serves=False) as cache:
        store(cache.tree, PAGES)
        fetched(cache, LOCAL, PAGES)
        fetched(cache, LOCAL, PAGES)
        for number in range(20):
            with pytest.raises(Exception, match="is not a peer"):
                fetched(cache, f"tcp://127.0.0.1:{number}", PAGES)  # type: ignore[arg-type]
        counted = {
            key: num for key, num in scraped(cache).items() if "cachetree:fetches_total" in key
        }
        assert counted == {("cachetree:fetches_total", LOCAL, "ok"): 2}
        assert list(cache._fetch_log._outcomes) == list(cache._fetch_log._num_bytes) == [LOCAL]


def test_names_are_unique_and_follow_the_rules():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"cachetree:[a-z_]+", name) for name in names)
    assert not [name for name in names if name.endswith("_total")]


def test_a_well_cache_says_so():
    with cache_of() as cache, page_of(cache) as page:
        for path in ("/health", "/health/live", "/health/ready", "/health?x=1"):
            status, body = get(page.url + path)
            assert status == 200
            assert json.loads(body) == {"live": True, "ready": True, "degraded": []}
        status, body = get(page.url + "/metrics")
        assert status == 200
        assert b"cachetree:bytes{" in body or b'"cachetree:bytes"' in body
        assert get(page.url + "/else")[0] == 404
        assert get(page.url + "/healthy")[0] == 404


def test_live_ready_and_degraded_are_three_things():
    with cache_of() as cache:
        store(cache.tree, PAGES)
        well = cache.status()
    health = health_of(msgspec.structs.replace(well, worker_turn_age_s=60.0))
    assert (health.live, health.ready, health.degraded) == (False, False, ())

    full = msgspec.structs.replace(well, held_bytes=well.host_bytes)
    assert len(health_of(full).degraded) == 1
    assert health_of(full).ready


def test_leased_memory_counts_as_held():
    with cache_of(host_bytes=64 * PAGE_TOTAL) as cache:
        store(cache.tree, PAGES)
        assert health_of(cache.status()).degraded == ()
        lease = cache.tree.lease(ModelId("sender"), PAGES, "test", Deadline.after(5), PARTS)
        with lease:
            assert "cannot be evicted" in health_of(cache.status()).degraded[0]
        assert health_of(cache.status()).degraded == ()


def test_a_worker_that_reads_its_disk_is_not_ready_yet(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 64 << 20}
    with cache_of(**disk) as cache:
        eventually(lambda: health_of(cache.status()).ready)
        status = cache.status()
    cold = msgspec.structs.replace(status.disk, is_warm=False)  # type: ignore[type-var]
    health = health_of(msgspec.structs.replace(status, disk=cold))
    assert (health.live, health.ready) == (True, False)
    failing = msgspec.structs.replace(status.disk, is_failing=True)  # type: ignore[type-var]
    health = health_of(msgspec.structs.replace(status, disk=failing))
    assert (health.ready, len(health.degraded)) == (True, 1)


def test_the_page_answers_503_while_the_cache_is_not_well():
    with cache_of() as cache:
        well = cache.status()
    sick = msgspec.structs.replace(well, worker_turn_age_s=60.0)
    with StatusPage(parse_http("0"), lambda: sick) as page:
        for path in ("/health", "/health/live", "/health/ready"):
            assert get(page.url + path)[0] == 503


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("9464", "http://127.0.0.1:9464"),
        (9464, "http://127.0.0.1:9464"),
        (":0", "http://127.0.0.1:0"),
        ("0.0.0.0:80", "http://0.0.0.0:80"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_http_setting_names_the_pages_url(setting, meant):
    assert parse_http(setting).url == meant


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["[::1]:0", "[::]:0"])
def test_the_page_is_there_without_ipv4_too(address):
    with cache_of() as cache, StatusPage(parse_http(address), cache.status) as page:
        assert get(page.url + "/health")[0] == 200
        if address == "[::]:0":
            assert get(page.url.replace("[::]", "127.0.0.1") + "/health")[0] == 200


def test_silent_or_lost_clients_leave_no_trace(capfd, monkeypatch):
    monkeypatch.setattr(http._Handler, "timeout", 0.1)
    with cache_of() as cache, page_of(cache) as page:
        at = urlsplit(page.url)
        with socket.create_connection((at.hostname, at.port)) as idle:
            assert idle.recv(1) == b""
        with socket.create_connection((at.hostname, at.port)) as rude:
            rude.send(b"GET / HTTP/1.0\r\n")
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(page.url + "/health")[0] == 200
        time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


def num_threads_of_page() -> int:
    return sum(it.name == "cachetree-http-answer" for it in threading.enumerate())


def test_dripping_strangers_hold_few_threads_and_keep_no_monitor_out():
    with cache_of() as cache, page_of(cache) as page, contextlib.ExitStack() as stack:
        at = urlsplit(page.url)
        for _ in range(3 * MOST_THREADS):
            slow = stack.enter_context(socket.create_connection((at.hostname, at.port)))
            slow.sendall(b"GET")
        eventually(lambda: num_threads_of_page() >= MOST_THREADS)
        assert get(page.url + "/health")[0] == 200
        eventually(lambda: num_threads_of_page() <= MOST_THREADS, 2)


def test_request_that_drips_ends_though_each_byte_is_in_time(monkeypatch):
    monkeypatch.setattr(http, "_MOST_S", 0.3, raising=False)
    with cache_of() as cache, page_of(cache) as page:
        at = urlsplit(page.url)
        with socket.create_connection((at.hostname, at.port)) as slow:
            slow.settimeout(0.1)

            def has_ended() -> bool:
                slow.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    return slow.recv(1) == b""
                return False

            eventually(has_ended, 3)
        eventually(lambda: not num_threads_of_page())


def test_flood_of_real_requests_waits_for_threads():
    """A thread that answers a request cannot be stopped."""
    go_on = threading.Event()

    def slow() -> CacheStatus:
        go_on.wait(20)
        raise OSError("nothing to say")

    with StatusPage(parse_http("0"), slow) as page, contextlib.ExitStack() as stack:
        at = urlsplit(page.url)
        for _ in range(2 * MOST_THREADS):
            asker = stack.enter_context(socket.create_connection((at.hostname, at.port)))
            asker.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        eventually(lambda: num_threads_of_page() >= MOST_THREADS)
        time.sleep(0.1)
        assert num_threads_of_page() == MOST_THREADS
        go_on.set()
        eventually(lambda: not num_threads_of_page())


def test_error_of_the_page_is_logged(caplog):
    def broken() -> CacheStatus:
        raise ValueError("a test")

    with StatusPage(parse_http("0"), broken) as page:
        with pytest.raises(OSError):
            get(page.url + "/health")
        eventually(lambda: "ValueError: a test" in caplog.text)


def test_a_scrape_may_ask_for_a_form_and_is_told_it():
    with cache_of() as cache, page_of(cache) as page:
        asked = urllib.request.Request(
            page.url + "/metrics",
            headers={"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"},
        )
        with urllib.request.urlopen(asked, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert gzip.decompress(answer.read()).endswith(b"# EOF\n")


@pytest.mark.parametrize("setting", ["", "host", "host:port", "127.0.0.1:70000", 70000, -1])
def test_a_wrong_address_is_refused(setting):
    with pytest.raises(ConfigError, match="http is"):
        parse_http(setting)


def test_a_taken_port_is_refused():
    with cache_of(serves=False) as cache, page_of(cache) as page:
        port = int(page.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="choose another port"):
            StatusPage(parse_http(str(port)), cache.status)


def test_a_served_worker_has_the_page_that_its_file_names(tmp_path):
    with serving(tmp_path, http=0) as process:
        assert process.stdout.readline().startswith("serving at tcp://127.0.0.1:")
        url = process.stdout.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")
        assert get(f"{url}/health/ready")[0] == 200
        assert b"cachetree:budget_bytes" in get(f"{url}/metrics")[1]


@pytest.mark.parametrize("serves", [True, False])
def test_scrape_adds_up_what_is_held_once(monkeypatch, serves):
    """Each scrape looks at all pins and leases, under the tree's lock."""
    held_bytes, looks = CacheTree.held_bytes, []

    def look(tree: CacheTree) -> int:
        looks.append(tree)
        return held_bytes.fget(tree)  # type: ignore[attr-defined]

    with cache_of(serves=serves) as cache:
        store(cache.tree, PAGES)
        monkeypatch.setattr(CacheTree, "held_bytes", property(look))
        with cache.tree.lease(MODEL, PAGES, "test", Deadline.after(5), PARTS):
            assert cache.status().held_bytes == 64 * PAGE_TOTAL
    assert len(looks) == 1


def test_endless_request_is_dropped(monkeypatch):
    monkeypatch.setattr(http, "_PATIENCE_S", 0.2)
    with cache_of() as cache, page_of(cache) as page:
        netloc = urlsplit(page.url)
        with socket.create_connection((netloc.hostname, netloc.port), timeout=10) as asking:
            asking.sendall(b"POST /nowhere HTTP/1.0\r\n\r\n")
            deadline = Deadline.after(10)
            with pytest.raises(ConnectionError):
                while not deadline.has_passed:
                    asking.sendall(bytes(1 << 16))
