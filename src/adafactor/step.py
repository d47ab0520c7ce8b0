"""One step from G to X. With `equations.py` beside it, this is Algorithms 4 and 5.

    G ── moments ──▶ row and column means of G² ── factors ──▶ R, C ── energy ──▶ ΣU², ΣX² ──▶ clip, α ── apply ──▶ X

The three walks over tensor-sized data, and the vectors between them, belong to a kernel (`kernels/__init__.py` has the
contract); everything here is a scalar. Where a parameter is sharded, x, g and the state are this rank's part of it and
the layout is that of the whole; `sharding.Ranks` completes the sums after the first walk and after the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adafactor import equations as eq
from adafactor.equations import Scalar
from adafactor.kernels import Kernel
from adafactor.layout import Layout, scalar, statistics_dtype
from adafactor.record import Figures, Trace
from adafactor.rounding import SHORT, Keys, keys, roots
from adafactor.settings import Settings

if TYPE_CHECKING:
    from adafactor.sharding import Ranks

NOTHING = torch.empty(0)  # in place of a gradient


@dataclass(eq=False)
class Update:
    """One parameter on its way through a step. The kernel and `step` leave their results here.

    The optimizer keeps it for the next step, as long as the parameter and its state stay what and where they are.
    """

    x: Tensor  # the parameter, any strides, any floating dtype
    g: Tensor  # its gradient, same shape
    state: dict[str, Tensor]
    settings: Settings
    layout: Layout
    trace: Trace
    name: str
    number: int  # which of the optimizer's parameters it is

    # left by `begin`
    beta2: Scalar = 0.0  # β̂₂ₜ
    w1: Scalar = 0.0  # 1 − β̂₁ₜ, the weight of the newest term in the momentum
    w2: Scalar = 0.0  # 1 − β̂₂ₜ
    rho: Scalar = 0.0  # ρₜ
    keys: Keys = (0, 0)  # of this step's random numbers, for stochastic rounding

    # left by kernel.moments, in the wide dtype
    rows: Tensor | None = None  # mean of G² + ε₁ over the column axis, in the shape of state["row"]
    cols: Tensor | None = None  # mean of G² + ε₁ over the row axis, in the shape of state["col"]
    finite: Tensor | bool = True  # G² holds no NaN and no infinity

    sharded: bool = False
    place: tuple[int, ...] | None = None  # where this rank's part begins in the whole; None: it is the whole
    # mean of Rₜ over the row axis, in the shape of state["row"] with that axis of length 1; None: R is whole here
    mean_row: Tensor | None = None

    mask: Tensor | None = None  # is the step taken? Only where asking would make the host wait; None is yes
    scales: list[Tensor] = field(default_factory=list)  # 1/√V̂ as factors that broadcast over X; [] if V̂ is whole
    u2: Scalar = 0.0  # ΣU², left by kernel.energy
    x2: Scalar | None = None  # ΣX², likewise; only for relative steps, and for shards, which cannot be asked later

    # left by `conclude`
    scale: Scalar = 0.0  # αₜ / max(1, RMS(U)/d), negative to maximise
    decay: Scalar = 1.0  # 1 − ρₜ·λ
    figures: Figures | None = None  # for the report

    where: object = None  # where the parameter and its state lie in memory
    form: object = None  # how the gradient lies in memory: the same object as long as nothing of it changes
    # what a kernel keeps, from walk to walk and from step to step
    work: Any = None
    fleet: Any = None

    @cached_property
    def rounding(self) -> str:
        """How X is rounded: what the settings say, if it is short of float32."""
        return self.settings.rounding if self.x.dtype in SHORT else "nearest"

    @property
    def measures_x(self) -> bool:
        """Is ΣX² wanted before X is written?"""
        return self.settings.relative or self.sharded

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape; of the whole, where it is sharded."""
        return self.layout.shape


def step(bucket: list[Update], kernel: Kernel, ranks: Ranks | None = None) -> list[Update]:
    """Take one step with every parameter of the bucket; return those that were left out as non-finite."""
    for u in bucket:
        begin(u)  # t, β̂₂ₜ, ρₜ
    kernel.moments(_walkable(bucket))  # means of G² + ε₁ over columns and over rows
    if ranks is not None:
        ranks.complete_moments()
    taken = [u for u in bucket if admit(u)]
    kernel.factors(taken)  # Rₜ, Cₜ, and 1/√V̂ₜ as their product
    kernel.energy(_walkable(taken))  # ΣU², ΣX²
    if ranks is not None:
        ranks.complete_energies(taken)
    for u in taken:
        conclude(u)  # αₜ / max(1, RMS(U)/d)
    advance(taken)  # t
    kernel.apply_(_walkable(taken))  # Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ
    for u in taken:
        if u.figures is not None:
            u.trace.draw_from(None)  # what a kernel has kept to itself is older
            u.trace.note(*u.figures)
    stepped = set(taken)
    return [u for u in bucket if u not in stepped]


def release(bucket: list[Update]) -> None:
    """Let go of gradients, which others may want to free, and of what a kernel kept besides."""
    for u in bucket:
        u.g, u.rows, u.cols, u.mean_row, u.scales, u.work = NOTHING, None, None, None, [], None


def _walkable(bucket: list[Update]) -> list[Update]:
    """Those with data on this rank: a shard may be empty, and still has factors to keep."""
    return [u for u in bucket if not u.sharded or u.x.numel()]


def begin(u: Update) -> None:
    """The rates of step t: β̂₂ₜ, β̂₁ₜ and ρₜ (Algorithm 6). Nothing of the parameter or its state is changed yet."""
    t = scalar(u.state["step"]) + 1
    u.beta2, u.w1, u.w2, u.rho = u.settings.rates(t)
    if u.rounding == "stochastic":
        u.keys = keys(roots(u.settings.seed, u.number), t)
    u.rows = u.cols = u.mean_row = u.mask = u.work = u.fleet = u.x2 = None  # of the last step
    u.finite, u.scales, u.u2 = True, [], 0.0


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
    u.w1, u.w2 = u.w1 * u.mask, u.w2 * u.mask  # a weight of zero leaves an average as it was
    return True


def conclude(u: Update) -> None:
    """Algorithm 4, lines 3 and 9: from RMS(X) and RMS(U) to the number that the update is multiplied with."""
    s, count = u.settings, u.layout.count
    rms_x = None if u.x2 is None else eq.root_mean_square(u.x2, count)
    rms_u = eq.root_mean_square(u.u2, count)
    alpha = eq.step_size(u.rho, rms_x if s.relative else None, s.eps[1])
    divisor = eq.clip_divisor(rms_u, s.clip)
    u.scale = (-alpha if s.maximize else alpha) / divisor
    u.decay = 1 - u.rho * s.weight_decay
    u.figures = Figures(u.beta2, rms_x, alpha, rms_u, divisor > 1, 1 if u.mask is None else u.mask)


def advance(taken: list[Update]) -> None:
    """Count the step."""
    counts = [u.state["step"] for u in taken if u.mask is None]
    if len(counts) > 8:  # one call for all; for a few it takes longer than one for each
        torch._foreach_add_(counts, 1)
    else:
        for count in counts:
            count.add_(1)
    for u in taken:
        if u.mask is not None:
            u.state["step"].add_(u.mask)
