"""The paper's step-size schedules sₜ (Table 2), as functions of t and as torch LR schedulers.

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
