"""A virtual device for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from virtual_cuda import VirtualCuda


@pytest.fixture
def cuda() -> Iterator[VirtualCuda]:
    with VirtualCuda() as device:
        yield device
