"""How well the factors fit: against the whole second moment."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adafactor import Adafactor
from adafactor.diagnostics import FullMoment
from adafactor.diagnostics.moment import noise
from studies.diagnoses import Perceptron, regression


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
        state = optimizer.state[p]
        kept = {key: state[key].double().numpy() for key in ("row", "col") if key in state}
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
