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
        for size in sizes:
            kinds = {
                "in order": np.arange(size),
                "backwards": np.arange(size)[::-1],
                "shuffled": random.permutation(size),
            }
            places.append(kinds[request.param].tolist())
        del places[: -len(sizes)]
        set_dim(*sizes)

    monkeypatch.setattr(builder, "set_grid_dim", dim)
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *at: set_index(*(place[i] for place, i in zip(places, at, strict=True)))
    )
    yield request.param
