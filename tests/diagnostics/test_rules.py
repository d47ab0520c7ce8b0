"""What the diagnostics say of real trainings, sick and healthy, and that they say nothing of the healthy."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor, Record
from adafactor.core.settings import Settings
from adafactor.diagnostics import Finding, FullMoment, History, Report, Watch, diagnose
from adafactor.diagnostics.report import About
from studies.diagnoses import ABSOLUTE, Idle, Language, Perceptron, block_diagonal, kinds, language, regression, run


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


def test_gradients_that_grow_are_told_as_an_out_of_date_second_moment() -> None:
    def told(**keywords: Any) -> list[Finding]:
        model = Perceptron()
        fit = regression(model)
        optimizer = Adafactor(model.named_parameters(), lr=1e-3, **ABSOLUTE, **keywords)
        # the loss of other data, from step 60 on: gradients grow twenty-fold within a step
        return diagnose(run(optimizer, lambda t: fit(t) * (20 if t >= 60 else 1), steps=80))

    slow = only(told(beta2=0.999, clip=None), "out of date")
    assert slow.severity == "warning" and slow.certainty == "likely"
    assert slow.parameters == ("0.weight", "2.weight"), "vectors of 16 and 8 are too small to tell"
    assert "clip=1.0" in slow.change and "beta2=None" in slow.change and "warm-up" in slow.change
    assert kinds(told()) == {"loss grows"}, "with what is to be changed: clip=1.0 and beta2=None"


def test_a_report_without_settings_gives_the_general_advice() -> None:
    record = Record("w", (16, 16), 7.0, 0.0, 1e-3, 0.1, 0.07, 0.999, 5, 0, 100)
    (found,) = diagnose([[record], [record], [record]])
    assert found.kind == "out of date" and "if it is off" in found.change and found.severity == "warning"


def test_a_fallen_gradient_is_told_as_updates_smaller_than_meant() -> None:
    model = Perceptron()
    fit = regression(model)
    optimizer = Adafactor(model.named_parameters(), beta2=0.999)
    run(optimizer, lambda t: fit(t) * 1e3, steps=20)  # as a spike of the loss leaves it
    history = run(optimizer, fit, steps=20)
    found = only(diagnose(history), "too small")
    assert found.parameters == ("0.weight", "2.weight") and found.certainty == "likely"
    assert "beta2=None" in found.change


def test_factors_that_cannot_fit_are_told_apart_from_old_ones() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    loss = block_diagonal(layer)
    with FullMoment(optimizer := Adafactor(layer.named_parameters(), clip=None, lr=3e-3), "*") as moment:
        history = run(optimizer, loss, steps=20)
    found = diagnose(history)
    assert kinds(found) == {"poor fit"} and found[0].certainty == "certain" and "factored=False" in found[0].change
    (fit,) = moment.compare()
    assert fit.largest_ratio > 1e3 and fit.rms_factored > 10 * fit.rms_full
    whole = Adafactor(layer.named_parameters(), clip=None, factored=False, lr=3e-3)
    assert diagnose(run(whole, loss, steps=20)) == []


def test_steps_below_the_resolution_of_bfloat16_are_told_and_most_elements_do_not_move() -> None:
    model = Language(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Adafactor(model.named_parameters(), lr=5e-5, backend="eager", **ABSOLUTE)
    history = run(optimizer, model.loss, steps=20)
    found = only(diagnose(history), "lost to rounding")
    assert 'rounding="stochastic"' in found.change and 'rounding="kahan"' in found.change
    stayed = {name: float((p == before[name]).double().mean()) for name, p in model.named_parameters()}
    assert len(found.parameters) > 5 and all(stayed[name] > 0.5 for name in found.parameters), stayed
    large = {r.name for r in history.reports[-1].records if r.relative_change > torch.finfo(torch.bfloat16).eps / 4}
    assert len(large) > 5 and all(stayed[name] < 0.5 for name in large), "the limit is not far too high either"


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_that_loses_nothing_is_not_told_of(rounding: str) -> None:
    history = language(20, dtype=torch.bfloat16, lr=5e-5, rounding=rounding, **ABSOLUTE)
    assert "lost to rounding" not in kinds(diagnose(history))


def test_a_loss_that_is_not_finite_is_told_apart_from_a_layer_that_overflows() -> None:
    def told(broken: Callable[[int, Perceptron, Tensor], None]) -> Finding:
        model = Perceptron()
        optimizer = Adafactor(model.named_parameters())
        fit = regression(model)
        history = History()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with Watch(optimizer, history, every=4):
                for t in range(20):
                    optimizer.zero_grad()
                    fit(t).backward()
                    if t in (7, 8, 13):
                        broken(t, model, torch.tensor(math.nan))
                    optimizer.step()
            return only(diagnose(history), "not finite")

    def every(t: int, model: Perceptron, bad: Tensor) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(bad)

    def last(t: int, model: Perceptron, bad: Tensor) -> None:
        assert model.last.weight.grad is not None
        model.last.weight.grad[0, 0] = bad

    everywhere, somewhere = told(every), told(last)
    assert len(everywhere.parameters) == 4 and "the loss itself" in everywhere.change
    assert somewhere.parameters == ("2.weight",) and "these layers overflow" in somewhere.change
    assert somewhere.figure.startswith("3 steps skipped") and somewhere.certainty == "certain"


def test_a_parameter_poisoned_because_nobody_looked_is_told() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters(), on_nonfinite="ignore", backend="eager")
    history = run(optimizer, lambda t: regression(model)(t) * (math.nan if t == 10 else 1), steps=20)
    found = only(diagnose(history), "not finite")
    assert "the parameter is lost" in found.what and 'on_nonfinite="skip"' in found.change


def test_layers_without_a_gradient_and_with_none_but_zeros_are_told_apart() -> None:
    model = Idle()
    found = diagnose(run(Adafactor(model.named_parameters()), regression(model)))
    assert only(found, "unused").parameters == ("unused.weight", "unused.bias")
    assert only(found, "zero gradient").parameters == ("cut.weight", "cut.bias")
    assert kinds(found) == {"unused", "zero gradient"}


def test_a_scheduler_that_has_come_to_its_end_is_told() -> None:
    model = Perceptron()
    nn.init.constant_(model.last.weight, 1e-4)
    optimizer = Adafactor(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t >= 10 else 1.0)
    first = run(optimizer, regression(model), steps=10, scheduler=scheduler)
    assert "no step size" not in kinds(diagnose(first))
    assert only(diagnose(run(optimizer, regression(model))), "no step size").certainty == "certain"


def test_a_matrix_that_starts_at_zero_is_told_to_be_on_the_floor() -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    optimizer = Adafactor(model.named_parameters())
    found = only(diagnose(run(optimizer, regression(model))), "on the floor")
    assert found.parameters == ("2.weight",) and "100 steps" in found.figure
    optimizer = Adafactor(model.named_parameters(), eps=(1e-30, 1e-1))
    run(optimizer, regression(model), steps=100)
    assert "on the floor" not in kinds(diagnose(run(Adafactor(model.named_parameters()), regression(model))))


def test_updates_that_are_always_clipped_are_told() -> None:
    model = Perceptron()
    found = diagnose(run(Adafactor(model.named_parameters(), clip=0.2), regression(model), steps=220, every=20))
    assert only(found, "always clipped").parameters[0] == "0.weight" and "clip=1.0" in found[0].change
    model = Perceptron()
    assert diagnose(run(Adafactor(model.named_parameters()), regression(model), steps=220, every=20)) == []


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


def test_a_matrix_of_zeros_without_a_floor_is_told_to_have_no_step_size() -> None:
    model = Perceptron()
    for name in ("0.weight", "2.weight"):
        nn.init.zeros_(model.get_parameter(name))
    optimizer = Adafactor(model.named_parameters(), eps=(1e-30, 0.0), lr=1e-3)
    found = only(diagnose(run(optimizer, regression(model))), "no step size")
    assert found.parameters == ("0.weight", "2.weight")


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
    record = Record("w", (16, 16), 1.0, 0.0, 1e-4, 0.1, 1e-3, 0.999, 5, 0, 100)
    late = Report(1_000_000, (record,), {"w": About("float32", True, Settings())})
    early = replace(late, step=1000)
    assert diagnose([late, late]) == [] and kinds(diagnose([early, early])) == {"hardly moves"}


def test_diagnose_takes_an_optimizer_a_report_records_and_a_history() -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    optimizer = Adafactor(model.named_parameters())
    history = run(optimizer, regression(model), steps=6, every=3)
    zeros = {"zero gradient"}  # of the first layer, for as long as the second is zero
    records = [list(report.records) for report in history]
    with_settings = zeros | {"on the floor"}
    first = history.reports[0]
    assert kinds(diagnose([first])) == kinds(diagnose(first)) >= {"on the floor"}
    assert kinds(diagnose(history)) == kinds(diagnose(history.reports)) <= with_settings
    assert kinds(diagnose(records[0])) == kinds(diagnose([records[0]])) <= zeros, "no dtype and no settings"
    loss = regression(model)(7)
    loss.backward()
    optimizer.step()
    assert "on the floor" in kinds(diagnose(optimizer)) & kinds(diagnose(optimizer)), "also right after a report"
    assert diagnose([]) == []
    for wrong in (3, ["a"], [[1]]):
        with pytest.raises(TypeError, match="report"):
            diagnose(wrong)


def test_a_finding_reads_as_what_where_figure_and_change() -> None:
    model = Perceptron()
    text = str(diagnose(run(Adafactor(model.named_parameters(), lr=0.5, **ABSOLUTE), regression(model)))[0])
    assert [line.strip().split(":")[0] for line in text.splitlines() if not line.startswith("    ")] == [
        "warning",
        "where",
        "figure",
        "change",
    ]
    assert max(map(len, text.splitlines())) <= 112


@pytest.mark.slow
def test_the_example_finds_the_papers_unstable_setting_and_nothing_in_the_defaults(tmp_path: Path) -> None:
    words = ["examples/diagnostics.py", "--steps", "30", "--output", str(tmp_path)]
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(list(tmp_path.glob("*.png"))) == 3
    found = {name: diagnose(History.load(tmp_path / f"{name}.jsonl")) for name in ("default", "unstable", "changed")}
    assert found["default"] == []
    assert only(found["unstable"], "out of date").severity == "warning"
    assert "out of date" not in kinds(found["changed"])
    assert "where:" in run.stdout and "divergence" in run.stdout
