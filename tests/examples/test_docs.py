"""The pages name everything that can be set or seen, with the right defaults, nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import documented_outcomes
import msgspec
import pytest
import yaml
from prometheus_client import Counter, Histogram

from cachetree.cli.serve import read_config
from cachetree.errors import Cancelled, FetchError
from cachetree.metrics import METRICS
from cachetree.planning.policy import Reason
from sglang_droidspeak.metrics import Metrics
from sglang_droidspeak.request.controls import Controls
from sglang_droidspeak.request.meta_info import RequestProvenance
from sglang_droidspeak.request.source import ForwardWaitExceeded
from sglang_droidspeak.start.config import Settings, parse_settings
from sglang_droidspeak.start.refuse import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    it.relative_to(ROOT).as_posix(): it.read_text()
    for it in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
RESPONSES = PAGES["docs/reference/responses.md"]
EXTENSION = ROOT / "sglang_droidspeak"


def rows(text: str) -> list[list[str]]:
    """Cells of all tables' rows, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cells: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", cells[0])


def shown(value: object) -> str:
    """A default as the tables write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    if isinstance(value, dict):
        return f"`{value}`"
    return f"`{getattr(value, 'value', value)}`" if isinstance(value, str) else str(value)


@pytest.mark.parametrize(("page", "struct"), [("settings", Settings), ("requests", Controls)])
def test_every_field_has_a_row_with_its_default(page: str, struct: type) -> None:
    table = rows(PAGES[f"docs/reference/{page}.md"])
    described = {names(row)[0]: row[1] for row in table if names(row)}
    fields = msgspec.structs.fields(struct)
    assert described == {field.name: shown(default_of(field)) for field in fields}


def default_of(field: msgspec.structs.FieldInfo) -> object:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def test_every_field_of_meta_info_is_described() -> None:
    table = RESPONSES.split("Outcomes other than")[0]
    described = [name for row in rows(table) for name in names(row)]
    assert described == list(RequestProvenance.__struct_fields__)


def test_outcomes_are_described_as_they_are_written() -> None:
    """The words of the policy, and those that a search finds in the engine's part.

    The search knows the ways in which outcomes are written today; one that it does not find any
    more fails here, because the page has it. What a server answers is compared with the page
    wherever a test looks at it: `engine_parts.Answer`.
    """
    written = {
        found
        for path in (EXTENSION / "engine/prefixes.py", *(EXTENSION / "request").glob("*.py"))
        for found in re.findall(
            r'(?:return |outcome=|cause = |_refusal = |else |Declined\()"(\w+)"', path.read_text()
        )
    }
    told = written | {reason.value for reason in Reason}
    assert told == {it for it in documented_outcomes.outcomes() if not it.startswith("fallback")}


def test_causes_of_a_fallback_are_the_errors_of_a_fetch() -> None:
    errors = {it.__name__ for it in (FetchError, ForwardWaitExceeded, *FetchError.__subclasses__())}
    causes = errors - {Cancelled.__name__} | {"SlowLink"}
    assert {f"fallback: {cause}" for cause in causes} == {
        it for it in documented_outcomes.outcomes() if it.startswith("fallback")
    }


def test_every_metric_is_described() -> None:
    described = {
        name.partition("{")[0].removesuffix("_total")
        for row in rows(RESPONSES)
        for name in names(row)
        if name.startswith("droidspeak:")
    }
    kept = [
        it for it in vars(Metrics(enabled=False)).values() if isinstance(it, Counter | Histogram)
    ]
    assert described == {metric.describe()[0].name for metric in kept}


def test_every_metric_of_a_cache_is_described() -> None:
    described = {
        (*name.partition("{")[::2], *row[1:3])
        for row in rows(PAGES["docs/operate.md"])
        for name in names(row)
        if name.startswith("cachetree:")
    }
    labels = {metric: ", ".join(metric.labels) for metric in METRICS}
    assert described == {
        (it.sample_name, f"{labels[it]}}}" if it.labels else "", it.kind, it.text) for it in METRICS
    }


def test_supported_models_are_named() -> None:
    assert set(re.findall(r"`(\w+ForCausalLM)`", PAGES["docs/compatibility.md"])) == ARCHITECTURES


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_shown_configuration_is_the_receivers(page: str) -> None:
    (shown_yaml,) = re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL)
    receiver = yaml.safe_load((ROOT / "examples/receiver.yaml").read_text())
    assert yaml.safe_load(shown_yaml).items() <= receiver.items()


@pytest.mark.parametrize("name", ["sender", "receiver"])
def test_example_settings_are_valid(name: str) -> None:
    options = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    extra = options["unified-cache-external-linker-config"]["linker_extra_config"]
    for profile in parse_settings(extra).profiles:
        assert (ROOT / profile).is_file()


def test_the_example_worker_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read_config(Path("examples/worker.yaml"))
    assert config.family.page_size == 16
    assert config.cache.worker.accepts


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_command_leads_somewhere(page: str) -> None:
    """Links from the page's folder, files of commands from the repository's root."""
    for path in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(path).exists(), path
    run = re.findall(r"(?:python|bash) (examples/\S+)", PAGES[page])
    config = re.findall(r"--config (\S+)", PAGES[page])
    for path in [*run, *config]:
        assert (ROOT / path).exists(), path


def test_first_screen_has_no_placeholder() -> None:
    assert not re.findall(r"@[A-Z0-9_]+@", PAGES["README.md"])
