"""What the diagnostics say of real trainings, sick and healthy, and that they say nothing of the healthy."""

from __future__ import annotations

import copy
import io
import json
import math
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adafactor import Adafactor, Record, step_in_backward
from adafactor.diagnostics import (
    Finding,
    FullMoment,
    History,
    Live,
    Report,
    Watch,
    diagnose,
    figures,
    to_callback,
    to_tensorboard,
    unwrap,
)
from adafactor.diagnostics.moment import noise
from adafactor.diagnostics.naming import Named, common_prefix, grouped, select, shortened
from adafactor.diagnostics.table import rows
from adafactor.record import rms

TEXT = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes())).clamp(max=127)
ABSOLUTE: dict[str, Any] = {"relative": False, "lr_decay": None}


class Language(nn.Module):
    """A Transformer of bytes with norms after its layers, which makes it hard to start without warm-up."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Always the same weights."""
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(128, 32), nn.Parameter(torch.randn(32, 32) * 0.02)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 128, 0.0, batch_first=True) for _ in range(2))
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, 32) → (B, 32, 128)."""
        x = self.tokens(ids) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(32, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(x, self.tokens.weight)

    def loss(self, batch: int) -> Tensor:
        """Of eight stretches of text."""
        start = torch.randint(len(TEXT) - 33, (8, 1), generator=torch.Generator().manual_seed(batch))
        ids = TEXT[start + torch.arange(33)]
        return F.cross_entropy(self(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def run(
    optimizer: Adafactor,
    loss: Callable[[int], Tensor],
    steps: int = 40,
    every: int = 4,
    history: History | None = None,
    scheduler: Any = None,
) -> History:
    """Train, with a report every so many steps."""
    history = History() if history is None else history
    with Watch(optimizer, history, every=every):
        for t in range(steps):
            optimizer.zero_grad()
            loss(t).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return history


def language(steps: int = 40, every: int = 4, dtype: torch.dtype = torch.float32, **keywords: Any) -> History:
    model = Language(dtype)
    return run(Adafactor(model.named_parameters(), backend="eager", **keywords), model.loss, steps, every)


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


class Perceptron(nn.Sequential):
    """Two layers, always with the same weights."""

    def __init__(self) -> None:
        """12 → 16 → 8."""
        torch.manual_seed(0)
        super().__init__(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    @property
    def last(self) -> nn.Linear:
        """The second layer, with parameters `2.weight` and `2.bias`."""
        layer = self[2]
        assert isinstance(layer, nn.Linear)
        return layer


def regression(model: nn.Module) -> Callable[[int], Tensor]:
    """Learn a fixed linear map from fresh data at each step."""
    truth = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))

    def loss(batch: int) -> Tensor:
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(batch + 2))
        dtype = next(model.parameters()).dtype
        out: Tensor = model(x.to(dtype)).float()
        return (out - x @ truth).square().mean()

    return loss


# ---- the figures


@pytest.mark.parametrize("clip", [1.0, 0.2, None])
@pytest.mark.parametrize("relative", [True, False])
def test_the_relative_change_is_what_the_step_did(relative: bool, clip: float | None) -> None:
    model = Perceptron().double()
    optimizer = Adafactor(
        model.named_parameters(), clip=clip, relative=relative, lr=1e-3, lr_decay=None, backend="eager"
    )
    for t in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        (model(x).square().sum() * 10.0**t).backward()
        optimizer.step()
        for record, p, old in zip(optimizer.report(), model.parameters(), before, strict=True):
            size = old if relative else p.detach()  # absolute steps leave RMS(X) to the report
            expected = float((p.detach() - old).norm() / size.norm())
            assert record.relative_change == pytest.approx(expected, rel=1e-9)
            assert record.rms_parameter == pytest.approx(float(size.square().mean().sqrt()), rel=1e-12)


def test_a_parameter_of_zeros_changes_infinitely_and_one_without_gradient_not_at_all() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    p.grad, q.grad = torch.ones(3), torch.zeros(3)
    optimizer = Adafactor([p, q])
    optimizer.step()
    assert [record.relative_change for record in optimizer.report()] == [math.inf, 0.0]


def test_the_report_counts_steps_since_the_last_one() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.parameters())
    run(optimizer, regression(model), steps=3, every=100)
    assert [record.steps for record in optimizer.report()] == [0] * 4, "the watch took a report at its end"
    loss = regression(model)(0)
    loss.backward()
    optimizer.step()
    assert [record.steps for record in optimizer.report()] == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_of_a_parameter_is_that_of_a_sum_in_double(dtype: torch.dtype) -> None:
    scaled = torch.randn(700, 500).mul_(torch.logspace(-3, 3, 500)).to(dtype)
    wide, ones = scaled.view(100, 7, 500), torch.full((10_000_000,), 0.1, dtype=dtype)
    for x in (scaled, scaled.t(), wide.transpose(0, 1), wide[:, ::2], scaled[0, 0], scaled[:3, 0], ones):
        expected = float(x.double().square().mean().sqrt())
        assert rms(x) == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert math.isnan(rms(torch.empty(0)))


# ---- words


@pytest.mark.parametrize(
    ("keywords", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({**ABSOLUTE, "lr": 1e-3}, torch.float32),
        ({**ABSOLUTE, "lr": 1e-3, "beta1": 0.9, "momentum": "gradient"}, torch.float32),
    ],
    ids=["default", "bfloat16", "absolute", "momentum"],
)
def test_nothing_is_said_of_a_healthy_run(keywords: dict[str, Any], dtype: torch.dtype) -> None:
    history = language(dtype=dtype, **keywords)
    assert [str(finding) for finding in diagnose(history)] == []


def test_nothing_is_said_of_a_healthy_run_with_frozen_layers() -> None:
    model = Perceptron()
    model[0].requires_grad_(False)
    history = run(Adafactor(model.named_parameters()), regression(model))
    assert diagnose(history) == []


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
    assert told() == [], "with what is to be changed: clip=1.0 and beta2=None"


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
    scale = torch.cat([torch.full((8,), 3.0), torch.full((8,), 1 / 3)])

    def loss(t: int) -> Tensor:
        # two halves that do not see each other, of very different gradients: V is block-diagonal, far from rank 1
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(t))
        upper, lower = F.linear(x[:, :8], layer.weight[:8, :8]), F.linear(x[:, 8:], layer.weight[8:, 8:])
        return ((torch.cat([upper, lower], 1) - x) * scale).square().mean()

    with FullMoment(optimizer := Adafactor(layer.named_parameters(), clip=None, lr=1e-4), "*") as moment:
        history = run(optimizer, loss, steps=20)
    found = diagnose(history)
    assert kinds(found) == {"poor fit"} and found[0].certainty == "certain" and "factored=False" in found[0].change
    (fit,) = moment.compare()
    assert fit.largest_ratio > 1e3 and fit.rms_factored > 10 * fit.rms_full
    whole = Adafactor(layer.named_parameters(), clip=None, factored=False, lr=1e-4)
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
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.cut = Perceptron(), nn.Linear(3, 3), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x) + 0 * self.cut(x)
            return out

    model = Part()
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


def test_steps_that_overwrite_a_matrix_are_told() -> None:
    model = Perceptron()
    found = diagnose(run(Adafactor(model.named_parameters(), lr=0.5, **ABSOLUTE), regression(model)))
    assert "relative=True" in only(found, "overwritten").change


def test_a_decay_rate_above_1_is_told() -> None:
    model = Perceptron()
    found = diagnose(run(Adafactor(model.named_parameters(), decay_rate=1.2), regression(model)))
    assert len(only(found, "never forgets").parameters) == 4


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
    assert "on the floor" in kinds(diagnose(optimizer))
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


# ---- names


def test_layers_that_differ_by_number_are_one_kind() -> None:
    named: list[Named] = [(f"h.{i}.{part}", (3,)) for i in range(12) for part in ("ln.weight", "attn.weight")]
    named += [("wte", (5, 3)), ("odd.0.weight", (2,)), ("odd.1.weight", (2,)), ("odd.2.weight", (4,))]
    assert list(grouped(named)) == ["h.*.ln.weight", "h.*.attn.weight", "wte", "odd.{0–1}.weight", "odd.2.weight"]
    chosen = ["wte", *(f"h.{i}.ln.weight" for i in range(12)), *(f"h.{i}.attn.weight" for i in (3, 5, 6, 7))]
    assert shortened(chosen, named) == "h.*.ln.weight (12), h.{3,5–7}.attn.weight (4), wte"
    many: list[Named] = [(f"part{chr(97 + i)}.weight", (i,)) for i in range(20)]
    assert shortened([name for name, _ in many], many).endswith("and 14 more kinds")
    assert common_prefix(["a.b.c", "a.b.d.e"]) == "a.b." and common_prefix(["a.b"]) == ""


def test_kinds_with_the_same_label_are_kept_apart_by_shape() -> None:
    named = [(f"a.{i}.{j}.w", (1 + (i + j) % 2,)) for i in range(2) for j in range(2)]
    assert list(grouped(named).values()) == [["a.0.0.w", "a.1.1.w"], ["a.0.1.w", "a.1.0.w"]]


def test_unnamed_parameters_are_not_taken_for_layers() -> None:
    assert len(grouped([("parameter 0", (3,)), ("parameter 1", (3,))])) == 2


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    assert select(["h.0.w", "h.1.w", "b"], ["h.*", "b"]) == ["h.0.w", "h.1.w", "b"]
    with pytest.raises(ValueError, match=r"no parameter is called 'x\.\*'; there are a, b"):
        select(["a", "b"], "x.*")


# ---- the whole second moment


def direct(gradients: list[Tensor], decays: list[float], eps1: float = 1e-30) -> tuple[np.ndarray, float]:
    """Σ of weighted G² + ε₁ in float64 and the sum of the weights, from the definition."""
    v, total = np.zeros(gradients[0].shape), 0.0
    for i, g in enumerate(gradients):
        weight = (1 - decays[i]) * math.prod(decays[i + 1 :])
        v, total = v + weight * (g.double().numpy() ** 2 + eps1), total + weight
    return v, total


@pytest.mark.parametrize("estimator", ["outer", "row", "column"])
@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("begin", [0, 5], ids=["from the first step", "in mid-run"])
def test_the_fit_equals_a_direct_computation(estimator: str, beta2: float | None, begin: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(7, 5, generator=generator))
    gradients = [torch.randn(7, 5, generator=generator) * (1 + i) for i in range(12)]
    optimizer = Adafactor([("layer.weight", p)], factored=estimator, beta2=beta2)
    moment = None
    for t, g in enumerate(gradients):
        if t == begin:
            moment = FullMoment(optimizer, "layer.*")
        p.grad = g
        optimizer.step()
    assert moment is not None
    (fit,) = moment.compare()

    decays = [1 - t**-0.8 if beta2 is None else 0.9 * (1 - 0.9 ** (t - 1)) / (1 - 0.9**t) for t in range(1, 13)]
    v, total = direct(gradients[begin:], decays[begin:])
    v /= total
    row, col = v.mean(1, keepdims=True), v.mean(0, keepdims=True)
    estimate = {"outer": row * col / row.mean(), "row": row + 0 * v, "column": col + 0 * v}[estimator]
    last = gradients[-1].double().numpy()
    mine, full = last / np.sqrt(estimate), last / np.sqrt(v)
    expected = {
        "steps": 12 - begin,
        "coverage": total,
        "divergence": (v * np.log(v / estimate) - v + estimate).sum() / v.sum(),
        "largest_ratio": (v / estimate).max(),
        "smallest_ratio": (v / estimate).min(),
        "within_two": np.mean((v / estimate >= 0.25) & (v / estimate <= 4)),
        "cosine": (mine * full).sum() / np.linalg.norm(mine) / np.linalg.norm(full),
        "difference": np.linalg.norm(mine - full) / np.linalg.norm(full),
        "rms_factored": np.sqrt((mine**2).mean()),
        "rms_full": np.sqrt((full**2).mean()),
    }
    for name, value in expected.items():
        assert getattr(fit, name) == pytest.approx(value, rel=1e-10), name
    if begin == 0:  # then the estimate is the optimizer's own
        state, shapes = optimizer.state[p], {"row": (7, 1), "col": (1, 5)}
        kept = {key: state[key].double().view(shape).numpy() for key, shape in shapes.items() if key in state}
        for key, mean in (("row", row), ("col", col)):
            assert key not in kept or np.allclose(kept[key], mean, rtol=1e-6)
        assert optimizer.report()[0].rms_update == pytest.approx(fit.rms_factored, rel=1e-6)


def test_a_second_moment_of_rank_1_fits_and_one_without_structure_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    outer = torch.rand(20, 1, generator=generator) * torch.rand(1, 30, generator=generator)
    p, q, r = (nn.Parameter(torch.ones(20, 30)) for _ in range(3))
    optimizer = Adafactor([("rank one", p), ("noise", q), ("identity", r)])
    with FullMoment(optimizer, "*") as moment:
        for _ in range(100):
            p.grad = outer * torch.randn((), generator=generator)
            q.grad = outer.sqrt() * torch.randn(20, 30, generator=generator)
            r.grad = torch.eye(20, 30) + 1e-3
            optimizer.step()
    fits = {fit.name: fit for fit in moment.compare()}
    assert [fit.name for fit in moment.compare()] == ["identity", "noise", "rank one"], "the worst first"
    assert abs(fits["rank one"].divergence) < 1e-12 and fits["rank one"].cosine == pytest.approx(1)
    assert fits["noise"].divergence == pytest.approx(fits["noise"].noise, rel=0.3)
    assert fits["identity"].divergence > 2 and fits["identity"].cosine < 0.5
    assert "divergence" in str(fits["identity"])


def test_the_divergence_of_noise_is_that_of_chi_squares() -> None:
    for samples in (1, 5, 40):
        draws = torch.randn(200_000, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mean = draws.square().mean(1)
        assert noise(samples) == pytest.approx(float((mean * mean.log()).mean()), rel=0.03)


def test_skipped_steps_and_steps_without_a_gradient_are_not_observed_and_nothing_is_changed() -> None:
    def end(observe: bool) -> tuple[nn.Parameter, Any]:
        p = nn.Parameter(torch.ones(4, 4))
        optimizer = Adafactor([("p", p)])
        moment = FullMoment(optimizer, "p") if observe else None
        for t in range(6):
            p.grad = None if t == 2 else torch.arange(16.0).view(4, 4) * (math.nan if t == 4 else 1 + t)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                optimizer.step()
        return p, moment

    (seen, moment), (unseen, _) = end(True), end(False)
    assert moment.compare()[0].steps == 4 and torch.equal(seen, unseen)


def test_gradients_of_a_closure_are_observed() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    with FullMoment(optimizer, "2.weight") as moment:

        def closure() -> float:
            optimizer.zero_grad()
            loss = regression(model)(0)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
    assert moment.compare()[0].rms_factored == pytest.approx(optimizer.report()[2].rms_update, rel=1e-6)
    with torch.no_grad():
        optimizer.step()
    assert moment.compare()[0].steps == 1, "closed"


def test_convolutions_and_vectors_are_observed_as_they_are_factored() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(3, 4, 8, 8)
    model(x)
    optimizer = Adafactor(model.named_parameters())
    with FullMoment(optimizer, "*") as moment:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    fits = {fit.name: fit for fit in moment.compare()}
    reports = {record.name: record for record in optimizer.report()}
    assert fits["0.bias"].estimator == "full" and fits["0.bias"].divergence == 0
    for name, fit in fits.items():
        assert fit.rms_factored == pytest.approx(reports[name].rms_update, rel=1e-5), name


# ---- watching


def test_every_so_many_steps_all_sinks_get_the_same_report_and_a_last_one() -> None:
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    got: list[list[Report]] = [[], []]
    with Watch(optimizer, got[0].append, got[1].append, every=3):
        for t in range(8):
            regression(model)(t).backward()
            optimizer.step()
    assert [report.step for report in got[0]] == [3, 6, 8] and got[0] == got[1]
    assert [report.records[0].steps for report in got[0]] == [3, 3, 2]
    assert got[0][0].about["0.weight"].dtype == "float32" and got[0][0].about["0.weight"].settings.clip == 1.0
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


def test_groups_that_share_names_are_told_apart() -> None:
    model = Perceptron()
    groups: list[dict[str, Any]] = [{"params": layer.named_parameters()} for layer in (model[0], model.last)]
    optimizer = Adafactor(groups)
    with FullMoment(optimizer, "weight*") as moment:
        history = run(optimizer, regression(model), steps=1, every=1)
    names = [record.name for record in history.reports[0].records]
    assert names == ["weight (group 0)", "bias (group 0)", "weight (group 1)", "bias (group 1)"]
    assert {fit.name: fit.shape for fit in moment.compare()} == {names[0]: (16, 12), names[2]: (8, 16)}


def test_steps_inside_backward_are_watched_and_their_gradients_are_missed() -> None:
    model, history = Perceptron(), History()
    optimizer = Adafactor(model.named_parameters())
    with step_in_backward(model, optimizer):
        run(optimizer, regression(model), steps=3, every=2, history=history)
        assert [(report.step, report.records[0].steps) for report in history] == [(2, 2), (3, 1)]
        with FullMoment(optimizer, "*"), pytest.raises(RuntimeError, match="step_in_backward"):
            run(optimizer, regression(model), steps=1)


def test_names_come_from_the_model_where_the_optimizer_has_none() -> None:
    model = Perceptron()
    optimizer = Adafactor([*model.last.parameters(), nn.Parameter(torch.ones(2))])
    with Watch(optimizer, history := History(), model=model), FullMoment(optimizer, "2.*", model=model) as moment:
        regression(model)(0).backward()
        optimizer.step()
    assert [record.name for record in history.reports[0].records] == ["2.weight", "2.bias", "parameter 2"]
    assert [fit.name for fit in moment.compare()] == ["2.weight", "2.bias"]


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


def test_importing_the_package_imports_none_of_the_diagnostics_tools() -> None:
    code = "import sys, adafactor; assert not {'rich', 'matplotlib', 'numpy.random', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}; adafactor.diagnostics.Watch; {code}"], check=True)


# ---- histories


def same(one: Record, other: Record) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return a == b or bool(np.isclose(a, b, rtol=1e-5, equal_nan=True))

    return all(alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(Record))


def test_a_history_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    model = Perceptron()
    nn.init.zeros_(model.last.weight)
    model.last.bias.requires_grad_(False)  # no figures: NaN
    groups: list[dict[str, Any]] = [{"params": model[0].named_parameters()}, {"params": model.last.named_parameters()}]
    optimizer = Adafactor([groups[0], {**groups[1], "clip": None}])
    history = run(optimizer, regression(model), history=History(tmp_path / "streamed.jsonl"))
    history.save(tmp_path / "saved.jsonl")
    for name in ("streamed.jsonl", "saved.jsonl"):
        loaded = History.load(tmp_path / name)
        assert [report.step for report in loaded] == [4 * i for i in range(1, 11)]
        for one, other in zip(loaded, history, strict=True):
            assert all(map(same, one.records, other.records))
            strip = {
                key: replace(about, settings=replace(about.settings, lr=1e-2)) for key, about in other.about.items()
            }
            assert one.about == strip
        assert [str(finding) for finding in diagnose(loaded)] == [str(finding) for finding in diagnose(history)]
    for line in (tmp_path / "saved.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_history_is_continued_after_a_resume_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = Perceptron()
    optimizer = Adafactor(model.named_parameters())
    run(optimizer, regression(model), steps=8, history=History(path))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    run(optimizer, regression(model), steps=8, history=History(path))  # steps 12 and 16, of a run that then dies
    optimizer.load_state_dict(checkpoint)
    run(optimizer, regression(model), steps=4, history=History(path))
    assert [report.step for report in History.load(path)] == [4, 8, 12]
    path.write_text(path.read_text() + '{"step": 16, "rms_upd')
    assert [report.step for report in History.load(path)] == [4, 8, 12]


@pytest.mark.parametrize("line", ["nothing", "[]", '{"step": 3}', '{"parameters": [{"name": "a"}]}'])
def test_a_file_that_is_no_history_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"{line}\n")
    with pytest.raises(ValueError, match="line 1"):
        History.load(tmp_path / "file")


# ---- tables, pictures, loggers


def gpt2_like() -> list[tuple[str, nn.Parameter]]:
    """GPT-2's 148 names, with tensors small enough to step quickly."""
    parts = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    names = [f"transformer.h.{i}.{part}.{kind}" for i in range(12) for part in parts for kind in ("weight", "bias")]
    names = [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *names,
        *(f"transformer.ln_f.{kind}" for kind in ("weight", "bias")),
    ]
    torch.manual_seed(0)
    matrix = ("wte", "wpe", "attn", "mlp")
    return [
        (
            name,
            nn.Parameter(
                torch.randn(12, 8) if name.endswith("weight") and any(m in name for m in matrix) else torch.randn(8)
            ),
        )
        for name in names
    ]


