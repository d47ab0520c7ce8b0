"""What crosses between the step, the kernels and the ranks: a parameter, its sums, and the verbs of a backend.

A backend is a module with two functions: `why_not(parameter)` says what is in the way of a parameter, and
`prepare(parameters)` makes *executors* of those that it can step. An executor is prepared once and takes many steps:

| verb | reads | leaves |
|---|---|---|
| `begin` | gradients, settings, t | β̂₂ₜ, ρₜ |
| `moments` | G | `sums`: row and column means of G² + ε₁, and whether G² is finite |
| `norms` | completed means | in `sums` ΣU² and ΣX²; only where other ranks add theirs |
| `apply_` | completed sums | Rₜ, Cₜ, V̂ₜ, the momentum, Xₜ, t |
| `step` | G | all of it in one call, where nothing happens in between |
| `end` | | the parameters that were skipped; lets go of the gradients |
| `flush` | | the metrics behind `report()` |

Nothing of X or the state changes before `apply_`: until then a step can be given up, because a gradient is bad or a
rank is lost. Where a parameter is sharded, X, G and the state are
this rank's shard, and `factoring` and the sums' divisors are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from adafactor.core.equations import Scalar
from adafactor.core.factoring import Factoring, statistics_dtype
from adafactor.core.report import StepMetrics
from adafactor.core.rounding import SIXTEEN_BIT
from adafactor.core.settings import Settings
from adafactor.core.sums import PLAIN

if TYPE_CHECKING:
    from adafactor.distributed.shard import Shard

Unit = tuple[Tensor, ...]  # parameters that step together inside backward
Gradients = list[Tensor | None]  # one entry for each parameter; None where it has none this time


class Form(NamedTuple):
    """What a gradient looks like: the dtype and the stride are for backends."""

    type: type
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class Parameter:
    """What lasts of one parameter from step to step.

    `settings` are those of its group when the bucket was made. They all still hold but the rates, which every step is
    given anew.
    """

    p: Tensor  # as it stands in its group
    x: Tensor  # any strides, any floating dtype; this rank's part where it is sharded
    state: dict[str, Tensor]  # likewise
    factoring: Factoring  # of the whole
    settings: Settings
    group: int
    name: str
    number: int  # its place among all parameters, for the random numbers of stochastic rounding
    metrics: StepMetrics
    shard: Shard | None = None
    form: Form | None = None  # of its last gradient; None: it never had one
    slices: list[Parameter] | None = None  # with `per_slice`, what steps in its place: views of it and its state

    @property
    def stepping(self) -> list[Parameter]:
        """What steps for it: its slices on this rank, or itself."""
        return [self] if self.slices is None else self.slices

    def cut(self, g: Tensor | None) -> Gradients:
        """The gradients of what steps for it."""
        if self.slices is None:
            return [g]
        return [None] * len(self.slices) if g is None else list(g.unbind())

    @property
    def gradient(self) -> Form:
        """The form of its last gradient; a backend is asked only about parameters that had one."""
        assert self.form is not None
        return self.form

    @property
    def offset(self) -> tuple[int, ...] | None:
        """Where this rank's part begins in the whole; None: it is the whole."""
        return None if self.shard is None else self.shard.place

    @cached_property
    def rounding(self) -> str:
        """How X is rounded: what the settings say, if it has 16 bits."""
        return self.settings.rounding if self.x.dtype in SIXTEEN_BIT else "nearest"

    @property
    def in_lockstep(self) -> bool:
        """Whether something happens between its phases: sums of other ranks are added, or a bad gradient raises."""
        return self.shard is not None or self.settings.on_nonfinite == "raise"

    @property
    def measures_x(self) -> bool:
        """Whether ΣX² is wanted before X is written; of a shard it cannot be asked for later."""
        return self.settings.relative or self.shard is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape; of the whole, where it is sharded."""
        return self.factoring.shape


@dataclass(eq=False)
class Sums:
    """The sums of one parameter in one step: all that other ranks have a share in.

    The tensors may be views of an executor's own memory: whoever completes a sum writes into it.
    """

    parameter: Parameter
    finite: Tensor | bool = True  # G² has no NaN and no infinity
    rows: Tensor | None = None  # means of G² + ε₁ over the column axis, in the shape of state["row"], in double
    cols: Tensor | None = None  # means of G² + ε₁ over the row axis, in the shape of state["col"], in double
    mean_row: Tensor | None = None  # mean of Rₜ over the row axis, where no rank has R whole
    u2: Scalar = 0.0  # ΣU²
    x2: Scalar | None = None  # ΣX²; None where nobody needs it


class Executor(Protocol):
    """What a backend has prepared for some parameters of a bucket."""

    parameters: list[Parameter]
    in_lockstep: bool  # its phases are run beside those of other executors

    @property
    def sums(self) -> Sequence[Sums]:
        """Of the parameters with a gradient, as `moments` has left them."""

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take gradients, the groups' settings, and which parameters were written to since the last step (or None)."""

    def moments(self) -> None:
        """Run the first pass: means of G² + ε₁."""

    def norms(self) -> None:
        """Run the second pass: ΣU² and ΣX²."""

    def apply_(self) -> None:
        """Run what is left, with the completed sums: X and the state."""

    def step(self) -> None:
        """Run all passes, for an executor that is not in lockstep."""

    def end(self) -> list[Parameter]:
        """Let go of what was of this step; return the parameters that were skipped."""

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to the parameters."""


class Backend(Protocol):
    """A module that steps parameters."""

    def why_not(self, parameter: Parameter) -> str | None:
        """What is in the way of stepping this parameter; None if nothing is."""

    def prepare(self, parameters: list[Parameter]) -> list[Executor]:
        """Prepare parameters that nothing is in the way of."""


Prepare = Callable[[list[Parameter], str], list[Executor]]  # `kernels.prepare`, which is above this package


def check_finite(sums: Sequence[Sums]) -> None:
    """Decide what a bad gradient does: here it raises, or `finite` says from now on whether the step is taken."""
    for one in sums:
        how = one.parameter.settings.on_nonfinite
        if how == "ignore":
            one.finite = True
        elif how == "raise" and not one.finite:  # on a device the host waits here
            raise FloatingPointError(
                f"the gradient of {one.parameter.name} (shape {one.parameter.shape}), or its second moment, has a NaN, "
                f"an infinity, or an entry whose square overflows {statistics_dtype(one.parameter.x.dtype)}; nothing "
                "was updated"
            )


def why_not_plain(parameter: Parameter) -> str | None:
    """Why a compiled kernel must not use the memory of a parameter, its state or its gradient; None if it may."""
    for t in (parameter.x, *parameter.state.values()):
        if isinstance(t, Tensor) and type(t) not in PLAIN:
            return f"it is, or its state is, a {type(t).__name__}, a subclass of Tensor"
    if parameter.gradient.type not in PLAIN:
        return f"its gradient is a {parameter.gradient.type.__name__}, a subclass of Tensor"
    return None
