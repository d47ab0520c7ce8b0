"""R and C of the matrices of a batch: one tensor as it is, or on a device many, packed end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core import sums
from adafactor.core.contract import Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import Factored, statistics_dtype, sum_dtype
from adafactor.kernels.eager.pack import Pack


class Factor:
    """R or C of a batch's matrices: one tensor as it is, or many packed."""

    def __init__(self, parameters: list[Parameter], key: str, factorings: list[Factored]):
        """Prepare what lasts."""
        x, self.key, self.factorings = parameters[0].x, key, factorings
        self.dtype, self.wide = statistics_dtype(x.dtype), sum_dtype(x.device)
        self.states = [p.state[key] for p in parameters]
        self.summed = [factoring.summed_axis(key) for factoring in factorings]
        self.here = x.shape[self.summed[0]]  # the length that is summed on this rank
        self.mask: Tensor | None = None  # which steps are taken; None: all
        self.pack = Pack([s.numel() for s in self.states], x.device) if len(self.states) > 1 else None

    @classmethod
    def of(cls, parameters: list[Parameter], key: str) -> Factor | None:
        """The factor of this name, if the parameters have one."""
        factorings = [p.factoring for p in parameters if isinstance(p.factoring, Factored)]
        return cls(parameters, key, factorings) if factorings and key in parameters[0].state else None

    def means(self, totals: list[Tensor], shrink: list[float], eps1: float) -> Tensor:
        """From sums of G² to means of G² + ε₁; of a shard, its share of them."""
        lengths = [factoring.shape[axis] for factoring, axis in zip(self.factorings, self.summed, strict=True)]
        if self.pack is None:
            return (totals[0] / shrink[0] + self.here * eps1) / lengths[0]
        each = [1 / (s * length) for s, length in zip(shrink, lengths, strict=True)]
        return self.pack.join(totals, self.wide) * self.pack.constants(each, self.wide) + eps1

    def finite(self, means: Tensor) -> Tensor:
        """Whether the sums of each matrix are finite."""
        return (means.sum() if self.pack is None else self.pack.sums(means)).isfinite().reshape(-1)

    def average(self, means: Tensor, decay: Scalar, weight: Scalar) -> Tensor:
        """β̂₂ₜ·old + (1 − β̂₂ₜ)·means, rounded into the state, and returned as precise as the means."""
        old = self.states[0] if self.pack is None else self.pack.join(self.states, means.dtype)
        new = eq.average(old, means, self._spread(decay), self._spread(weight))
        if self.mask is not None:
            new = torch.where(self._spread(self.mask), new, old)
        if self.pack is None:
            old.copy_(new)
        else:
            self.pack.store(new, self.states)
        return new

    def mean(self, row: Tensor, known: Tensor | None) -> Tensor:
        """The mean of each matrix's R over n, which broadcasts over R."""
        if known is not None:
            return known
        if self.pack is not None and row.numel() == sum(f.shape[f.row_axis] for f in self.factorings):
            lengths = [float(n) for n in self.pack.sizes]
            return (self.pack.sums(row) / self.pack.vector(lengths, row.dtype))[self.pack.entry]
        if self.pack is not None:  # stacks of matrices
            rows = zip(self._apart(row), self.factorings, strict=True)
            means = (r.mean(f.row_axis_of_r, keepdim=True).expand_as(r) for r, f in rows)
            return torch.cat([mean.reshape(-1) for mean in means])
        factoring = self.factorings[0]
        total = sums.sum_along(row.unsqueeze(factoring.col_axis), factoring.row_axis)
        mean = total.unsqueeze(factoring.row_axis) / factoring.shape[factoring.row_axis]
        return mean.squeeze(factoring.col_axis)

    def over_x(self, vector: Tensor) -> list[Tensor]:
        """A vector of each matrix in the statistics' precision, (…, n, 1) or (…, 1, m)."""
        return [v.unsqueeze(axis) for v, axis in zip(self._apart(vector.to(self.dtype)), self.summed, strict=True)]

    def _apart(self, vector: Tensor) -> list[Tensor]:
        """A vector of each matrix, in the shape of its state."""
        if self.pack is None:
            return [vector]
        return [v.view(state.shape) for v, state in zip(self.pack.split(vector), self.states, strict=True)]

    def _spread(self, value: Scalar) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[0] if self.pack is None else value[self.pack.entry]
