"""What needs a process of its own: forks after threads have started, and memory that is not given back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import inside
from tests.launch import python

MB = 1024
TIMES = {"steps": 3000, "optimizers": 400}


def found(program: str, *words: str, **environment: str) -> Any:
    """What a program of this folder prints in its last line, as JSON."""
    done = python("-m", f"tests.faults.{program}", *words, environment=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_forked_child_takes_the_step_of_its_parent() -> None:
    """As data loaders and launchers fork; first where the child is the first to use the kernels."""
    cases = ["cpu, before any step", "cpu, after steps", "eager, after steps"]
    assert found("forked", *cases, OMP_WAIT_POLICY="PASSIVE") == [["done", True]] * 3


@pytest.mark.parametrize("backend", inside.HERE)
def test_memory_does_not_grow_over_many_steps_and_many_optimizers(backend: str) -> None:
    """In kB; tests/attack/test_lifetime.py has single parameters."""
    grown = found("grown", backend, *(f"{what}={times}" for what, times in TIMES.items()))
    assert grown.keys() == TIMES.keys() and max(grown.values()) < 2 * MB, grown
