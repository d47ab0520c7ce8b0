"""One launch for all quick checks on two ranks, and one for all checks on four."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import found

MODULES = "placements rounding models faults hidden counted matrix slices momentum".split()


@pytest.fixture(scope="session")
def on_two() -> dict[str, Any]:
    """What the checks found on two ranks."""
    return found(MODULES, ranks=2, FAST="1")


@pytest.fixture(scope="session")
def on_four() -> dict[str, Any]:
    """What the checks found on four ranks."""
    return found(MODULES, ranks=4, seconds=1500)