def gpt2_reports(live: Live | None = None, steps: int = 3) -> list[Report]:
    parameters = gpt2_like()
    assert len(parameters) == 148
    optimizer = Adafactor(parameters)
    reports: list[Report] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with Watch(optimizer, reports.append, *([live] if live else []), every=1):
            for t in range(steps):
                for name, p in parameters:
                    p.grad = torch.randn_like(p) * (1e-3 if "h.7.mlp.c_fc.weight" in name and t else 1)
                    if "h.3.ln_2.bias" in name and t:
                        p.grad[0] = math.inf
                optimizer.step()
    return reports


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_148_tensors_fits_a_terminal_and_has_the_interesting_first(width: int) -> None:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None, legacy_windows=False
    )
    live = Live(console)
    reports = gpt2_reports(live)
    order = [row.label for row in rows(reports[-1])]
    assert order[:2] == ["transformer.h.*.ln_2.bias", "transformer.h.*.mlp.c_fc.weight"], "skipped, then far from 1"
    assert len(order) == 16

    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("step 3: 148 tensors") :].splitlines()
    assert max(map(len, last)) <= width and len(last) <= 40
    lines = [line for line in last if line.startswith(("h.", "w", "ln_f"))]
    assert [line.split()[0] for line in lines] == [label.removeprefix("transformer.") for label in order], "none is cut"
    assert lines[0].split()[1] == "×12" and lines[0].split()[-1] == "0–2", "of twelve layers one skipped two steps"
    assert lines[1].split()[3] == "7", "the layer whose RMS(U) is farthest from 1"
    assert "! not finite: transformer.h.3.ln_2.bias" in [line.rstrip() for line in last], "what diagnose says"


