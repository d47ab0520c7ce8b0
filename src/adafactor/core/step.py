"""One step of a bucket, from G to X: Algorithms 4 and 5 of the paper, with `equations.py` beside it.

    G ─ moments ─▶ row and column means of G² ─ factors ─▶ R, C ─ energy ─▶ ΣU², ΣX² ─ conclude ─▶ α ─ apply ─▶ X

Every step comes through `step`. Its parts belong to a *work*: what a kernel has prepared for some of the bucket's
parameters (`kernels/__init__.py` has the contract). `walk` is the order of a step. A compiled work that nobody has to
interrupt takes all of it in one call, in the same order. Sums of sharded parameters are completed between the walks, by
`sharding.Ranks`; and where a bad gradient shall raise, it does so before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from adafactor.core.bucket import Bucket, Gradients, Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype
from adafactor.core.grad_scaler import Scaling
from adafactor.core.rounding import Keys
from adafactor.core.settings import Settings
from adafactor.core.signals import held_back
from adafactor.distributed.reductions import Ranks
from adafactor.kernels import Executor


@dataclass(eq=False)
class Update:
    """One parameter on its way through a step; it is gone when the step is."""

    parameter: Parameter
    g: Tensor  # the gradient, in the parameter's shape

    # left by `begin`
    beta2: Scalar = 0.0  # β̂₂ₜ
    w1: Scalar = 0.0  # 1 − β̂₁ₜ, the weight of the newest term in the momentum
    w2: Scalar = 0.0  # 1 − β̂₂ₜ
    keys: Keys = (0, 0)  # of this step's random numbers, for stochastic rounding

    # left by `moments`; the means are in float64 where the device has it
    rows: Tensor | None = None  # mean of G² + ε₁ over the column axis, in the shape of state["row"]
    cols: Tensor | None = None  # mean of G² + ε₁ over the row axis, in the shape of state["col"]
    mean_row: Tensor | None = None  # mean of Rₜ over the row axis, from the ranks; None: R is whole here
    finite: Tensor | bool = True  # G² holds no NaN and no infinity

    largest: Tensor | None = None  # the largest G² of what is kept whole

    mask: Tensor | None = None  # is the step taken? Only where asking would make the host wait; None is yes
    not_taken: Tensor | None = None  # the opposite
    scales: list[Tensor] = field(default_factory=list)  # 1/√V̂ as factors that broadcast over X; [] if V̂ is whole
    u2: Scalar = 0.0  # ΣU², left by `energy`
    x2: Scalar | None = None  # ΣX², likewise; None where nobody needs it

    # left by `conclude`
    scale: Scalar = 0.0  # αₜ / max(1, RMS(U)/d), negative to maximise
    decay: Scalar = 1.0  # 1 − ρₜ·λ
    is_laid: bool = False  # its factors lie end to end with others', which are computed together


def step(
    bucket: Bucket, grads: Gradients, settings: Sequence[Settings], scaling: Scaling | None = None
) -> list[Parameter]:
    """Take one step with every parameter that has a gradient; return those that were skipped as non-finite."""
    if scaling is not None and not unscale(bucket, grads, scaling):
        return []
    written = bucket.written_between_steps()
    try:
        together = [work for work in bucket.executors if work.together]
        for work in together:
            begin(work, bucket, grads, settings, written)
        if together:
            walk(together, bucket.ranks)
        for work in bucket.executors:
            if not work.together:
                begin(work, bucket, grads, settings, written)
                work.step() if work.at_once else walk([work])
    finally:
        skipped = [parameter for work in bucket.executors for parameter in work.end()]
        bucket.end_step()
    return skipped


def unscale(bucket: Bucket, grads: Gradients, scaling: Scaling) -> bool:
    """Take the scale out of gradients, or leave it to kernels that can; return False if no step shall be taken."""
    able = [work for work in bucket.executors if work.scaling is not None]
    others = [work for work in bucket.executors if work.scaling is None]
    own = [g for work in others for i in bucket.places[work] if (g := grads[i]) is not None]
    may_wait = any(p.settings.on_nonfinite != "skip" or p.x.is_cpu for work in others for p in work.parameters)
    if own and not scaling.unscale_(own, may_wait):
        return False
    for work in able:
        work.scaling = scaling.on(work.parameters[0].x.device)
    return True


def begin(
    work: Executor, bucket: Bucket, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None
) -> None:
    """Hand a work its gradients; t, β̂₂ₜ and ρₜ follow from the state and the settings."""
    places = bucket.places[work]
    own = None if written is None else [written[i] for i in places]
    work.begin([grads[i] for i in places], settings, own)


def walk(executors: Sequence[Executor], ranks: Ranks | None = None) -> None:
    """Take these executors from G to X, side by side. A signal that comes meanwhile is handled at the end."""
    with held_back():
        for work in executors:
            work.moments()  # means of G² + ε₁ over columns and over rows
        if ranks is not None:
            ranks.complete_moments([u for work in executors for u in work.updates])
        for work in executors:
            work.admit()  # raises FloatingPointError where a bad gradient shall; nothing has been changed so far
        for work in executors:
            work.factors()  # Rₜ, Cₜ, and 1/√V̂ₜ as their product
            work.energy()  # ΣU², ΣX²
        if ranks is not None:
            ranks.complete_energies([u for work in executors for u in work.updates])
        for work in executors:
            work.conclude()  # αₜ / max(1, RMS(U)/d)
            work.apply_()  # Xₜ = Xₜ₋₁·(1 − ρₜ·λ) − αₜ·Ûₜ; t


def not_finite(parameter: Parameter) -> FloatingPointError:
    """What `on_nonfinite="raise"` raises."""
    return FloatingPointError(
        f"the gradient of {parameter.name} (shape {parameter.shape}) has a NaN, an infinity, or an entry whose square "
        f"overflows {statistics_dtype(parameter.x.dtype)}; nothing was updated"
    )
