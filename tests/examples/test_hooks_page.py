"""docs/hooks.md names every function of SGLang that is hooked, and no other."""

import re
from pathlib import Path

from sglang_droidspeak.engine import release

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_droidspeak"


def hooked() -> set[str]:
    """Functions that the source hooks: `release.NAME: (function, kind)` or `register(...)`."""
    names = set(release.WEIGHTS_WRITTEN)
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"release\.([A-Z_]+)(?:\]|:| = \(|, )", file.read_text()):
            value = getattr(release, name)
            names.update([value] if isinstance(value, str) else [])
    return {it for it in names if it.startswith("sglang.") and it != release.SCHEDULER_MODULE}


def test_the_page_names_every_hook():
    page = (ROOT / "docs/hooks.md").read_text()
    rows = [it.split("|")[1] for it in page.splitlines() if it.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    functions = hooked()
    assert {it.rsplit(".", 1)[-1] for it in named} == {it.rsplit(".", 1)[-1] for it in functions}
    assert all(any(it.endswith(name) for it in functions) for name in named)
    stated = re.findall(r"hooks (\d+) functions|of the (\d+) would be", page)
    assert {int(it) for pair in stated for it in pair if it} == {len(named)} == {len(functions)}
