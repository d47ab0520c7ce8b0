"""Every test of this folder runs on each backend; what it changes in torch or Python is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests import inside


@pytest.fixture(params=inside.HERE)
def backend(request: pytest.FixtureRequest) -> str:
    """Each of them, by name."""
    return str(request.param)


@pytest.fixture(params=inside.AND_AUTO)
def any_backend(request: pytest.FixtureRequest) -> str:
    """For what the named backend "cpu" may refuse: "auto" and "eager" must do it."""
    return str(request.param)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collector: what is still alive is held by somebody."""
    gc.disable()
    yield
    gc.enable()