def test_a_small_terminal_shows_the_first_rows() -> None:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=60, height=14, force_terminal=True, color_system=None, legacy_windows=False
    )
    gpt2_reports(Live(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("step 3: 148 tensors") :].splitlines()
    assert len(last) <= 14 and max(map(len, last)) <= 60 and any("more kinds" in line for line in last)


def test_where_there_is_no_terminal_a_line_a_report_and_a_table_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    gpt2_reports(Live())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["step 1", "step 2", "step 3", "step 3"]
    assert "in the median" in lines[1] and "clipped" in lines[1] and "1 parameters with skipped" in lines[2]
    assert "\x1b" not in "".join(lines) and sum(line.startswith(("h.", "w", "ln_f")) for line in lines) == 16


def test_the_picture_names_every_kind_of_layer(tmp_path: Path) -> None:
    import matplotlib

    history = History()
    history.reports = gpt2_reports()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for figure in ("rms_update", "clip_rate", "relative_change"):
            history.plot(tmp_path / "picture.svg", figure)
            text = (tmp_path / "picture.svg").read_text()
            for label in ("wte.weight", "h.*.attn.c_attn.weight  ×12", "ln_f.bias"):
                assert label in text, (figure, label)
    history.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="figure='loss'"):
        history.plot(tmp_path / "picture.png", "loss")
    with pytest.raises(ValueError, match="no report"):
        History().plot(tmp_path / "picture.png")


