"""What is found in runs whose faults are known, and that the page says so."""

from __future__ import annotations

import pytest

from adafactor.diagnostics.rules import RULES
from studies.diagnoses import CASES, PAGE, SEEDS, Case, kinds, score, table

FAST = [case for case in CASES if not case.long]


def test_every_rule_has_a_run_and_there_are_healthy_ones() -> None:
    assert {*RULES, "loss grows"} <= {case.fault for case in CASES}
    assert sum(case.fault is None for case in CASES) >= 10 and len(CASES) > 30
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_the_fault_of_a_run_is_found_and_nothing_else(case: Case) -> None:
    findings = case.findings(SEEDS[0])
    assert not case.false(findings)
    unseen = {None, "nothing to learn"}  # which the page says that it does not see
    assert kinds(findings) - case.also == {case.fault} - unseen
    for finding in findings:
        assert str(finding).isascii(), "a Windows console or file may take no more"


@pytest.mark.slow
def test_the_page_shows_what_is_found_missed_and_a_false_alarm() -> None:
    assert table(score()) in PAGE.read_text(encoding="utf-8")
