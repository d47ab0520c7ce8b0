"""The paper's step-size schedules sₜ (Table 2), as functions of t and as torch LR schedulers, and β₂ from a half-life.

`Adafactor` already has min(lr, 1/√t) built in (`lr_decay="rsqrt"`). These are for what it does not have, warm-up,
and for optimizers that have neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def with_warmup(t: float, slope: float = 1e-6) -> float:
    """sₜ = min(10⁻⁶·t, 1/√t): a linear rise that meets the inverse square root at t = slope^−⅔ (10,000)."""
    return min(slope * t, 1 / math.sqrt(t))


def without_warmup(t: float, bound: float = 1e-2) -> float:
    """sₜ = min(10⁻², 1/√t): flat until the inverse square root is below the bound (10,000 steps)."""
    return min(bound, 1 / math.sqrt(t))


@dataclass
class _Slope:
    """A schedule that `LambdaLR` can save: it keeps the attributes of callable objects."""

    slope: float

    def __call__(self, epoch: int) -> float:
        return with_warmup(epoch + 1, self.slope)  # torch counts from 0, the paper from 1


def warmup(optimizer: Optimizer, slope: float = 1e-6, last_epoch: int = -1) -> LambdaLR:
    """Multiply every group's lr by sₜ = min(slope·t, 1/√t); call its `step()` once after each optimizer step.

    The group's own lr becomes the factor before sₜ: `Adafactor(params, lr=1.0, lr_decay=None)` gives the paper's
    ρₜ = sₜ (row O with warm-up), `lr=0.1, relative=False` its αₜ = 0.1·sₜ (rows A–N).

    Args:
        optimizer: any torch optimizer.
        slope: the rise per step; the peak, slope^⅓, is reached after slope^−⅔ steps.
        last_epoch: as in torch's schedulers.
    """
    if not 0 < slope <= 1:
        raise ValueError(f"slope={slope!r} must be a number above 0 and at most 1")
    return LambdaLR(optimizer, _Slope(slope), last_epoch=last_epoch)


def beta2_from_half_life(half_life: float, per_step: float = 1.0) -> float:
    """Return β₂ = 2^(−per_step/half_life), for which a squared gradient weighs half as much after a half-life.

    Marek et al. (2025, arXiv 2507.07101) advise to keep the half-life of the second moment fixed in *tokens* when the
    batch changes: β₂ = 0.95 at 0.5 M tokens to a step is a half-life of 6.8 M tokens, which at 2,048 tokens to a step
    is 0.9998. The same β₂ at a small batch would forget too soon.

    Args:
        half_life: in steps; or in tokens or samples, if `per_step` says how many a step takes.
        per_step: tokens or samples to a step, those of all ranks and of all accumulated batches together.

    Examples:
        >>> round(beta2_from_half_life(6.8e6, per_step=0.5e6), 3)
        0.95
        >>> round(beta2_from_half_life(6.8e6, per_step=2048), 5)
        0.99979
    """
    for name, value in (("half_life", half_life), ("per_step", per_step)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a finite number above 0")
    return math.pow(2.0, -per_step / half_life)
