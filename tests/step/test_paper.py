"""What the paper claims, as properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adafactor import Adafactor, schedules
from adafactor.core import equations as eq
from tests import oracle

pytestmark = pytest.mark.usefixtures("backend")

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**31 - 1)


def positive(n: int, m: int, seed: int) -> Tensor:
    """A positive matrix whose entries span many orders of magnitude."""
    return torch.exp(3 * torch.randn(n, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def estimate(optimizer: Adafactor, p: Tensor) -> Tensor:
    """V̂ as the optimizer's factors give it."""
    row: Tensor = optimizer.state[p]["row"]
    col: Tensor = optimizer.state[p]["col"]
    return row * col / row.mean()


def after(p: Tensor, grads: list[Tensor], **keywords: object) -> Adafactor:
    """The optimizer after these gradients."""
    optimizer = Adafactor([p], **keywords)  # type: ignore[arg-type]
    for g in grads:
        p.grad = g
        optimizer.step()
    return optimizer


@given(st.integers(2, 9), st.integers(2, 9), SEEDS)
def test_lemma_1_no_rank_1_matrix_has_a_smaller_divergence(n: int, m: int, seed: int) -> None:
    g = positive(n, m, seed)
    p = torch.zeros(n, m, dtype=torch.float64, requires_grad=True)
    v, v_hat = g**2, estimate(after(p, [g]), p)
    best = oracle.i_divergence(v.numpy(), v_hat.numpy())
    rivals = [positive(n, 1, seed + k) @ positive(1, m, seed + k + 1) for k in range(8)]
    rivals += [v_hat * torch.exp(0.01 * torch.randn(n, 1, dtype=torch.float64)) for _ in range(8)]
    rivals += [v_hat * torch.exp(0.01 * torch.randn(1, m, dtype=torch.float64)) for _ in range(8)]
    assert all(oracle.i_divergence(v.numpy(), rival.numpy()) >= best * (1 - 1e-12) for rival in rivals)


@given(st.integers(2, 9), st.integers(2, 9), SEEDS)
def test_a_rank_1_second_moment_is_recovered_exactly(n: int, m: int, seed: int) -> None:
    g = positive(n, 1, seed) @ positive(1, m, seed + 1)
    p = torch.zeros(n, m, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(estimate(after(p, [g]), p), g**2, rtol=1e-12, atol=0)


@given(st.floats(0.05, 3.0), st.integers(1, 400))
def test_the_weights_of_the_increasing_schedule_sum_to_one(c: float, t: int) -> None:
    weights = weights_of_the_past(c, t)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(weights.min()) >= 0.0


@pytest.mark.parametrize(("c", "vanishes"), [(0.5, True), (0.8, True), (1.0, True), (1.3, False), (2.0, False)])
def test_the_past_is_forgotten_only_for_c_up_to_1(c: float, vanishes: bool) -> None:
    # the weight of the second gradient: at c = 1 it is 1/t; above, it stays above a constant
    early, late = float(weights_of_the_past(c, 10**3)[1]), float(weights_of_the_past(c, 10**6)[1])
    assert (late < 0.01 * early) if vanishes else (late > 0.3 * early)


def weights_of_the_past(c: float, t: int) -> Tensor:
    """(1 − β̂ᵢ)·Πⱼ₌ᵢ₊₁ᵗ β̂ⱼ for i = 1 … t (§7.2)."""
    beta, weight = map(torch.as_tensor, eq.increasing_decay(torch.arange(1, t + 1, dtype=torch.float64), c))
    later = torch.cat([beta[1:].flip(0).cumprod(0).flip(0), torch.ones(1, dtype=torch.float64)])
    return weight * later


@given(SEEDS)
def test_c_of_1_is_the_plain_mean(seed: int) -> None:
    grads = [positive(1, 5, seed + t)[0] for t in range(9)]
    p = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    v = after(p, grads, decay_rate=1.0).state[p]["full"]
    torch.testing.assert_close(v, torch.stack(grads).square().mean(0), rtol=1e-12, atol=0)


@given(SIZES, SIZES, SEEDS, st.floats(0.01, 3.0))
def test_the_clipped_update_is_at_most_d(n: int, m: int, seed: int, d: float) -> None:
    p = torch.zeros(n, m, dtype=torch.float64, requires_grad=True)
    optimizer = after(p, [positive(n, m, seed)], lr=1.0, lr_decay=None, relative=False, clip=d, beta2=0.99)
    for t in range(1, 8):
        before = p.detach().clone()
        p.grad = positive(n, m, seed + t) * 10**t  # each larger than the last: V̂ is always out of date
        optimizer.step()
        assert float((p.detach() - before).square().mean().sqrt()) <= d * (1 + 1e-9)


@given(st.integers(1, 200_000))
def test_the_schedules_are_those_of_table_2(t: int) -> None:
    assert schedules.with_warmup(t) == pytest.approx(min(1e-6 * t, 1 / math.sqrt(t)), rel=1e-15)
    assert schedules.without_warmup(t) == pytest.approx(min(1e-2, 1 / math.sqrt(t)), rel=1e-15)
    for time in (float(t), torch.tensor(float(t), dtype=torch.float64)):
        assert float(eq.relative_step(time, 1e-2, "rsqrt")) == pytest.approx(oracle.no_warm_up(t), rel=1e-15)
