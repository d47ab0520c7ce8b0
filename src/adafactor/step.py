"""One step from G to X. With `equations.py` beside it, this is Algorithms 4 and 5.

    G ── moments ──▶ row and column means of G², ΣX² ──▶ R, C ── energy ──▶ ΣU² ──▶ clip, α ── apply ──▶ X

The three walks over tensor-sized data belong to a kernel (`kernels/__init__.py` has the contract); everything
here is a vector of length n or m, or a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from adafactor import equations as eq
from adafactor.diagnostics import Trace
from adafactor.equations import Scalar
from adafactor.kernels import Kernel
from adafactor.layout import Layout, scalar, statistics_dtype
from adafactor.settings import Settings


@dataclass(eq=False)
class Update:
    """One parameter on its way through a step. The kernel and `step` leave their results here."""

    x: Tensor  # the parameter, any strides, any floating dtype
    g: Tensor  # its gradient, same shape
    state: dict[str, Tensor]
    settings: Settings
    layout: Layout
    trace: Trace
    name: str

    # left by kernel.moments, in the wide dtype
    rows: Tensor | None = None  # mean of G² + ε₁ over the column axis, in the shape of state["row"]
    cols: Tensor | None = None  # mean of G² + ε₁ over the row axis, in the shape of state["col"]
    x2: Scalar | None = None  # ΣX²; only for relative steps
    finite: Tensor | bool = True  # G² holds no NaN and no infinity

    # left by `begin`
    mask: Tensor | None = None  # is the step taken? Only where asking would make the host wait; None is yes
    scales: list[Tensor] = field(default_factory=list)  # 1/√V̂ as factors that broadcast over X; [] if V̂ is whole
    w1: Scalar = 0.0  # 1 − β̂₁ₜ, the weight of the newest term in the momentum
    w2: Scalar = 0.0  # 1 − β̂₂ₜ
    rho: Scalar = 0.0  # ρₜ
    alpha: Scalar = 0.0  # αₜ

    u2: Scalar = 0.0  # ΣU², left by kernel.energy

    # left by `conclude`
    scale: Scalar = 0.0  # αₜ / max(1, RMS(U)/d), negative to maximise
    decay: Scalar = 1.0  # 1 − ρₜ·λ

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.x.shape)


def step(bucket: list[Update], kernel: Kernel) -> list[Update]:
    """Take one step with every parameter of the bucket; return those that were left out as non-finite."""
    kernel.moments(bucket)  # means of G² + ε₁ over columns and over rows, ΣX²
    taken = [u for u in bucket if admit(u)]
    for u in taken:
        begin(u)  # t, β̂₂ₜ, αₜ, Rₜ, Cₜ, and 1/√V̂ₜ in factors
    kernel.energy(taken)  # ΣU²; averages V̂ₜ and m̂ₜ where they are kept whole
    for u in taken:
        conclude(u)  # αₜ / max(1, RMS(U)/d)
    kernel.apply_(taken)  # Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ
    return [u for u in bucket if u not in taken]


def admit(u: Update) -> bool:
    """Decide whether the step is taken: here and now on a CPU, by a mask on the device elsewhere."""
    if u.settings.on_nonfinite == "ignore":
        return True
    if u.settings.on_nonfinite == "raise" and not u.finite:
        raise FloatingPointError(
            f"the gradient of {u.name} (shape {u.shape}) has a NaN, an infinity, or an entry whose square "
            f"overflows {statistics_dtype(u.x.dtype)}; nothing was updated"
        )
    if isinstance(u.finite, bool):
        u.trace.skipped += not u.finite
        return u.finite
    u.trace.skipped = u.trace.skipped + ~u.finite
    u.mask = u.finite
    return True


def begin(u: Update) -> None:
    """Algorithm 4, lines 3 and 5–7: the step size, the averaged factors, and what they make of 1/√V̂."""
    s, t = u.settings, scalar(u.state["step"]) + 1
    beta2 = eq.second_moment_decay(t, s.beta2, s.decay_rate)  # β̂₂ₜ
    u.scales = inverse_root(u, averaged(u, "row", u.rows, beta2), averaged(u, "col", u.cols, beta2))  # Rₜ, Cₜ
    u.w2 = 1 - beta2
    u.w1 = 1 - (eq.corrected_decay(t, s.beta1) if s.momentum == "gradient" else s.beta1)
    if u.mask is not None:  # a weight of zero leaves an average as it was
        u.w1, u.w2 = u.w1 * u.mask, u.w2 * u.mask
    u.rho = eq.relative_step(t, s.lr, s.lr_decay)
    rms_x = None if u.x2 is None else eq.root_mean_square(u.x2, u.x.numel())
    u.alpha = eq.step_size(u.rho, rms_x, s.eps[1])
    u.state["step"].add_(1 if u.mask is None else u.mask)
    u.trace.beta2, u.trace.rms_parameter, u.trace.step_size = beta2, rms_x, u.alpha


def averaged(u: Update, key: str, mean: Tensor | None, beta2: Scalar) -> Tensor | None:
    """Rₜ or Cₜ: kept in the state in its precision, returned in the wider one of the sums."""
    if mean is None:
        return None
    new = eq.average(u.state[key], mean, beta2)
    u.state[key].copy_(new if u.mask is None else torch.where(u.mask, new, u.state[key]))
    return new


def inverse_root(u: Update, row: Tensor | None, col: Tensor | None) -> list[Tensor]:
    """1/√V̂ as vectors that broadcast over X (Algorithm 4, lines 7–8; §3.2 for rows or columns alone)."""
    row_axis, col_axis, scales = u.layout.row_axis, u.layout.col_axis, []
    if row is not None and row_axis is not None and col_axis is not None:
        row = row.unsqueeze(col_axis)  # (…, n, 1)
        scales.append(eq.row_scale(row, row_axis) if u.layout.estimator == "outer" else row.rsqrt())
    if col is not None and row_axis is not None:
        scales.append(col.unsqueeze(row_axis).rsqrt())  # (…, 1, m)
    return [scale.to(statistics_dtype(u.x.dtype)) for scale in scales]


def conclude(u: Update) -> None:
    """Algorithm 4, line 9: from RMS(U) to the number that the update is multiplied with."""
    s = u.settings
    rms_u = eq.root_mean_square(u.u2, u.x.numel())
    divisor = eq.clip_divisor(rms_u, s.clip)
    u.scale = (-u.alpha if s.maximize else u.alpha) / divisor
    u.decay = 1 - u.rho * s.weight_decay
    u.trace.rms_update = rms_u
    u.trace.taken = u.trace.taken + (1 if u.mask is None else u.mask)
    u.trace.clipped = u.trace.clipped + (divisor > 1)
