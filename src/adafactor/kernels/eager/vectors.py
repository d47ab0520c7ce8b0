"""Many small vectors on a device, laid end to end: what would be a launch for each of them is one for all.

A model has more biases and norms than matrices, and each matrix has two factors. Taken one at a time they would cost as
many launches as the matrices themselves. Here those of a batch make one long vector, and what is a scalar for one of
them is spread over its elements. `Vectors` is Algorithm 5 for whole parameters; `Factors` is what Algorithm 4 does with
R and C, between the walks over the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adafactor.core import equations as eq
from adafactor.core.bucket import PLAIN, Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype, sum_dtype
from adafactor.kernels.eager.blocks import BLOCK_DEVICE, shrink_of
from adafactor.kernels.eager.scalars import keep_and_fade

if TYPE_CHECKING:
    from adafactor.core.step import Update
    from adafactor.kernels.eager.scalars import Batch

SMALL = 2**16  # elements: above this a launch of its own costs little beside the work


class EndToEnd:
    """How vectors of these lengths lie in one, and which of them each element belongs to."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        """Make the index once; it lasts."""
        self.sizes, self.dtype = list(sizes), dtype
        lengths = torch.tensor(self.sizes, device=device)
        number = torch.arange(len(self.sizes), device=device)
        self.entry = number.repeat_interleave(lengths, output_size=sum(self.sizes))

    def lay(self, vectors: Sequence[Tensor]) -> Tensor:
        """Put vectors end to end."""
        return torch.cat([v.reshape(-1) for v in vectors]).to(self.dtype)

    def cut(self, laid: Tensor) -> list[Tensor]:
        """Take them apart again, as views."""
        return list(laid.split(self.sizes))

    def store(self, laid: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy each part to where it is kept."""
        torch._foreach_copy_([t.view(-1) for t in tensors], self.cut(laid))

    def spread(self, values: Sequence[Scalar]) -> Scalar:
        """A scalar for each vector as one for each element; a number that is the same for all stays one."""
        if not isinstance(values[0], Tensor):
            return values[0]
        stacked = torch.stack([value for value in values if isinstance(value, Tensor)])
        return (stacked if stacked.dtype == torch.bool else stacked.to(self.dtype))[self.entry]

    def sums(self, laid: Tensor) -> Tensor:
        """Σ|v| of each vector."""
        return torch.stack(torch._foreach_norm(self.cut(laid), 1))


class Vectors:
    """Algorithm 5 for small tensors of a batch whose second moment is kept whole."""

    def __init__(self, batch: Batch, parameters: list[Parameter]):
        """Prepare what lasts."""
        self.batch, self.parameters = batch, parameters
        x = parameters[0].x
        self.ends = EndToEnd([p.x.numel() for p in parameters], statistics_dtype(x.dtype), x.device)
        self.updates: list[Update] = []

    def begin(self, updates: list[Update]) -> None:
        """Take the gradients."""
        self.updates, self.g = updates, self.ends.lay([u.g for u in updates])

    def moments(self) -> None:
        """Whether each G² is finite: in double, no sum of float32 squares is infinite unless one of them is."""
        finite = self.ends.sums((self.g * self.g).to(sum_dtype(self.g.device))).isfinite()
        for u, one in zip(self.updates, finite.unbind(), strict=True):
            u.finite = one

    def energy(self) -> None:
        """V̂ₜ and m̂ₜ (lines 5–6), ΣU² and ΣX²."""
        s, g = self.batch.settings, self.g
        self.mask = self._spread("mask") if self.updates[0].mask is not None else None
        if isinstance(self.mask, Tensor):
            g = g.masked_fill(~self.mask, 0)
        kept = [p.state["full"] for p in self.parameters]
        v, weight = self.ends.lay(kept), self._spread("w2")
        keep, fade = keep_and_fade(self._spread("beta2"), weight)
        v = v * keep - v * fade + (g * g + s.eps[0]) * weight
        self.ends.store(v, kept)
        if s.beta1 and s.momentum_of == "gradient":
            g = self._average(g)
        self.u, self.x = g * v.rsqrt(), self.ends.lay([p.x for p in self.parameters])
        self._measure("u2", self.u)
        if s.relative:
            self._measure("x2", self.x)

    def apply_(self) -> None:
        """X (line 10)."""
        s, change = self.batch.settings, self.u * self._spread("scale")
        if isinstance(self.mask, Tensor):  # a weight of zero does not keep a NaN out of an average
            change = change.masked_fill(~self.mask, 0)
        if s.beta1 and s.momentum_of == "update":
            change = self._average(change)
        new = self.x * self._spread("decay") - change if s.weight_decay else self.x - change
        if isinstance(self.mask, Tensor):
            new = torch.where(self.mask, new, self.x)
        self.ends.store(new, [p.x for p in self.parameters])

    def end(self) -> None:
        """Let go of everything that is of this step."""
        self.updates = []
        self.g = self.u = self.x = self.mask = None  # type: ignore[assignment]

    def _spread(self, name: str) -> Scalar:
        return self.ends.spread([getattr(u, name) for u in self.updates])

    def _average(self, new: Tensor) -> Tensor:
        kept = [p.state["momentum"] for p in self.parameters]
        m = self.ends.lay(kept)
        m = m + (new - m) * self._spread("w1")
        self.ends.store(m, kept)
        return m

    def _measure(self, name: str, laid: Tensor) -> None:
        wide = laid.to(sum_dtype(laid.device))
        for u, total in zip(self.updates, self.ends.sums(wide * wide).unbind(), strict=True):
            setattr(u, name, total)


