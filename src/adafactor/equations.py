"""The paper's equations, one small pure function each.

Scalars are 0-d tensors on the parameter's device (float64 where the device has it), so that a step never asks
the host. Second moments are kept as *means* where the paper keeps sums: V̂ is the same, since
(m·R)(n·C)/(m·Σ R) = R·C/mean(R), and a mean of G² fits wherever G² does, while a sum may overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_step(t: Tensor, lr: float, decay: str | None) -> Tensor:
    """ρₜ = min(lr, 1/√t) (Algorithm 6, line 4), or ρₜ = lr without decay."""
    bound = torch.full_like(t, lr)
    return torch.minimum(bound, t.rsqrt()) if decay == "rsqrt" else bound


def corrected_decay(t: Tensor, beta: float) -> Tensor:
    """β̂ₜ = β·(1 − βᵗ⁻¹)/(1 − βᵗ): Adam's bias correction as a decay rate (§7.1; Algorithm 3, lines 4–5)."""
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)


def increasing_decay(t: Tensor, c: float) -> Tensor:
    """β̂₂ₜ = 1 − t⁻ᶜ (§7.2; Algorithm 6, line 5). Zero at t = 1, so nothing needs a bias correction."""
    return 1 - t**-c


def second_moment_decay(t: Tensor, beta2: float | None, c: float) -> Tensor:
    """β̂₂ₜ: the corrected constant where β₂ is given, else the increasing schedule."""
    return increasing_decay(t, c) if beta2 is None else corrected_decay(t, beta2)


def average(old: Tensor, new: Tensor, decay: Tensor) -> Tensor:
    """β̂ₜ·old + (1 − β̂ₜ)·new (Algorithm 4, lines 5–6), in the precision of `new`."""
    return decay * old.to(new.dtype) + (1 - decay) * new


def row_scale(row: Tensor, row_axis: int) -> Tensor:
    """(R/mean R)^−½: the rows' share of 1/√V̂, V̂ = R·C/mean(R) (Algorithm 4, line 7).

    √V̂ is never formed, nor is the product R·C, which leaves float32 where its factors do not.
    """
    return (row / row.mean(row_axis, keepdim=True)).rsqrt()


def root_mean_square(sum_of_squares: Tensor, count: int) -> Tensor:
    """RMS = √(Σ²/count) (§5)."""
    return (sum_of_squares / count).sqrt()


def clip_divisor(rms_update: Tensor, d: float | None) -> Tensor:
    """max(1, RMS(U)/d) (§6; Algorithm 4, line 9); 1 without clipping."""
    return torch.ones_like(rms_update) if d is None else (rms_update / d).clamp(min=1.0)


def step_size(rho: Tensor, rms_parameter: Tensor | None, eps2: float) -> Tensor:
    """αₜ = max(ε₂, RMS(X))·ρₜ (§8; Algorithm 4, line 3), or αₜ = ρₜ for absolute steps."""
    return rho if rms_parameter is None else rms_parameter.clamp(min=eps2) * rho


def i_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Σ d(p, q) with d(p, q) = p·log(p/q) − p + q, the cost that the factors minimise (§3, Lemma 1)."""
    return (torch.xlogy(p, p / q) - p + q).sum()
