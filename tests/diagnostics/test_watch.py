"""A report every so many steps, for every sink."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, step_in_backward
from adafactor.diagnostics import Report, Watch, unwrap
from tests.diagnostics.runs import Perceptron, regression, run


def test_every_so_many_steps_all_sinks_get_the_same_report_and_a_last_one() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    got: list[list[Report]] = [[], []]
    with Watch(optimizer, got[0].append, got[1].append, every=3):
        for t in range(8):
            regression(model)(t).backward()
            optimizer.step()
    assert [report.step for report in got[0]] == [3, 6, 8] and got[0] == got[1]
    assert [report[0].steps for report in got[0]] == [3, 3, 2]
    assert got[0][0][0].dtype == torch.float32 and got[0][0][0].settings.clip == 1.0
    assert [record.steps for record in optimizer.report()] == [8] * 4, "the optimizer counts on"
    optimizer.step()
    assert len(got[0]) == 3, "closed"


def test_a_watch_goes_on_counting_after_a_resume_and_reports_when_training_fails() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    run(optimizer, regression(model), steps=5)
    resumed = Adafactor(model.named_parameters())
    resumed.load_state_dict(optimizer.state_dict())
    seen: list[int] = []
    with pytest.raises(ZeroDivisionError), Watch(resumed, lambda report: seen.append(report.step), every=2):
        for t in range(4):
            regression(model)(t).backward()
            resumed.step()
            1 / (2 - t)
    assert seen == [7, 8]


def test_a_report_has_the_mean_of_the_losses_since_the_one_before() -> None:
    optimizer = Adafactor(Perceptron().named_parameters())
    history: list[Report] = []
    with Watch(optimizer, history.append, every=2) as watch:
        for loss in (1.0, torch.tensor(3.0, requires_grad=True), None, None, math.nan):
            if loss is not None:
                watch.add_loss(loss)
            optimizer.step()
    first, second, third = [report.loss for report in history]
    assert first == 2.0 and second is None and third is not None and math.isnan(third)


def test_groups_that_share_names_are_told_apart() -> None:
    model = Perceptron()
    groups: list[dict[str, Any]] = [{"params": layer.named_parameters()} for layer in (model[0], model.last)]
    optimizer = Adafactor(groups)
    (report,) = run(optimizer, regression(model), steps=1, every=1)
    names = [record.name for record in report]
    assert names == ["weight (group 0)", "bias (group 0)", "weight (group 1)", "bias (group 1)"]


def test_steps_inside_backward_are_watched() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    with step_in_backward(model, optimizer):
        reports = run(optimizer, regression(model), steps=3, every=2)
    assert [(report.step, report[0].steps) for report in reports] == [(2, 2), (3, 1)]


def test_names_come_from_the_model_where_the_optimizer_has_none() -> None:
    model = Perceptron()
    optimizer = Adafactor([*model.last.parameters(), nn.Parameter(torch.ones(2))])
    history: list[Report] = []
    with Watch(optimizer, history.append, model=model):
        regression(model)(0).backward()
        optimizer.step()
    assert [record.name for record in history[0]] == ["2.weight", "2.bias", "parameter 2"]
    assert [record.name for record in optimizer.report()] == ["parameter 0", "parameter 1", "parameter 2"]


def test_wrong_arguments_of_a_watch_are_told() -> None:
    optimizer = Adafactor(Perceptron().parameters())
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every"):
            Watch(optimizer, print, every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sink"):
        Watch(optimizer)
    with pytest.raises(TypeError, match="sink"):
        Watch(optimizer, "rms.png")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SGD"):
        unwrap(torch.optim.SGD(Perceptron().parameters()))
