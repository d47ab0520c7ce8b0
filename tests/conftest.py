"""One Hypothesis profile for all (the machines that run this are shared, so no deadlines), and what tests share."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests import inside

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")

BACKENDS = ("eager", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--only-backend eager` is what `make quick` runs with."""
    parser.addoption("--only-backend", choices=BACKENDS, help="of the tests that run with each backend, only these")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other backends."""
    only = config.getoption("--only-backend")
    if only:
        params = {item: getattr(item, "callspec", None) for item in items}
        others = [item for item, spec in params.items() if spec and spec.params.get("backend", only) != only]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


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


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `backend="auto"` stands for: a module that uses this runs once with each."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        stand_for(patch, name)
        yield name


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes tensors of a test's size worth several threads, and forgets how they were cut."""
    yield lambda size: inside.cut_into_units(monkeypatch, size)
    monkeypatch.undo()
    inside.forget_walk_orders()
