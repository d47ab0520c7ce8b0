"""What is found in runs whose faults are known, and that healthy ones are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

from adafactor import Adafactor, Record
from adafactor.diagnostics import Finding, Report, diagnose
from adafactor.diagnostics.rules import RULES
from tests.diagnostics.runs import ABSOLUTE, CASES, Case, Language, Perceptron, kinds, regression, run


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


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
    text = " ".join(str(finding) for finding in findings if finding.kind == case.fault)
    assert all(words in " ".join(text.split()) for words in case.says), text
    for finding in findings:
        assert str(finding).isascii(), "a Windows console or file may take no more"


def test_a_parameter_poisoned_because_nobody_looked_is_told() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters(), on_nonfinite="ignore", backend="eager")
    history = run(optimizer, lambda t: regression(model)(t) * (math.nan if t == 10 else 1), steps=20)
    found = only(diagnose(history), "not finite")
    assert "the parameter is lost" in found.what and 'on_nonfinite="skip"' in found.change


def test_a_bounded_decay_forgets_whatever_the_decay_rate() -> None:
    def told(**keywords: Any) -> set[str]:
        model = Perceptron()
        return kinds(diagnose(run(Adafactor(model.named_parameters(), decay_rate=1.2, **keywords), regression(model))))

    assert told() == {"never forgets"} and told(beta2_max=0.999) == set()


def test_a_matrix_that_starts_at_zero_and_outgrows_its_scale_is_told() -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    optimizer = Adafactor(model.named_parameters(), lr=0.3, lr_decay=None, eps=(1e-30, 1.0), maximize=True)
    found = only(diagnose(run(optimizer, regression(model), every=1), losses=[]), "growing")
    assert "2.weight" in found.parameters


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([5.8, 40, 200, 900, 1300, 1333], True),
        ([5.0, 4.0, 3.0, 2.0, 4.0, 5.0], True),  # it has come up again
        ([5.8, 4.0, math.nan, math.nan, math.nan], True),
        ([5.0, 4.0, 3.0, 2.0, 2.5, 2.2], False),
        ([2.0, 2.1, 1.9, 2.05, 1.95, 2.1], False),  # it wavers, as that of a model that is trained already
        ([2.0, 900.0], False),  # too few to say
    ],
)
def test_a_loss_that_grows_is_told(losses: list[float], found: bool) -> None:
    assert kinds(diagnose([], losses=losses)) == ({"loss grows"} if found else set())
    model = Perceptron()
    history = run(Adafactor(model.named_parameters()), regression(model), steps=len(losses), every=1)
    assert kinds(diagnose(history, losses=losses)) == ({"loss grows"} if found else set())


def test_steps_too_large_are_told_even_if_the_first_report_comes_late_and_the_weights_have_grown() -> None:
    model = Language()
    optimizer = Adafactor(model.named_parameters(), lr=0.1, backend="eager", **ABSOLUTE)
    history = run(optimizer, model.loss, steps=40, every=20)
    found = only(diagnose(history, losses=[]), "overwritten")
    assert found.severity == "warning" and "relative=True" in found.change and len(found.parameters) > 5


@pytest.mark.parametrize(
    ("rate", "found"),
    [
        (lambda t: 3e-4, True),
        (lambda t: 3e-4 * (1 - t / 40), True),
        (lambda t: 3e-5 * (t + 1), False),  # a warm-up, which goes on
        (lambda t: 1e-2 if t < 8 else 3e-4, False),
    ],
    ids=["constant", "decaying", "warm-up", "decayed"],
)
def test_an_lr_that_looks_like_adamws_is_told_unless_a_schedule_passes_through_it(
    rate: Callable[[int], float], found: bool
) -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters(), lr=1.0, lr_decay=None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    findings = diagnose(run(optimizer, regression(model), scheduler=scheduler))
    assert kinds(findings) == ({"hardly moves"} if found else set())
    assert all("relative=False" in finding.change for finding in findings)


def test_steps_that_have_become_small_with_time_are_as_meant() -> None:
    record = Record("w", (16, 16), 1.0, 1e-4, 0.1, 1e-3, 0.999, steps=5, clipped=0, skipped=0, state_bytes=132)
    late, early = Report([record], step=1_000_000), Report([record], step=1000)
    assert diagnose([late, late]) == [] and kinds(diagnose([early, early])) == {"hardly moves"}


def test_diagnose_takes_an_optimizer_a_report_or_several() -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    optimizer = Adafactor(model.named_parameters())
    reports = run(optimizer, regression(model), steps=6, every=3)
    assert kinds(diagnose(reports[0])) == kinds(diagnose(reports[:1])) >= {"on the floor"}
    assert "on the floor" in kinds(diagnose(optimizer)) & kinds(diagnose(optimizer)), "also right after a watch"
    assert diagnose([]) == []
    for wrong in (3, ["a"], list(reports[0])):
        with pytest.raises(TypeError, match="list of Reports"):
            diagnose(wrong)
