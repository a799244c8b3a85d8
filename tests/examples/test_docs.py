"""The pages name all that can be set or seen, with the right defaults, and no more."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import documented_outcomes
import pytest
import yaml

from cachetree.cli.serve import read_config
from cachetree.errors import Cancelled, FetchError
from cachetree.planning import Reason
from sglang_droidspeak.hicache.tier import WAIT_S
from sglang_droidspeak.request.load import ForwardWaitExceeded
from sglang_droidspeak.request.planner import UNMEASURED_S
from sglang_droidspeak.start.config import parse_settings
from sglang_droidspeak.start.refuse import ARCHITECTURES, EXACT_ONLY
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = {it.relative_to(ROOT).as_posix(): it.read_text() for it in reference.pages()}
EXTENSION = ROOT / "sglang_droidspeak"


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_equal_the_code(page):
    assert reference.written(PAGES[page]) == PAGES[page], "run `python -m tools.reference`"


def test_every_part_that_can_be_made_is_in_a_page():
    used = re.findall(r"<!-- made: (\S+) -->", "\n".join(PAGES.values()))
    assert set(used) == set(reference.PARTS)


def test_every_argument_of_a_command_is_explained_by_its_first_name():
    page = PAGES["docs/reference/cli.md"]
    assert not re.findall(r"(?m)^\| `[^`]*` \|  \|$", page)
    assert "`--url URL`" in page and "`--model URL`" not in page


def test_every_outcome_has_a_cause_and_a_remedy():
    for part in PAGES["docs/no-reuse.md"].split("\n### ")[1:]:
        assert re.search(r"\n- \*\*Cause:\*\* .+\n- \*\*Remedy:\*\* ", part), part


def test_outcomes_are_described_as_they_are_written():
    """The page has the words of the policy, and the words that a search finds in the engine's part.

    The search knows how outcomes are written today. If it no longer finds one, this test fails,
    because the page still has it. A server's answers are compared with the page wherever a test
    looks at them: `engine_parts.Answer`.
    """
    written = {
        found
        for path in (
            EXTENSION / "linker.py",
            EXTENSION / "weights.py",
            EXTENSION / "engine/prefixes.py",
            *(EXTENSION / "request").glob("*.py"),
        )
        for found in re.findall(
            r'(?:return |outcome=|cause = |else |Declined\(|_retire\(|unknown = )"(\w+)"',
            path.read_text(),
        )
    }
    outcomes = written | {reason.value for reason in Reason}
    documented = {it for it in documented_outcomes.outcomes() if not it.startswith("fallback")}
    assert outcomes | {"reused"} == documented


def test_causes_of_a_fallback_are_the_errors_of_a_fetch():
    errors = {it.__name__ for it in (FetchError, ForwardWaitExceeded, *FetchError.__subclasses__())}
    causes = errors - {Cancelled.__name__} | {"SlowLink"}
    assert {f"fallback: {cause}" for cause in causes} == {
        it for it in documented_outcomes.outcomes() if it.startswith("fallback")
    }


def test_supported_models_are_named():
    named = set(re.findall(r"`(\w+ForCausalLM)`", PAGES["docs/compatibility.md"]))
    assert named == ARCHITECTURES | EXACT_ONLY


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_shown_configuration_is_the_receivers(page):
    (shown_yaml,) = re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL)
    receiver = yaml.safe_load((ROOT / "examples/receiver.yaml").read_text())
    assert yaml.safe_load(shown_yaml).items() <= receiver.items()


@pytest.mark.parametrize("name", ["sender", "receiver"])
def test_example_settings_are_valid(name):
    options = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    extra = options["unified-cache-external-linker-config"]["linker_extra_config"]
    for profile in parse_settings(extra).profiles:
        assert (ROOT / profile).is_file()


def test_the_example_worker_is_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = read_config(Path("examples/worker.yaml"))
    assert config.family.page_size == 16
    sender = yaml.safe_load((ROOT / "examples/sender.yaml").read_text())
    extra = sender["unified-cache-external-linker-config"]["linker_extra_config"]
    assert config.cache.keeps == (extra["listen"],)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for path in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(path).exists(), path


def test_every_metric_that_a_page_names_exists():
    known = set(re.findall(r"(?:droidspeak|cachetree):\w+", PAGES["docs/reference/metrics.md"]))
    for page, text in PAGES.items():
        for name in re.findall(r"`((?:droidspeak|cachetree):\w+)", text):
            assert name in known or f"{name}_total" in known, (page, name)


def test_the_list_for_language_models_is_of_these_pages():
    assert (ROOT / "docs/llms.txt").read_text() == reference.llms()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/design.md", f"the wait is {UNMEASURED_S} s at most"),
        ("docs/design.md", f"after {WAIT_S} s, or"),
        ("docs/storage.md", f"waits at most {WAIT_S} s for the answer"),
        ("docs/compatibility.md", f"SGLang other than {version('sglang')} "),
    ],
)
def test_a_number_in_a_sentence_is_the_codes(page, text):
    assert text in PAGES[page]


def test_the_readme_is_short():
    assert PAGES["README.md"].count("\n") < 150


def test_first_screen_has_no_placeholder():
    assert not re.findall(r"@[A-Z0-9_]+@", PAGES["README.md"])
