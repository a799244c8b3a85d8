"""Each picture on the pages shows the data that the repository has now."""

from __future__ import annotations

import pytest

from tools import pictures


@pytest.mark.parametrize("name", pictures.MADE)
def test_picture_shows_the_current_data(name):
    read, _ = pictures.MADE[name]
    assert pictures.shown(name) == pictures.digest(read()), "run `python -m tools.pictures`"
