"""Triton's kernels in its interpreter, on a CPU: `tests/kernels/test_triton.py` runs this folder in a process of its own.

To run a file by hand: TRITON_INTERPRET=1 python -m pytest tests/interpreted/test_bits.py
"""

import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def silent_numpy() -> Iterator[None]:
    """The interpreter computes with NumPy, which would warn of every infinity."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let functions that a kernel calls do without patching the language anew each time: that is most of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: list[set[str]] = []  # the languages that the kernel that is running has patched

    class Scope:
        def __init__(self, inner: Any):
            self.inner = inner

        def restore(self) -> None:
            patched.clear()
            self.inner.restore()

    def once(function: Any) -> Scope | None:
        seen = {name for name, lang in (("tl", tl), ("core", tl.core)) if lang in _modules(function)}
        if patched and seen <= patched[0]:
            return None
        scope = patch(function)
        if patched:
            patched[0] |= seen
            return None
        patched.append(seen)
        return Scope(scope)

    monkeypatch.setattr(interpreter, "_patch_lang", once)


def _modules(function: Any) -> list[object]:
    return [value for value in function.__globals__.values() if inspect.ismodule(value)]


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
