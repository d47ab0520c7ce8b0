"""Triton's kernels in its interpreter, on a CPU."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests import interpreter

collect_ignore_glob = [] if interpreter.IS_THERE else ["test_*.py"]


@pytest.fixture(params=["in order", "backwards", "shuffled"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The order in which the programs of a launch run."""
    from triton.runtime.interpreter import interpreter_builder as builder

    places: list[int] = []
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    random = np.random.default_rng(0)

    def dim(x: int, y: int, z: int) -> None:
        kinds = {"in order": np.arange(x), "backwards": np.arange(x)[::-1], "shuffled": random.permutation(x)}
        places[:] = kinds[request.param].tolist()
        set_dim(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(places[x], y, z))
    yield request.param
