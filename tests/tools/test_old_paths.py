"""Modules that have moved are still found where they were, and say where they are now."""

from __future__ import annotations

import importlib
import sys

import pytest

EQUATIONS = """
Decay Scalar average clip_divisor corrected_decay i_divergence increasing_decay relative_step root_mean_square row_scale
second_moment_decay step_size
"""
MOVED = [
    ("adafactor.traffic", "adafactor.planning.communication", "Traffic fully_sharded traffic"),
    ("adafactor.equations", "adafactor.core.equations", EQUATIONS),
]


@pytest.mark.parametrize(("old", "new", "names"), MOVED)
def test_an_old_path_has_the_same_names_and_warns_whoever_imports_it(
    old: str, new: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}") as caught:
        exec(compile(f"import {old}", "a_script.py", "exec"))
    assert [warning.filename for warning in caught] == ["a_script.py"]
    before, now = sys.modules[old], importlib.import_module(new)
    assert set(names.split()) <= set(before.__all__)
    assert all(getattr(before, name) is getattr(now, name) for name in before.__all__)
