"""Fixtures of the tests of the extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from standins import Now


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    """A clock of waiting requests that moves only by a call."""
    from standins import Now  # Not at the top: it imports SGLang, which takes seconds.

    return Now(monkeypatch)
