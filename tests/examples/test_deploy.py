"""Files under deploy/: they are as the code writes them, name existing metrics, and have working
commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import pytest
import sglang
import yaml
from kubernetes_validate import validate
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

from cachetree import Cache
from cachetree.cli import parser as cachetree
from cachetree.cli.serve import parse_config, read_config
from cachetree.metrics import StatusPage
from cachetree.transport import check_worker, is_directory, parse_http, write_key_pair
from sglang_droidspeak.cli import parser as droidspeak
from sglang_droidspeak.cli.serve import options_of
from sglang_droidspeak.engine import release
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana/droidspeak.json").read_text())
PANELS = [it for it in DASHBOARD["panels"] if it["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_every_panel_has_a_title_a_place_and_the_source_that_a_user_chooses():
    (source,) = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "source",
        "datasource",
        "prometheus",
    )
    titles = [it["title"] for it in DASHBOARD["panels"]]
    assert len({*titles}) == len(titles) and all(titles)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert cells and max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len({*refs}) == len(refs), panel["title"]


@pytest.mark.parametrize("expression", [*QUERIES, *(it["expr"] for it in RULES)])
def test_every_metric_of_a_panel_or_rule_exists(expression):
    """The labels have to exist, too. SGLang's metrics are compared with its source."""
    reference_text = reference.request_metrics() + reference.cache_metrics()
    ours = dict(re.findall(r"`([\w:]+)(?:\{([^}]*)\})?` \|", reference_text))
    # Prometheus adds these; a histogram has `le`.
    known = {"instance", "le"}
    metrics = re.findall(r"([a-z]+:\w+)(\{[^}]*\})?", expression)
    assert metrics
    for name, braces in metrics:
        if name.startswith("sglang:"):
            base = name.removesuffix("_bucket")
            source = Path(sglang.__file__).parent / "srt/observability/metrics_collector.py"
            assert f'"{base}"' in source.read_text()
        else:
            labels = set(ours[re.sub("_(bucket|sum|count)$", "", name)].split(", "))
            chosen = re.findall(r"(\w+)[=!]~?\"", braces or "")
            assert set(chosen) <= labels, (name, chosen)
            known |= labels
    by = re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression)
    assert {it for some in by for it in some.split(", ")} <= known


def test_outcomes_in_an_expression_are_outcomes():
    import documented_outcomes

    known = {it.partition(":")[0] for it in documented_outcomes.outcomes()}
    for expression in [*QUERIES, *(it["expr"] for it in RULES)]:
        for some in re.findall(r'outcome[=!]~?"([^"]*)"', expression):
            assert set(some.split("|")) <= known, expression


def test_every_alert_has_its_entry_in_the_runbook():
    page = (ROOT / "docs/trouble.md").read_text()
    assert re.findall(r"(?m)^### (Droidspeak\w+)$", page) == [it["alert"] for it in RULES]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus")
def test_alerts_fire_when_they_should():
    file = DEPLOY / "prometheus/alerts_test.yaml"
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried_firing_and_not():
    parts = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yaml").read_text())["tests"]
    tried = [
        (it["alertname"], bool(it["exp_alerts"]))
        for part in parts
        for it in part["alert_rule_test"]
    ]
    assert sorted(tried) == sorted((it["alert"], fires) for it in RULES for fires in (False, True))


