"""Algorithms 4 and 5 of Shazeer & Stern (2018), as `backend="eager"` runs them.

X is a parameter and G its gradient; n and m stand for the two factored axes, … for all others. Second moments are means
where the paper has sums: V̂ is the same, since (m·R)(n·C)/(m·ΣR) = R·C/mean(R), and a mean fits wherever G² does.

Each function is a generator that pauses twice: after the first sums (a gradient that is not finite ends the step here)
and after the second. Where X is sharded, other ranks add their shares meanwhile. Nothing is written before both are
complete: `descend_` writes X and all averages. `Batch` is what surrounds the mathematics: large tensors are read and
written in blocks, X is rounded as the settings say, and on a device many parameters go side by side, their scalars as
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.equations import Scalar
from adafactor.core.settings import Rates, Settings

Phases = Generator[tuple[Any, Any], Any, tuple[Any, ...]]  # yields two sums, twice; returns what `report()` shows


def factored_step(batch: Batch, s: Settings) -> Phases:
    """Algorithm 4, for X (…, n, m): its second moment is kept as R (…, n, 1) and C (…, 1, m), or one of the two."""
    rows, cols = batch.mean_squares(s.eps[0])  # of G² + ε₁ over m (…, n, 1), and over n (…, 1, m)
    mean = yield rows, cols  # pause: is G² finite? Ranks that share the rows of X send mean(Rₜ)
    beta2, _, w2, *_ = batch.rates  # β̂₂ₜ and 1 − β̂₂ₜ
    R = batch.average("row", rows, beta2, w2)  # line 5: Rₜ = β̂₂ₜ·Rₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)·1ₘ/m
    C = batch.average("col", cols, beta2, w2)  # line 6: Cₜ = β̂₂ₜ·Cₜ₋₁ + (1 − β̂₂ₜ)·1ₙᵀ·(G² + ε₁)/n
    scales = []  # line 7: V̂ₜ = Rₜ·Cₜ/mean(Rₜ), or Rₜ or Cₜ alone; the product of the scales is 1/√V̂ₜ
    if R is not None:
        r = R.rsqrt() if C is None else eq.row_scale(R, batch.mean_row(R) if mean is None else mean)
        scales.append(batch.over_x("row", r))  # (…, n, 1)
    if C is not None:
        scales.append(batch.over_x("col", C.rsqrt()))  # (…, 1, m)
    return (yield from _descend(batch, s, _product, scales))


def unfactored_step(batch: Batch, s: Settings) -> Phases:
    """Algorithm 5, for X of any shape: V̂ has the same."""
    yield None, None  # pause: is G² finite?
    beta2, _, w2, *_ = batch.rates  # β̂₂ₜ and 1 − β̂₂ₜ
    V = batch.average_squares(s.eps[0], beta2, w2)  # line 4: V̂ₜ = β̂₂ₜ·V̂ₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)
    return (yield from _descend(batch, s, lambda g, v: v.rsqrt().mul_(g), [V]))


def _descend(batch: Batch, s: Settings, direction: Callable[..., Tensor], operands: Sequence[Blockwise]) -> Phases:
    """Lines 3 and 8–10 of Algorithm 4, and the same of Algorithm 5: from 1/√V̂ to X."""
    _, w1, _, rho, share = batch.rates  # 1 − β̂₁ₜ, ρₜ, and λ times what it is multiplied by
    G = batch.g
    if s.beta1 and s.momentum_of == "gradient":
        G = batch.average_gradient(w1)  # Algorithm 3, line 6: m̂ₜ takes the place of Gₜ

    def U(*block: Any) -> Tensor:  # line 8: Uₜ = Gₜ/√V̂ₜ (…, n, m)
        return direction(G(*block), *(operand(*block) for operand in operands))

    u2, x2 = yield batch.norms_of(U)  # ΣU² and ΣX²; pause
    rms_u = eq.root_mean_square(u2, batch.count)
    rms_x = None if x2 is None else eq.root_mean_square(x2, batch.count)
    alpha = eq.step_size(rho, rms_x if s.relative else None, s.eps[1])  # line 3: αₜ = max(ε₂, RMS(Xₜ₋₁))·ρₜ
    divisor = eq.clip_divisor(rms_u, s.clip)  # line 9: Ûₜ = Uₜ/max(1, RMS(Uₜ)/d)
    rate = -alpha if s.maximize else alpha
    before, after = (1.0, rate) if s.beta1 and s.momentum_of == "direction" else (rate, 1.0)
    decay = 1 - (s.weight_decay * alpha if s.weight_decay_by == "alpha" else share) if s.weight_decay else 1.0
    # line 10: Xₜ = Xₜ₋₁·(1 − λ·ρₜ) − αₜ·Ûₜ; β₁ averages αₜ·Ûₜ, or Ûₜ, and αₜ comes after
    batch.descend_(U, before / divisor, after, decay, w1)
    return rms_x, alpha, rms_u, divisor > 1


def _product(g: Tensor, *scales: Tensor) -> Tensor:
    """G·r·c from left to right: r·c alone may leave float32 where the product with G does not."""
    u = g * scales[0]
    for scale in scales[1:]:
        u.mul_(scale)
    return u


Blockwise = Callable[..., Tensor]  # a large tensor of each parameter: called with a block, it forms that block


class Batch(Protocol):
    """What `kernels/eager/executor.py` does for the algorithm: parameters that step side by side, on a CPU one."""

    rates: Rates  # β̂₂ₜ, 1 − β̂₁ₜ, 1 − β̂₂ₜ, ρₜ (Algorithm 6), and the share that weight decay takes
    count: Scalar  # of X's elements

    def g(self, *block: Any) -> Tensor: ...  # G, read block by block
    def mean_squares(self, eps1: float) -> tuple[Tensor | None, Tensor | None]: ...  # None for what is not kept
    def average(self, key: str, means: Tensor | None, decay: Scalar, weight: Scalar) -> Tensor | None: ...  # R or C
    def mean_row(self, row: Tensor) -> Tensor: ...  # mean(R) over n, in a shape that broadcasts over R
    def over_x(self, key: str, scale: Tensor) -> Blockwise: ...
    def average_squares(self, eps1: float, decay: Scalar, weight: Scalar) -> Blockwise: ...
    def average_gradient(self, weight: Scalar) -> Blockwise: ...
    def norms_of(self, update: Blockwise) -> tuple[Scalar, Scalar | None]: ...  # ΣX² is None where nobody wants it
    def descend_(self, update: Blockwise, scale: Scalar, rate: Scalar, decay: Scalar, weight: Scalar) -> None: ...
