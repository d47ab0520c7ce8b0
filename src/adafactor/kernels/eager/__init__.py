"""The backend in eager PyTorch, for any tensor on any device: `adafactor/algorithm.py` is what it runs.

`batch.py` is what surrounds the algorithm, and `factors.py` its R and C. `blocks.py` divides tensors so that extra
memory stays bounded, `pack.py` puts small tensors end to end. Sums are taken in an order that does not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from adafactor import algorithm
from adafactor.core import sums
from adafactor.core.contract import EXACT_TYPES, Gradients, Parameter, Scale, Sums, check_finite
from adafactor.core.factoring import Factored
from adafactor.core.settings import Settings
from adafactor.core.signals import held_back
from adafactor.kernels.eager.batch import Batch
from adafactor.kernels.eager.blocks import BLOCK_DEVICE

SMALL = 2**16  # elements: above this a launch of its own costs little beside the work


def why_not(parameter: Parameter) -> str | None:
    """Nothing is in the way: any tensor will do."""
    return None


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Let each parameter of a CPU step alone, so that it stays in the cache; those of a device go side by side."""
    batches: dict[Any, list[Parameter]] = {}
    for number, parameter in enumerate(parameters):
        batches.setdefault(_batch_of(parameter) or number, []).append(parameter)
    executors = []
    for key, members in batches.items():
        packed = isinstance(key, tuple) and key[-1] == "packed"
        most = BLOCK_DEVICE // SMALL
        executors += [Executor(members[i : i + most], packed) for i in range(0, len(members), most)]
    return executors


def _batch_of(p: Parameter) -> tuple[Any, ...] | None:
    """What parameters must share to step side by side; None for one that steps alone."""
    if sums.on_host(p.x) or p.overlaps or p.shard is not None or not p.x.numel():
        return None
    alike = p.x.device, p.group, p.x.dtype, p.gradient.dtype, p.in_lockstep
    if isinstance(p.factoring, Factored):
        is_plain = all(_is_plain(p.state[key]) for key in p.factoring.statistics)
        return (*alike, p.factoring.estimator, p.x.dim() == 2) if is_plain else None
    is_plain = p.gradient.type in EXACT_TYPES and all(map(_is_plain, (p.x, *p.state.values())))
    return (*alike, "packed") if is_plain and p.x.numel() <= SMALL and p.rounding == "nearest" else None


def _is_plain(t: Tensor) -> bool:
    return type(t) in EXACT_TYPES and t.is_contiguous()


class Executor:
    """Parameters that eager PyTorch steps side by side, by a generator of `algorithm.py`."""

    takes_scale = False

    def __init__(self, parameters: list[Parameter], packed: bool):
        """Nothing is prepared before it is known which of them have a gradient."""
        self.parameters, self.in_lockstep, self._packed = parameters, parameters[0].in_lockstep, packed
        self.sums: list[Sums] = []
        self._batch: Batch | None = None
        self._phases: algorithm.Phases | None = None  # None: no gradient, or the step is not taken
        self._norms: tuple[Any, Any] | None = None  # once they are there
        self._skipped: list[Parameter] = []  # in this step, as far as the host knows

    def begin(
        self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None, scale: Scale | None
    ) -> None:
        """Take the gradients and compute the rates of this step."""
        members = [p for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        self._norms, self._phases, self._skipped = None, None, []
        if self._batch is None or self._batch.parameters != members:
            self.flush()
            self._batch = Batch(members, self._packed) if members else None
        if self._batch is not None:
            s = settings[members[0].group]
            self._batch.begin([g for g in grads if g is not None], s)
            run = algorithm.factored_step if isinstance(members[0].factoring, Factored) else algorithm.unfactored_step
            self._phases = run(self._batch, s)

    def moments(self) -> None:
        """Run the algorithm to its first pause."""
        if self._batch is None or self._phases is None:
            return
        self._means = rows, cols = next(self._phases)
        finite = self._batch.finite(rows, cols)
        self.sums = [Sums(p, flag) for p, flag in zip(self._batch.parameters, finite, strict=True)]
        if len(self.sums) == 1:
            one, p = self.sums[0], self._batch.parameters[0]
            one.rows, one.cols = rows, cols
            if p.shard is not None:
                beta2, _, w2, _ = self._batch.rates
                one.mean_row = p.shard.mean_row(rows, p.state.get("row"), beta2, w2)

    def norms(self) -> None:
        """Run it to its second pause; where the host knows that the step is not taken, end it here."""
        if self._batch is None or self._phases is None:
            return
        first, *others = self.sums
        if first.finite is False:  # on a CPU, where it is alone
            self._phases, self._skipped = None, [first.parameter]
            return
        self._batch.skip([one.finite for one in self.sums])
        complete = (*self._means, None) if others else (first.rows, first.cols, first.mean_row)
        self._norms = u2, x2 = self._phases.send(complete)
        if not others:
            first.u2, first.x2 = (v[0] if isinstance(v, Tensor) and v.dim() else v for v in (u2, x2))

    def apply_(self) -> None:
        """Run the rest."""
        if self._norms is None:
            self.norms()
        if self._batch is not None and self._phases is not None and self._norms is not None:
            if len(self.sums) == 1:  # other ranks may have added theirs
                self._norms = self._batch.as_scalars(self.sums[0].u2, self.sums[0].x2)
            with suppress(StopIteration):
                self._phases.send(self._norms)

    def step(self) -> None:
        """Run all of it. A signal that comes meanwhile is handled at the end."""
        with held_back():
            self.moments()
            check_finite(self.sums)
            self.apply_()

    def end(self) -> list[Parameter]:
        """Let go of the gradients; count the steps that were skipped, as far as the host knows of them."""
        for parameter in self._skipped:
            parameter.metrics.skipped += 1
        self.sums, self._phases = [], None
        if self._batch is not None:
            self._batch.end()
        return self._skipped

    def flush(self) -> None:
        """Hand the metrics to the parameters."""
        if self._batch is not None:
            self._batch.flush()
