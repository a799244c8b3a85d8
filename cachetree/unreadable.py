"""What a decoder raises for bytes that are not what they should be."""

from __future__ import annotations

from typing import Final

UNREADABLE: Final = (ValueError, RecursionError)
"""Another form (all errors of msgspec), text that is not UTF-8, dates that do not exist; nesting
too deep, also in a field that nobody knows and that is skipped."""
