from __future__ import annotations

import pytest
from flows import module_of


@pytest.fixture
def small():
    """The module of the small flow, fresh for each test."""
    return module_of("small_flow")
