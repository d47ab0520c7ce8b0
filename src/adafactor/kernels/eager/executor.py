"""The contract's verbs in eager PyTorch: they lead the functions of `adafactor/algorithm.py` through a step.

On a CPU an executor has one parameter, which stays in the cache, and its scalars are numbers. On a device it has many:
their scalars are computed together, as vectors with an entry for each, and a step that is left out is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from adafactor import algorithm
from adafactor.core import rounding, sums
from adafactor.core.contract import Gradients, Parameter, check_finite
from adafactor.core.factoring import Factored, statistics_dtype, sum_dtype
from adafactor.core.settings import Rates, Settings
from adafactor.core.update import Sizes, Update


class Executor:
    """Parameters of one group that step side by side; on a CPU, one."""

    def __init__(self, parameters: list[Parameter]):
        """Prepare for gradients of all of them."""
        self.parameters, self.in_lockstep = parameters, parameters[0].in_lockstep
        x = parameters[0].x
        self._device, self._dtype, self._wide = x.device, statistics_dtype(x.dtype), sum_dtype(x.device)
        self._on_host = len(parameters) == 1 and sums.on_host(x)
        self._members: list[Parameter] = []  # with a gradient in this step
        self._metrics: tuple[Tensor, Tensor] | None = None  # on a device: what `flush` hands to the parameters
        self.sums: list[Update] = []
        self._taken: list[Update] | None = None  # the steps that are taken; None: nobody has asked yet
        self._mask: Tensor | None = None  # on a device, which of those really are; None: all

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take the gradients; compute the rates of step t (Algorithm 6)."""
        given = [(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        members = [p for p, _ in given]
        if not members:
            return
        if members != self._members:
            self.flush()
            self._members, self._count = members, self._join([float(p.factoring.count) for p in members])
            roots = [rounding.roots(p.settings.seed, p.number) for p in members]
            self._roots: Any = roots[0] if self._on_host else tuple(torch.tensor(roots, device=self._device).unbind(1))
        self._s = s = settings[members[0].group]
        t = 1 + self._join([p.state["step"] for p in members])
        self._rates = s.rates(t)
        self.sums = [
            _update(p, g, s, rates) for (p, g), rates in zip(given, self._split_rates(self._rates), strict=True)
        ]
        if any(p.rounding == "stochastic" for p in members) or any(u.rounds_momentum for u in self.sums):
            keys = zip(*map(self._split, rounding.keys(self._roots, t)), strict=True)
            for u, key in zip(self.sums, keys, strict=True):
                u.keys = key

    def moments(self) -> None:
        """Take the means of G² + ε₁; find out which gradients are finite."""
        largest = []  # of each parameter, in the precision of its state
        for u in self.sums:
            algorithm.moments(u)
            means = u.cols if u.rows is None else u.rows
            largest.append(sums.largest_square(u.g, u.dtype) if means is None else means.sum())
            if u.parameter.shard is not None:  # this rank's part of mean(Rₜ), where no rank has R whole
                u.mean_row = u.parameter.shard.mean_row(u.rows, u.row, u.rates.beta2, u.rates.w2)
        if largest:
            flags = torch.stack(largest) < inf  # a NaN is not
            for u, flag in zip(self.sums, flags.tolist() if self._on_host else flags.unbind(), strict=True):
                u.finite = flag

    def norms(self) -> None:
        """Take Rₜ, Cₜ, ΣU² and ΣX² of the steps that are taken: on a CPU these are known; on a device, all."""
        self._taken = taken = [u for u in self.sums if u.finite is not False]
        flags = [u.finite for u in taken if isinstance(u.finite, Tensor)]  # of all of them or none
        self._mask = torch.stack(flags) if flags else None
        if not taken:
            return
        self._mask_weights(taken)
        for u in taken:
            algorithm.norms(u)
        self._give(self._wide, u2=self._join([u.norm_u for u in taken]) ** 2)
        if taken[0].norm_x is not None:
            self._give(self._wide, x2=self._join([u.norm_x for u in taken]) ** 2)

    def apply_(self) -> None:
        """Write X and the state; keep what `report()` shows."""
        if self._taken is None:
            self.norms()
        taken = self._taken or []
        for u in self.sums:
            u.parameter.metrics.skipped += u.finite is False
        if not taken:
            return
        x2 = None if taken[0].x2 is None else self._join([u.x2 for u in taken])
        sizes = algorithm.step_size(self._join([u.u2 for u in taken]), x2, self._count, self._rates, self._s)
        self._give(self._dtype, before=self._masked(sizes.before), after=self._masked(sizes.after))
        if self._s.weight_decay:
            self._give(self._dtype, keep=1 - self._masked(sizes.decay))
        for u in taken:
            algorithm.apply_(u)
        kept = [old for u in taken for old in (u.row, u.col) if old is not None]
        if kept:
            torch._foreach_copy_(kept, [new for u in taken for new in (u.R, u.C) if new is not None])
        counts = [u.parameter.state["step"] for u in taken]
        if self._mask is None:
            torch._foreach_add_(counts, 1)
        else:
            # in two operations: a wrapper of two tensors would add to its one count twice
            torch._foreach_copy_(counts, torch._foreach_add(counts, list(self._mask.to(counts[0].dtype).unbind())))
        self._note(sizes)

    def step(self) -> None:
        """Run all of it."""
        self.moments()
        check_finite(self.sums)
        self.apply_()

    def end(self) -> list[Parameter]:
        """Let go of the gradients; return the parameters whose steps are known to have been left out."""
        skipped = [u.parameter for u in self.sums if u.finite is False and self._taken is not None]
        self.sums, self._taken = [], None
        return skipped

    def flush(self) -> None:
        """Hand the metrics that are on a device to the parameters, without reading them."""
        if self._metrics is None:
            return
        for p, figures, counts in zip(self._members, *(table.unbind(1) for table in self._metrics), strict=True):
            (beta2, rms_x, alpha, rms_u), (clipped, taken, skipped) = figures.unbind(), counts.unbind()
            p.metrics.add(beta2, rms_x if p.measures_x else None, alpha, rms_u, clipped, taken)
            p.metrics.skipped = p.metrics.skipped + skipped
        self._metrics = None

    def _note(self, sizes: Sizes) -> None:
        """Keep the metrics of this step, or on a device of the last one that was taken."""
        figures, clipped = (self._rates.beta2, sizes.rms_x, sizes.alpha, sizes.rms_u), sizes.divisor > 1
        if self._on_host:
            self._members[0].metrics.add(*figures, int(clipped), 1)
            return
        zero = torch.zeros_like(self._count)
        taken = zero + (1 if self._mask is None else self._mask)
        new = torch.stack([zero + (nan if figure is None else figure) for figure in figures])
        counts = torch.stack([taken * clipped, taken, 1 - taken])
        if self._metrics is not None:
            new, counts = torch.where(taken > 0, new, self._metrics[0]), counts + self._metrics[1]
        self._metrics = new, counts

    def _mask_weights(self, taken: list[Update]) -> None:
        """Let nothing of a bad gradient reach what is kept: its means are zero, and so are the weights of all new."""
        w1, w2 = self._masked(self._rates.w1), self._masked(self._rates.w2)
        self._give(self._dtype, w1=w1, w2=w2)
        if self._mask is None:
            return
        rates = self._rates._replace(beta2=self._masked(self._rates.beta2, 1.0), w2=w2)
        for u, own, skipped in zip(taken, self._split_rates(rates), (~self._mask).unbind(), strict=True):
            u.rates, u.skipped = own, skipped
            for means in (u.rows, u.cols):
                if means is not None:
                    u.masked(means)

    def _masked(self, value: Any, otherwise: float = 0.0) -> Any:
        """A scalar of each parameter, or another one where its step is left out."""
        if self._mask is None:
            return value
        value = value if isinstance(value, Tensor) else torch.full_like(self._count, value)
        return torch.where(self._mask, value, otherwise)

    def _join(self, values: Sequence[Any]) -> Any:
        """The scalars of all parameters: a number, or on a device a vector."""
        if self._on_host:
            return float(values[0])
        if isinstance(values[0], Tensor):
            return torch.stack(list(values)).to(self._wide)
        return torch.tensor(values, dtype=self._wide, device=self._device)

    def _split(self, value: Any) -> list[Any]:
        """The scalar of each parameter."""
        n = len(self._members)
        return list(value.expand(n).unbind()) if isinstance(value, Tensor) else [value] * n

    def _split_rates(self, rates: Rates) -> list[Rates]:
        return list(map(Rates, *map(self._split, rates)))

    def _give(self, dtype: torch.dtype, **scalars: Any) -> None:
        """Hand each parameter its own, in the precision that torch's operations in place want."""
        for name, value in scalars.items():
            own = self._split(value.to(dtype) if isinstance(value, Tensor) else value)
            for u, entry in zip(self._taken or [], own, strict=True):
                setattr(u, name, entry)


def _update(p: Parameter, g: Tensor, s: Settings, rates: Rates) -> Update:
    f, state = p.factoring, p.state
    axes = (f.row_axis, f.col_axis) if isinstance(f, Factored) else (0, 0)
    row, col, full = state.get("row"), state.get("col"), state.get("full")
    return Update(parameter=p, x=p.x, g=g, axes=axes, row=row, col=col, full=full, s=s, rates=rates)