def test_a_callback_gets_figures_by_name_and_the_step() -> None:
    got: list[tuple[dict[str, float], int]] = []
    model = Perceptron()
    model.last.bias.requires_grad_(False)
    optimizer = Adafactor(model.named_parameters())
    with Watch(optimizer, to_callback(lambda values, step: got.append((values, step)), which="rms_update"), every=2):
        for t in range(2):
            regression(model)(t).backward()
            optimizer.step()
    ((values, step),) = got
    names = ["rms_update/0.weight", "rms_update/0.bias", "rms_update/2.weight"]
    assert step == 2 and list(values) == ["adafactor/rms_update_median", "adafactor/rms_update_max", *names]
    assert values["adafactor/rms_update_max"] == max(values[name] for name in names)
    with pytest.raises(ValueError, match="which='loss'"):
        figures([], ["loss"])
    with pytest.raises(TypeError, match="add_scalar"):
        to_tensorboard("runs")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_example_finds_the_papers_unstable_setting_and_nothing_in_the_defaults(tmp_path: Path) -> None:
    words = ["examples/diagnostics.py", "--steps", "30", "--output", str(tmp_path)]
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(list(tmp_path.glob("*.png"))) == 3
    found = {name: diagnose(History.load(tmp_path / f"{name}.jsonl")) for name in ("default", "unstable", "changed")}
    assert found["default"] == []
    assert only(found["unstable"], "out of date").severity == "warning"
    assert "out of date" not in kinds(found["changed"])
    assert "where:" in run.stdout and "divergence" in run.stdout
