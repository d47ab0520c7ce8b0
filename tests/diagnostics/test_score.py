"""What is found in runs whose faults are known, and that healthy ones are left alone."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from adafactor.diagnostics.rules import RULES
from tests.diagnostics.runs import CASES, Case, kinds

SEED = 200  # the limits were chosen with others
UNSEEN = {None, "nothing to learn"}  # which the page says that it does not see


def test_every_rule_has_a_run_and_there_are_healthy_ones() -> None:
    assert {*RULES, "loss grows"} <= {case.fault for case in CASES}
    assert sum(case.fault is None for case in CASES) >= 10 and len(CASES) > 30
    assert len({case.name for case in CASES}) == len(CASES)


def slow(case: Case) -> ParameterSet:
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.long else [])


@pytest.mark.parametrize("case", [slow(case) for case in CASES])
def test_the_fault_of_a_run_is_found_and_nothing_else(case: Case) -> None:
    findings = case.findings(SEED)
    assert not case.false(findings)
    assert kinds(findings) - case.also == {case.fault} - UNSEEN
    for finding in findings:
        assert str(finding).isascii(), "a Windows console or file may take no more"
