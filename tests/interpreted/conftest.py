"""Triton's kernels in its interpreter, on a CPU."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests import interpreter

collect_ignore_glob = [] if interpreter.IS_THERE else ["test_*.py"]


@pytest.fixture(params=["in order", "backwards", "shuffled"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The order in which the programs of a launch run, along each axis of its grid."""
    from triton.runtime.interpreter import interpreter_builder as builder

    places: list[list[int]] = []
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    random = np.random.default_rng(0)

    def dim(*sizes: int) -> None:
        kinds = {"in order": np.arange, "backwards": lambda n: np.arange(n)[::-1], "shuffled": random.permutation}
        places[:] = [kinds[request.param](size).tolist() for size in sizes]
        set_dim(*sizes)

    monkeypatch.setattr(builder, "set_grid_dim", dim)
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *at: set_index(*(place[i] for place, i in zip(places, at, strict=True)))
    )
    yield request.param
