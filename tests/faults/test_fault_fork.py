"""A process that forks after its threads have started, as data loaders and launchers do."""

from __future__ import annotations

import pytest

from tests.faults.launch import found


@pytest.mark.parametrize(
    ("backend", "moment"),
    [
        ("cpu", "after steps"),
        ("cpu", "before any step"),
        ("eager", "after steps"),
        pytest.param("eager", "before any step", marks=pytest.mark.slow),
    ],
)
def test_a_forked_child_takes_the_step_of_its_parent(backend: str, moment: str) -> None:
    """Also where the parent has used torch's threads, but no step: the child is the first to use the kernels."""
    assert found("forked", backend, moment, OMP_WAIT_POLICY="PASSIVE") == {"child": "done", "same bits": True}
