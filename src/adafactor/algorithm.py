"""Algorithms 4 and 5 of Shazeer & Stern (2018), as `backend="eager"` runs them: five functions of one parameter.

    moments ── other ranks add to rows, cols, mean_row, finite ──▶ norms ── they add to u2, x2 ──▶ apply_

X is a parameter (…, n, m) and G its gradient; … are matrices with factors of their own. R (…, n, 1) and C (…, 1, m) are
means where the paper has sums: V̂ is the same, since (m·R)(n·C)/(m·ΣR) = R·C/mean(R), and a mean fits wherever G² does.
What is as large as X is formed chunk by chunk: `u.g[at]` is a chunk of G. Nothing of X or the state is written before
`apply_`. `core/update.py` says what an `Update` holds, and how X and the momentum are rounded.

A rule of your own on R and C or on the elements of U belongs here. Compiled backends do not follow it: use
`backend="eager"`. docs/paper.md says more, under "Your own idea".
"""

from __future__ import annotations

from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype
from adafactor.core.settings import Rates, Settings
from adafactor.core.sums import At, norm, square_sums
from adafactor.core.update import Sizes, Update


def moments(u: Update) -> None:
    """Take the means of G² + ε₁ over every row and every column, in double."""
    if u.full is None:
        n, m = u.axes
        sums = square_sums(u.g, [axis for axis, old in ((m, u.row), (n, u.col)) if old is not None], u.dtype)
        means = {axis: (total + u.g.shape[axis] * u.s.eps[0]) / u.parameter.shape[axis] for axis, total in sums.items()}
        u.rows, u.cols = means.get(m), means.get(n)  # (G² + ε₁)·1ₘ/m (…, n, 1) and 1ₙᵀ·(G² + ε₁)/n (…, 1, m)


def norms(u: Update) -> None:
    """Take Rₜ, Cₜ and 1/√V̂ₜ, and √ΣU² and √ΣX²."""
    beta2, _, w2, *_ = u.rates
    u.R = eq.average(u.row, u.rows, beta2, w2)  # line 5: Rₜ = β̂₂ₜ·Rₜ₋₁ + (1 − β̂₂ₜ)·(G² + ε₁)·1ₘ/m
    u.C = eq.average(u.col, u.cols, beta2, w2)  # line 6: Cₜ = β̂₂ₜ·Cₜ₋₁ + (1 − β̂₂ₜ)·1ₙᵀ·(G² + ε₁)/n
    if u.R is not None and u.C is not None:  # line 7: V̂ₜ = Rₜ·Cₜ/mean(Rₜ)
        mean = u.R.mean(u.axes[0], keepdim=True) if u.mean_row is None else u.mean_row
        scales = [(u.R / mean).rsqrt(), u.C.rsqrt()]  # never the product R·C: it leaves float32 where these do not
    else:  # §3.2: one of the two alone; or neither, in Algorithm 5
        scales = [v.rsqrt() for v in (u.R, u.C) if v is not None]
    u.scales = [scale.to(statistics_dtype(u.x.dtype)).expand_as(u.x) for scale in scales]
    u.norm_u = norm(direction(u, at) for at in u.chunks())
    u.norm_x = norm(u.x[at] for at in u.chunks()) if u.parameter.measures_x else None


def direction(u: Update, at: At, write: bool = False) -> Tensor:
    """Line 8: Uₜ = Gₜ/√V̂ₜ, a new tensor. Averages as large as X are formed here, and kept if `write` says so."""
    g = u.g[at]
    if u.s.beta1 and u.s.momentum_of == "gradient":  # Algorithm 3, line 6: m̂ₜ takes the place of Gₜ
        g = u.average_momentum(at, g, write)
    if u.full is not None:  # Algorithm 5, line 4: V̂ₜ = β̂₂ₜ·V̂ₜ₋₁ + (1 − β̂₂ₜ)·(Gₜ² + ε₁)
        squares = u.g[at].to(u.full.dtype).square().add_(u.s.eps[0])
        return u.average(u.full[at], squares, u.w2, write).rsqrt().mul_(g)
    U = g * u.scales[0][at]
    for scale in u.scales[1:]:  # from left to right: r·c alone may leave float32, too
        U.mul_(scale[at])
    return U


def step_size(u2: Scalar, x2: Scalar | None, count: Scalar, rates: Rates, s: Settings) -> Sizes:
    """Take the scalars of lines 3, 9 and 10: of one parameter as numbers, of many on a device as vectors."""
    rms_u, rms_x = eq.root_mean_square(u2, count), None if x2 is None else eq.root_mean_square(x2, count)
    alpha = eq.step_size(rates.rho, rms_x if s.relative else None, s.eps[1])  # line 3: αₜ = max(ε₂, RMS(Xₜ₋₁))·ρₜ
    divisor = eq.clip_divisor(rms_u, s.clip)  # line 9: Ûₜ = Uₜ/max(1, RMS(Uₜ)/d)
    rate = -alpha if s.maximize else alpha
    before: Scalar = 1.0
    after: Scalar = 1.0
    if s.beta1 and s.momentum_of == "update":
        before = rate / divisor  # β₁ averages αₜ·Ûₜ
    elif s.beta1 and s.momentum_of == "direction":
        before, after = 1 / divisor, rate  # β₁ averages Ûₜ
    else:
        after = rate / divisor
    decay = s.weight_decay * alpha if s.weight_decay_by == "alpha" else rates.decay
    return Sizes(rms_x, alpha, rms_u, divisor, before, after, decay)


def apply_(u: Update) -> None:
    """Line 10: Xₜ = Xₜ₋₁·(1 − decay) − αₜ·Ûₜ, or the average of αₜ·Ûₜ. Rₜ and Cₜ go into the state next."""
    for at in u.chunks():
        U = u.masked(direction(u, at, write=True))
        if u.s.beta1 and u.s.momentum_of != "gradient":
            U = u.average_momentum(at, U.mul_(u.before), write=True)
        u.subtract_(at, U)  # X·keep − after·U
        del U  # before the next chunk's is made
