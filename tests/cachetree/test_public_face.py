"""The public names of the cache are documented, and importing them is cheap."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import cachetree

LATE = ("torch", "transformers", "sglang", "yaml", "prometheus_client", "scipy")
"""Packages that only optional parts need. A program imports these parts by name."""


def undocumented(name: str, thing: object) -> Iterator[str]:
    """Yield the class or function itself, and each public function of a class, if it has no
    docstring."""
    if not (thing.__doc__ or "").strip() or (thing.__doc__ or "").startswith(f"{name}("):
        yield name
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        plain: object = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(plain) and not plain.__doc__:
            yield f"{name}.{member}"


@pytest.mark.parametrize("name", cachetree.__all__)
def test_every_public_name_is_documented(name):
    thing = getattr(cachetree, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert list(undocumented(name, thing)) == []


def test_undocumented_names_are_reported():
    class Silent:
        """A class with a docstring, and with a method that has none."""

        def verb(self) -> None: ...

    def function() -> None: ...

    silent: Callable[[], None] = function
    assert list(undocumented("Silent", Silent)) == ["Silent.verb"]
    assert list(undocumented("function", silent)) == ["function"]


def test_the_import_brings_in_no_more_than_the_cache_needs():
    """The test counts modules, not seconds."""
    code = f"import sys, cachetree; print([it for it in {LATE!r} if it in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("[]\n", "")
