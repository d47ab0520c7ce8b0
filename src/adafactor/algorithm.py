"""Algorithms 4 and 5 of Shazeer & Stern (2018), as `backend="eager"` runs them.

X is a parameter and G its gradient; n and m stand for the two factored axes, … for all others. Second moments are means
where the paper has sums: V̂ is the same, since (m·R)(n·C)/(m·ΣR) = R·C/mean(R), and a mean fits wherever G² does.

Each function is a generator that pauses twice: after the first sums (a gradient that is not finite ends the step here,
before anything has changed) and after the second. What it yields comes back with the shares of other ranks added, where
X is sharded. `Batch` is what surrounds the mathematics: tensors are read and written in blocks, X is rounded as the
settings say, and on a device many parameters go side by side, their scalars as vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.equations import Scalar
from adafactor.core.settings import Rates, Settings

Phases = Generator[tuple[Any, ...], Any, None]


def factored_step(batch: Batch, s: Settings) -> Phases:
    """Algorithm 4, for X (…, n, m): its second moment is kept as R (…, n) and C (…, m)."""
    rows, cols = batch.mean_squares(s.eps[0])  # of G² + ε₁ over m (…, n), and over n (…, m)
    rows, cols, mean = yield rows, cols  # pause: is G² finite? Other ranks add their shares
    beta2, _, w2, _ = batch.rates  # β̂₂ₜ and 1 − β̂₂ₜ
    R, C, scales = batch.row, batch.col, []
    if R is not None:
        row = R.average(rows, beta2, w2)  # line 5: Rₜ = β̂₂ₜ·Rₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)·1ₘ/m
        scales.append(R.over_x(row.rsqrt() if C is None else eq.row_scale(row, R.mean(row, mean))))  # (…, n, 1)
    if C is not None:
        col = C.average(cols, beta2, w2)  # line 6: Cₜ = β̂₂ₜ·Cₜ₋₁ + (1 − β̂₂ₜ)·1ₙᵀ·(G² + ε₁)/n
        scales.append(C.over_x(col.rsqrt()))  # (…, 1, m)
    # line 7: V̂ₜ = Rₜ·Cₜ/mean(Rₜ); the product of the scales is 1/√V̂ₜ
    yield from _descend(batch, s, lambda g, *scales: _product(g, scales), scales)


def unfactored_step(batch: Batch, s: Settings) -> Phases:
    """Algorithm 5, for X of any shape: V̂ has the same."""
    yield None, None  # pause: is G² finite?
    beta2, _, w2, _ = batch.rates  # β̂₂ₜ and 1 − β̂₂ₜ
    v = batch.average_squares_(s.eps[0], beta2, w2)  # line 4: V̂ₜ = β̂₂ₜ·V̂ₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)
    yield from _descend(batch, s, lambda g, v: v.rsqrt().mul_(g), [v])


def _descend(batch: Batch, s: Settings, direction: Direction, operands: Sequence[Any]) -> Phases:
    """Lines 3 and 8–10 of Algorithm 4, and the same of Algorithm 5: from 1/√V̂ to X."""
    _, w1, _, rho = batch.rates  # 1 − β̂₁ₜ and ρₜ
    if s.beta1 and s.momentum_of == "gradient":
        batch.average_gradient_(w1)  # Algorithm 3, line 6: m̂ₜ takes the place of Gₜ
    u2, x2 = yield batch.norm(direction, operands), batch.norm_x()  # line 8: Uₜ = Gₜ/√V̂ₜ
    rms_u, rms_x = batch.rms(u2), None if x2 is None else batch.rms(x2)
    alpha = eq.step_size(rho, rms_x if s.relative else None, s.eps[1])  # line 3: αₜ = max(ε₂, RMS(Xₜ₋₁))·ρₜ
    divisor = eq.clip_divisor(rms_u, s.clip)  # line 9: Ûₜ = Uₜ/max(1, RMS(Uₜ)/d)
    scale = (-alpha if s.maximize else alpha) / divisor
    decay = 1 - rho * s.weight_decay if s.weight_decay else 1.0
    batch.descend_(direction, operands, scale, decay, w1)  # line 10: Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ, or their average
    batch.note(rms_x, alpha, rms_u, divisor > 1)


def _product(g: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """G·r·c from left to right: r·c alone may leave float32 where the product with G does not."""
    u = g * scales[0]
    for scale in scales[1:]:
        u.mul_(scale)
    return u


Direction = Callable[..., Tensor]  # U of a block, from G and operands


class Factor(Protocol):
    """R or C of the matrices of a batch."""

    def average(self, means: Tensor, decay: Scalar, weight: Scalar) -> Tensor:
        """β̂₂ₜ·old + (1 − β̂₂ₜ)·means, which becomes the state."""

    def mean(self, row: Tensor, known: Tensor | None) -> Tensor:
        """The mean of each matrix's R over n; `known` where R is sharded."""

    def over_x(self, vector: Tensor) -> Any:
        """A vector of each matrix, in a shape that broadcasts over X."""


class Batch(Protocol):
    """Parameters that step side by side; on a CPU it is one."""

    @property
    def rates(self) -> Rates:
        """β̂₂ₜ, 1 − β̂₁ₜ, 1 − β̂₂ₜ and ρₜ (Algorithm 6)."""

    @property
    def row(self) -> Factor | None:
        """R, if there is one."""

    @property
    def col(self) -> Factor | None:
        """C, if there is one."""

    def mean_squares(self, eps1: float) -> tuple[Any, Any]:
        """Means of G² + ε₁ over the columns and over the rows."""

    def average_squares_(self, eps1: float, decay: Scalar, weight: Scalar) -> Any:
        """Average G² + ε₁ into the state `full`, and return that."""

    def average_gradient_(self, weight: Scalar) -> None:
        """Average G into the state `momentum`, which is read for G from now on."""

    def norm(self, direction: Direction, operands: Sequence[Any]) -> Scalar:
        """ΣU²."""

    def norm_x(self) -> Scalar | None:
        """ΣX², if it is wanted."""

    def rms(self, sum_of_squares: Scalar) -> Scalar:
        """RMS = √(Σ²/count) (§5)."""

    def descend_(
        self, direction: Direction, operands: Sequence[Any], scale: Scalar, decay: Scalar, weight: Scalar
    ) -> None:
        """X·decay − scale·U; with momentum of the update, minus the average of scale·U."""

    def note(self, rms_x: Scalar | None, alpha: Scalar, rms_u: Scalar, clipped: Tensor | bool) -> None:
        """Remember what `report()` shows."""