class Factors:
    """Algorithm 4, lines 5–7, for all matrices of a batch: their R end to end, and their C."""

    def __init__(self, batch: Batch, parameters: list[Parameter]):
        """Prepare what lasts: the lengths that make means of sums."""
        self.batch, self.parameters, device = batch, parameters, parameters[0].x.device
        wide, eps1 = sum_dtype(device), parameters[0].settings.eps[0]
        self.updates: list[Update] = []
        self.parts = []
        for key, other in (("row", "col"), ("col", "row")):
            ends = EndToEnd([p.state[key].numel() for p in parameters], wide, device)
            lengths = [1 / (shrink_of(p.shape) * p.state[other].numel()) for p in parameters]
            each = torch.tensor(lengths, dtype=wide, device=device)[ends.entry]
            self.parts.append((key, ends, each, eps1))
        self.rows = torch.tensor([p.state["row"].numel() for p in parameters], dtype=wide, device=device)

    def begin(self, updates: list[Update]) -> None:
        """Take the updates of a step."""
        self.updates = updates
        for u in updates:
            u.is_laid = True

    def moments(self) -> None:
        """From the sums of G² that the first walk left to means of G² + ε₁, and whether G² is finite."""
        self.means = []
        for key, ends, each, eps1 in self.parts:
            sums = [u.rows if key == "row" else u.cols for u in self.updates]
            self.means.append(ends.lay([s for s in sums if s is not None]) * each + eps1)
        finite = self.parts[0][1].sums(self.means[0]).isfinite()
        for u, one in zip(self.updates, finite.unbind(), strict=True):
            u.finite = one

    def factors(self) -> None:
        """Rₜ and Cₜ, kept in the state, and (R/mean R)^−½ and C^−½."""
        new = []
        for (key, ends, _, _), mean in zip(self.parts, self.means, strict=True):
            kept = [p.state[key] for p in self.parameters]
            old = ends.lay(kept)
            decay, weight = ([getattr(u, name) for u in self.updates] for name in ("beta2", "w2"))
            fresh = eq.average(old, mean, ends.spread(decay), ends.spread(weight))
            if self.updates[0].mask is not None:
                mask = ends.spread([u.mask for u in self.updates if u.mask is not None])
                assert isinstance(mask, Tensor)
                fresh = torch.where(mask, fresh, old)
            ends.store(fresh, kept)
            new.append(fresh)
        (_, rows, _, _), (_, cols, _, _) = self.parts
        mean = (rows.sums(new[0]) / self.rows)[rows.entry]
        dtype = statistics_dtype(self.parameters[0].x.dtype)
        row_scales, col_scales = rows.cut(eq.row_scale(new[0], mean).to(dtype)), cols.cut(new[1].rsqrt().to(dtype))
        for u, r, c in zip(self.updates, row_scales, col_scales, strict=True):
            row_axis, col_axis = u.parameter.factoring.row_axis or 0, u.parameter.factoring.col_axis or 0
            u.scales = [r.unsqueeze(col_axis), c.unsqueeze(row_axis)]  # (n, 1) and (1, m)

    def end(self) -> None:
        """Let go of everything that is of this step."""
        self.updates, self.means = [], []


def find_vectors(batch: Batch, updates: list[Update]) -> list[Vectors]:
    """Those of a batch that can be laid end to end as whole parameters, by dtype, no longer than a block in all."""

    def fits(u: Update) -> bool:
        p = u.parameter
        return (
            p.factoring.estimator == "full" and p.rounding == "nearest" and p.x.numel() <= SMALL and _is_plain(p, u.g)
        )

    return [Vectors(batch, run) for run in _runs(batch, updates, fits, BLOCK_DEVICE // SMALL)]


def find_factors(batch: Batch, updates: list[Update]) -> list[Factors]:
    """The matrices of a batch whose R and C can be laid end to end."""

    def fits(u: Update) -> bool:
        p = u.parameter
        return p.factoring.estimator == "outer" and p.x.dim() == 2 and _is_plain(p)

    return [Factors(batch, run) for run in _runs(batch, updates, fits, 1024)]


def _runs(batch: Batch, updates: list[Update], fits: Callable[[Update], bool], most: int) -> list[list[Parameter]]:
    """The parameters that fit, by the dtypes of X and G, at least two and at most so many at a time."""
    found: dict[object, list[Parameter]] = {}
    for u in (updates[place] for place in batch.places):
        if not batch.on_host and u.parameter.shard is None and u.parameter.x.numel() and fits(u):
            found.setdefault((u.parameter.x.dtype, u.g.dtype), []).append(u.parameter)
    runs = [members[i : i + most] for members in found.values() for i in range(0, len(members), most)]
    return [run for run in runs if len(run) > 1]


def _is_plain(p: Parameter, *others: Tensor) -> bool:
    """Whether the state, and other tensors, can be seen as vectors."""
    tensors = [*p.state.values(), *others, *([p.x] if others else [])]
    return all(type(t) in PLAIN and t.is_contiguous() for t in tensors)
