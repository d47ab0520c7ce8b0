"""Memory that is not given back."""

from __future__ import annotations

import pytest

from tests import inside
from tests.faults.launch import found

MB = 1024
TIMES = {"steps": 3000, "optimizers": 400}


@pytest.fixture(scope="module", params=inside.HERE)
def grown(request: pytest.FixtureRequest) -> dict[str, int]:
    """By how many kB the memory of a process has grown."""
    kilobytes: dict[str, int] = found("grown", request.param, *(f"{what}={times}" for what, times in TIMES.items()))
    print(request.param, kilobytes)
    return kilobytes


@pytest.mark.parametrize("what", TIMES)
def test_memory_does_not_grow(grown: dict[str, int], what: str) -> None:
    """Over many steps and over many optimizers; tests/attack/test_lifetime.py has single parameters."""
    assert grown[what] < 2 * MB