@pytest.mark.parametrize("accept", ["", "; escaping=allow-utf-8"])
def test_metrics_have_their_names_however_they_are_scraped(accept):
    """Prometheus 2 and 3 ask for different formats, and the configuration renames metrics."""
    registry = CollectorRegistry()
    Counter("droidspeak:requests", "", ["outcome"], registry=registry).labels("own").inc()
    encode, _ = choose_encoder(f"application/openmetrics-text; version=1.0.0{accept}")
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    (rule,) = job["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
    names = re.findall(r"(?m)^(\w[\w:]+)\{", encode(registry).decode())
    replacement = re.sub(r"\$(\d)", r"\\\1", rule["replacement"])
    renamed = [re.sub(f"^(?:{rule['regex']})$", replacement, it) for it in names]
    assert "droidspeak:requests_total" in renamed


def here(word: str) -> str:
    """Return a path in a volume as a path in the repository."""
    word = word.replace("/models/base", "examples/pairs/weights/foundation")
    return re.sub("/models/profiles|(/models)?/adapters", "examples/real", word)


def test_the_services_start_as_they_are_told(monkeypatch):
    monkeypatch.chdir(ROOT)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("reader", "answerer", "lora"):
        program, *words = map(here, shlex.split(services[name]["command"]))
        assert program == "droidspeak"
        options_of(droidspeak().parse_args(words))
        assert words[words.index("--otlp-traces-endpoint") + 1] == "tempo:4317"
    program, *words = shlex.split(services["worker"]["command"])
    assert program == "cachetree"
    args = cachetree().parse_args(words)
    config = read_config(args.config)
    assert config.traces == "tempo:4317"
    targets = (DEPLOY / "prometheus/prometheus.yaml").read_text()
    assert set(re.findall(r'"(\w+):\d+"', targets)) == {*services} - {
        "prometheus",
        "tempo",
        "grafana",
    }
    volumes = {it for of in services.values() for it in of.get("volumes", ())}
    for volume in volumes - {"../build/real:/models:ro"}:  # `make real` makes that one.
        assert (DEPLOY / volume.partition(":")[0]).is_dir()


def test_adapters_and_profiles_come_from_one_place_with_the_maps():
    """Each server of adapters names them all, and has the files that their profiles need beside
    them."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (pod,) = [it for it in PODS if it["metadata"]["name"] == "lora"]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    in_compose = shlex.split(services["lora"]["command"])
    for words in (in_compose, container["command"]):
        named = [it.partition("=")[0] for it in words if re.match(r"\w+=/", it)]
        assert named == ["questions", "json", "summaries"]
        for name in named:
            assert (ROOT / "examples/real" / name / "adapter_config.json").is_file()
    assert not pod["spec"]["template"]["spec"].get("hostPID")
    assert "/adapters" in in_compose and "--profile=/models/profiles" in container["command"]


KUBERNETES = [
    part
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for part in yaml.safe_load_all(file.read_text())
]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [it for it in KUBERNETES if it["kind"] in kinds]


PODS = of_kind("DaemonSet", "Deployment")


def test_the_compose_file_follows_its_specification(tmp_path):
    compose = DEPLOY / "compose.yaml"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(compose.read_text().replace("    command:", "    comand:", 1))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    assert subprocess.run([*check, compose]).returncode == 0
    done = subprocess.run([*check, wrong], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "comand" in done.stdout


@pytest.mark.parametrize(
    "part", KUBERNETES, ids=lambda it: f"{it['kind']} {it['metadata']['name']}"
)
def test_kubernetes_files_follow_its_schemas(part):
    if part["apiVersion"] != "monitoring.coreos.com/v1":
        validate(part, "1.30", strict=True)
        return
    known = {"ServiceMonitor": {"selector", "endpoints"}, "PrometheusRule": {"groups"}}
    assert part.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert part["spec"].keys() == known[part["kind"]]


def test_the_operator_of_prometheus_is_given_the_same():
    (rule,), (monitor,) = of_kind("PrometheusRule"), of_kind("ServiceMonitor")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    (endpoint,) = monitor["spec"]["endpoints"]
    snake = [
        {re.sub("[A-Z]", lambda it: "_" + it[0].lower(), key): value for key, value in it.items()}
        for it in endpoint["metricRelabelings"]
    ]
    assert snake == job["metric_relabel_configs"]
    (of,) = monitor["spec"]["selector"]["matchExpressions"]
    scraped = [
        it["metadata"]["labels"][of["key"]]
        for it in of_kind("Service")
        if "labels" in it["metadata"]
    ]
    assert sorted(scraped) == sorted(of["values"])


def test_pods_mount_what_there_is_and_services_lead_to_their_ports():
    ports = {}
    for pod in PODS:
        template = pod["spec"]["template"]
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert pod["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (container,) = spec["containers"]
        assert {it["name"] for it in container["volumeMounts"]} == {
            it["name"] for it in spec["volumes"]
        }
        ports[frozenset(labels.items())] = {
            it["name"]: it["containerPort"] for it in container["ports"]
        }
        probes = [it["httpGet"]["port"] for name, it in container.items() if name.endswith("Probe")]
        assert set(probes) == {"http"}
    for service in of_kind("Service"):
        wanted = service["spec"]["selector"].items()
        led_to = [of for labels, of in ports.items() if wanted <= labels]
        assert led_to
        for open_ports in led_to:
            named_ports = {it["name"]: it["port"] for it in service["spec"]["ports"]}
            assert named_ports.items() <= open_ports.items()
    numbers = {number for of in ports.values() for number in of.values()}
    for policy in of_kind("NetworkPolicy"):
        for way in policy["spec"]["ingress"]:
            assert {it["port"] for it in way["ports"]} <= numbers


def test_pods_start_as_they_are_told(tmp_path, monkeypatch):
    """The keys are made as the comments say, and the addresses are those of the Services."""
    monkeypatch.chdir(ROOT)
    for name in ("worker", "engine"):
        write_key_pair(tmp_path, name)
    (settings,) = of_kind("ConfigMap")
    worker_file = settings["data"]["worker.yaml"].replace("/keys/", f"{tmp_path}/")
    config = parse_config(yaml.safe_load(worker_file), "worker.yaml")
    worker = config.cache.worker
    check_worker(worker)
    names = {it["metadata"]["name"] for it in of_kind("Service")}
    for pod in PODS:
        (container,) = pod["spec"]["template"]["spec"]["containers"]
        commands = (it.replace("/keys/", f"{tmp_path}/") for it in container["command"])
        program, *words = map(here, commands)
        ports = {str(it["containerPort"]) for it in container["ports"]}
        if program == "cachetree":
            expected = {it.rpartition(":")[2] for it in (worker.listen, config.http)}
            assert ports == {*expected, str(worker.bulk_port)}
            assert cachetree().parse_args(words).config.name in settings["data"]
            continue
        args = droidspeak().parse_args(words)
        linker = options_of(args)["unified-cache-external-linker-config"]
        if args.listen is None:
            assert not args.peer
            continue
        extra = linker["linker_extra_config"]
        expected = {it.removeprefix("--port=") for it in words if it.startswith("--port=")}
        assert ports == {*expected, args.listen.rpartition(":")[2], str(extra["bulk_port"])}
        assert args.peer == ["dns://cachetree:30020"]
        assert config.cache.keeps == (f"dns://engines:{args.listen.rpartition(':')[2]}",)
        assert {"cachetree", "engines"} <= names
        for address in (*args.peer, *config.cache.keeps):
            assert is_directory(address)


def test_probes_ask_for_what_is_answered(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = read_config(DEPLOY / "worker.yaml")
    small = msgspec.structs.replace(
        config.cache, host_bytes=1 << 20, staging_bytes=1 << 20, serves=False
    )
    engine = (Path(sglang.__file__).parent / "srt/entrypoints/http_server.py").read_text()
    with Cache(config.family, small) as cache, StatusPage(parse_http("0"), cache.status) as page:
        for pod in PODS:
            (container,) = pod["spec"]["template"]["spec"]["containers"]
            for probe in (it for name, it in container.items() if name.endswith("Probe")):
                path = probe["httpGet"]["path"]
                if pod["kind"] == "DaemonSet":
                    assert urllib.request.urlopen(page.url + path, timeout=5).status == 200
                else:
                    assert f'@app.get("{path}")' in engine


def is_in_image(path: str) -> bool:
    """Whether an image contains a path, by Docker's rule for .dockerignore: the last line that
    matches the path, or a folder above it, decides."""
    is_copied, inside = True, PurePosixPath("/", path)
    for line in (ROOT / ".dockerignore").read_text().split():
        if any(
            fnmatchcase(str(part), f"/{line.lstrip('!')}") for part in (inside, *inside.parents)
        ):
            is_copied = line.startswith("!")
    return is_copied


def test_the_image_holds_what_it_runs_and_no_keys():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {"pyproject.toml", "platforms/torch_cpu/pyproject.toml", project["project"]["readme"]}
    needed |= {*project["project"]["license-files"], *(f"{it[:-1]}/__init__.py" for it in packages)}
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    commands = [it["command"] for it in services if "build" in it]
    commands += [
        " ".join(it["spec"]["template"]["spec"]["containers"][0]["command"]) for it in PODS
    ]
    needed |= {it for some in commands for it in re.split("[ =]", some) if (ROOT / it).exists()}
    assert {"deploy/worker.yaml", "examples/pairs/weights/sender"} <= needed
    assert all(map(is_in_image, needed)), needed
    for secret in ("keys/engine.key", "deploy/engine.key", "out/fleet/reader.log", ".git", ".venv"):
        assert not is_in_image(secret), secret


def test_git_takes_no_key():
    assert {"/keys/", "*.key"} <= set((ROOT / ".gitignore").read_text().split())


def test_the_container_file_builds_from_the_wheel_and_everything_uses_its_image():
    container_file = (DEPLOY / "Containerfile").read_text()
    steps = [it.split() for it in re.findall(r"(?m)^[A-Z]+ .*$", container_file)]
    bases = {it[1] for it in steps if it[0] == "FROM"}
    assert bases == {f"lmsysorg/sglang:v{release.VERSION}"}
    assert f"'sglang[tracing]=={release.VERSION}'" in container_file
    copied = {it[1]: it[2] for it in steps if it[0] == "COPY" and "--from=wheels" not in it}
    assert all(it == "." or is_in_image(it) for it in copied), copied
    (wheel,) = [it for it in steps if it[:3] == ["RUN", "pip", "wheel"]]
    sources = [it for it in wheel if it.startswith(copied["."])]
    for source in sources:
        assert (ROOT / source.removeprefix(copied["."]).lstrip("/") / "pyproject.toml").is_file()
    (folder,) = [it[1] for it in steps if it[0] == "WORKDIR"]
    assert copied["deploy"] == f"{folder}/deploy" and copied["examples"] == f"{folder}/examples"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image = f"{project['name']}:{project['version']}"
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    for service in (it for it in services if "build" in it):
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Containerfile")
        assert service["image"] == image
    images = {it["spec"]["template"]["spec"]["containers"][0]["image"] for it in PODS}
    assert images == {f"REGISTRY/{image}"}


def test_compose_finds_peers_by_name(monkeypatch):
    monkeypatch.chdir(ROOT)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("reader", "answerer"):
        words = shlex.split(services[name]["command"])[1:]
        args = droidspeak().parse_args(words)
        assert args.peer == ["dns://worker:30020"]
    cache = read_config(DEPLOY / "worker.yaml").cache
    assert cache.keeps == ("dns://reader:30010",) and cache.worker.listen.endswith(":30020")
