"""One Hypothesis profile for all (the machines that run this are shared, so no deadlines), and what tests share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import inside, interpreter

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")

NAMES = {*inside.BACKENDS, "auto"}


def pytest_configure(config: pytest.Config) -> None:
    """One thread of torch's, in this process and in those that it starts: as many tests run at once as there are cores.

    A crash in native code says where each thread was: pytest does that here, the environment in a child process.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interpreter.IS_THERE:
        interpreter.make_quick()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--only-backend eager` is what `make quick` runs with."""
    parser.addoption("--only-backend", choices=inside.HERE, help="of the tests that run with each backend, only these")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other backends."""
    only = config.getoption("--only-backend")
    others = set()
    for item in items:
        spec: Any = getattr(item, "callspec", None)
        values = list(spec.params.values()) if spec else []
        values += [each for value in values if isinstance(value, tuple) for each in value]
        names = {value for value in values if isinstance(value, str) and value in NAMES}
        if only and names - {only}:
            others.add(item)
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    """Put back the number of threads that a test has set: with another, the next one's sums have other bits."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def stand_for(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let `backend="auto"` be this one."""
    if name == "eager":
        inside.let_auto_take_eager(patch)


@pytest.fixture(scope="session", autouse=True)
def only_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--only-backend`, also the tests that leave the choice to the optimizer."""
    only = request.config.getoption("--only-backend")
    with pytest.MonkeyPatch.context() as patch:
        if only:
            stand_for(patch, only)
        yield


@pytest.fixture(scope="module", params=inside.HERE)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `backend="auto"` stands for: a module that uses this runs once with each."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        stand_for(patch, name)
        yield name


@pytest.fixture
def threads() -> Callable[[int], None]:
    """Sets the number of torch's threads, for this test alone."""
    return torch.set_num_threads
