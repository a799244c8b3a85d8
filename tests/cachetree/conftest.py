"""Fixtures for all tests here: the parties of a conversation with keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from security_parts import Party, new_party

from cachetree.transport import keys


@pytest.fixture
def us(tmp_path: Path) -> Party:
    return new_party(tmp_path, "us")


@pytest.fixture
def friend(tmp_path: Path) -> Party:
    return new_party(tmp_path, "friend")


@pytest.fixture
def stranger(tmp_path: Path) -> Party:
    return new_party(tmp_path, "stranger")


@pytest.fixture
def no_secret_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    for file in tmp_path.glob("*.key"):
        secret = keys.read_key_pair(str(file)).secret
        for shown in (secret.hex(), repr(secret)[2:-1]):
            assert shown not in caplog.text
