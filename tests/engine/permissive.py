"""Parts of the engine extension with nothing around them but what a test gives."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import MagicMock


def made(part: type, **given: Any) -> Any:
    """A `part` whose collaborators answer anything, but for those that are given."""
    names = inspect.signature(part).parameters
    return part(**{name: given.get(name.lstrip("_"), MagicMock()) for name in names})
