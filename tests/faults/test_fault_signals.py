"""Signals whose handlers raise, at random moments of a step: SIGINT, SIGTERM and SIGUSR1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.launch import found

CASES: dict[str, tuple[str, int, dict[str, str]]] = {
    "eager, 1 thread": ("eager", 1, {}),
    "eager, 2 threads": ("eager", 2, {}),
    "cpu, 1 thread": ("cpu", 1, {}),
    "cpu, 2 threads": ("cpu", 2, {}),
    "cpu, 2 threads of which OpenMP gives 1": ("cpu", 2, {"OMP_THREAD_LIMIT": "1"}),
}
FEW, MANY = 40, 200  # trials of each case; the many make 1,000 interrupted steps together


@pytest.fixture(scope="module", params=CASES)
def few(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What so many interrupted steps came to."""
    return interrupted(request.param, FEW)


def interrupted(case: str, trials: int) -> dict[str, Any]:
    backend, threads, environment = CASES[case]
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **environment}
    counts = found("interrupted", backend, threads, trials, **environment)
    print(case, counts)
    assert counts["trials"] >= trials
    return counts


def test_the_signals_come_in_the_middle_of_steps(few: dict[str, Any]) -> None:
    """Without this the others say nothing."""
    assert few["inside"] >= FEW // 10


def test_every_exception_of_a_handler_reaches_the_caller(few: dict[str, Any]) -> None:
    assert few["raised"] == few["caught"] == few["trials"]


def test_every_tensor_has_taken_all_of_the_step_or_nothing_of_it(few: dict[str, Any]) -> None:
    assert few["torn"] == 0


def test_a_step_that_returns_has_been_taken(few: dict[str, Any]) -> None:
    assert few["returned, but not taken"] == 0


def test_the_step_after_an_interrupted_one_is_right(few: dict[str, Any]) -> None:
    assert few["next step wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_of_it_holds_over_many_interrupted_steps(case: str) -> None:
    counts = interrupted(case, MANY)
    assert counts["raised"] == counts["caught"] == counts["trials"]
    assert (counts["torn"], counts["returned, but not taken"], counts["next step wrong"]) == (0, 0, 0)
