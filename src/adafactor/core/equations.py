"""The paper's equations, one small pure function each.

A scalar is a Python number where reading it makes nobody wait (on a CPU), and elsewhere a 0-d tensor on the
parameter's device, in float64 where the device has it; the equations take both. Second moments are kept as *means*
where the paper keeps sums: V̂ is the same, since (m·R)(n·C)/(m·Σ R) = R·C/mean(R), and a mean of G² fits wherever G²
does, while a sum may overflow.
"""

from __future__ import annotations

import math

from torch import Tensor

Scalar = float | Tensor
Decay = tuple[Scalar, Scalar]  # β̂ and 1 − β̂: a difference has no digits where β̂ is all but 1, as for c > 1


def relative_step(t: Scalar, lr: Scalar, decay: str | None) -> Scalar:
    """ρₜ = min(lr, 1/√t) (Algorithm 6, line 4), or ρₜ = lr without decay."""
    if decay is None:
        return lr
    return (t**-0.5).clamp(max=lr) if isinstance(t, Tensor) else min(lr, t**-0.5)


def corrected_decay(t: Scalar, beta: float) -> Decay:
    """β̂ₜ = β·(1 − βᵗ⁻¹)/(1 − βᵗ): Adam's bias correction as a decay rate (§7.1; Algorithm 3, lines 4–5)."""
    decay = beta * (1 - beta ** (t - 1)) / (1 - beta**t)
    return decay, 1 - decay


def increasing_decay(t: Scalar, c: float) -> Decay:
    """β̂₂ₜ = 1 − t⁻ᶜ (§7.2; Algorithm 6, line 5). Zero at t = 1, so nothing needs a bias correction."""
    weight = t**-c
    return 1 - weight, weight


def second_moment_decay(t: Scalar, beta2: float | None, c: float, most: float | None = None) -> Decay:
    """β̂₂ₜ: the corrected constant where β₂ is given, else the increasing schedule up to `most`."""
    if beta2 is not None:
        return corrected_decay(t, beta2)
    decay, weight = increasing_decay(t, c)
    return (decay, weight) if most is None else (_at_most(most, decay), _at_least(1 - most, weight))


def average(old: Tensor | None, new: Tensor | None, decay: Scalar, weight: Scalar) -> Tensor | None:
    """β̂ₜ·old + (1 − β̂ₜ)·new (Algorithm 4, lines 5–6), in the precision of `new`; None for a statistic that is not kept.

    A sum of two positive terms, never old + (new − old)·(1 − β̂ₜ): that is zero where `new` is below the last digit of
    `old`. Each operation is rounded on its own, so every rank gets the same bits; `lerp` fuses some.
    """
    if old is None or new is None:
        return None
    return old.to(new.dtype) * decay + new * weight


def root_mean_square(sum_of_squares: Scalar, count: Scalar) -> Scalar:
    """RMS = √(Σ²/count) (§5)."""
    mean = sum_of_squares / count
    return mean.sqrt() if isinstance(mean, Tensor) else math.sqrt(mean)


def clip_divisor(rms_update: Scalar, d: float | None) -> Scalar:
    """max(1, RMS(U)/d) (§6; Algorithm 4, line 9); 1 without clipping."""
    return 1.0 if d is None else _at_least(1.0, rms_update / d)


def step_size(rho: Scalar, rms_parameter: Scalar | None, eps2: float) -> Scalar:
    """αₜ = max(ε₂, RMS(X))·ρₜ (§8; Algorithm 4, line 3), or αₜ = ρₜ for absolute steps."""
    return rho if rms_parameter is None else _at_least(eps2, rms_parameter) * rho


def _at_least(bound: float, value: Scalar) -> Scalar:
    # a NaN stays one, in both kinds: max(value, bound) returns its first argument when nothing is greater
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def _at_most(bound: float, value: Scalar) -> Scalar:
    return value.clamp(max=bound) if isinstance(value, Tensor) else min(value, bound)
