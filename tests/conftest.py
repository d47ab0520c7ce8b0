"""One Hypothesis profile for all (the machines that run this are shared, so no deadlines), and what tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import inside

settings.register_profile("house", deadline=None, max_examples=4 if inside.INTERPRETED else 40, derandomize=True)
settings.load_profile("house")

NAMES = {*inside.BACKENDS, "auto"}
FEW = 1  # cases of a test that Triton's interpreter runs every time


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--only-backend eager` is what `make quick` runs with."""
    parser.addoption("--only-backend", choices=inside.HERE, help="of the tests that run with each backend, only these")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other backends.

    Triton's interpreter takes milliseconds where others take microseconds. What has run without it is left out, too. Of
    the many cases of a test all but a few are slow ones, and so are all that are marked with `many_steps`.
    """
    only = config.getoption("--only-backend")
    others, cases = set(), dict[str, list[pytest.Item]]()
    for item in items:
        spec: Any = getattr(item, "callspec", None)
        values = list(spec.params.values()) if spec else []
        values += [each for value in values if isinstance(value, tuple) for each in value]
        names = {value for value in values if isinstance(value, str) and value in NAMES}
        if only and names - {only}:
            others.add(item)
        if inside.INTERPRETED and "interpreted" not in item.path.parts:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
            if not names:
                others.add(item)
    for same in cases.values():
        few = {same[i * len(same) // FEW] for i in range(FEW)}
        for item in same:
            if item not in few or item.get_closest_marker("many_steps"):
                item.add_marker("slow")
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def stand_for(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let `backend="auto"` be this one."""
    if name == "eager":
        inside.let_auto_take_eager(patch)
    if name == "triton":
        inside.let_auto_take_triton(patch)


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


if inside.INTERPRETED:
    import numpy as np

    @pytest.fixture(autouse=True)
    def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Triton's interpreter, made quick: most of its time is spent before functions that a kernel calls begin."""
        from triton.runtime import interpreter

        from tests.interpreted.quick import patch_once

        monkeypatch.setattr(interpreter, "_patch_lang", patch_once(interpreter._patch_lang))
        if "interpreted" not in request.path.parts:
            inside.skip_what_triton_refuses(monkeypatch)
        with np.errstate(all="ignore"):  # it computes with NumPy, which would warn of every infinity
            yield
