"""A sharded parameter on one rank, and which of its sums are partial there.

A mesh dimension splits one axis of a tensor between its ranks, or has copies of it. For the sums of an n × m matrix on
one rank this means:

| split axis | mean over columns (→ R) | mean over rows (→ C) | mean(R) | ΣU², ΣX², is G finite? |
|---|---|---|---|---|
| rows | whole | partial | partial | partial |
| columns | partial | whole | whole, once R is | partial |
| both, by two dimensions | partial over the second | partial over the first | partial over both | partial over both |
| another one, of a stack of matrices | whole | whole | whole | partial |

The factors are split as their parameter is, and never gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core.dtensor import beginning, cut_axis, is_sharded, local
from adafactor.core.equations import Scalar
from adafactor.core.factoring import Factored, Factoring, sum_dtype, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Split:
    """Which axis of a tensor each mesh dimension cuts; None where it holds copies, or has one rank only."""

    factoring: Factoring
    axes: tuple[int | None, ...]

    def partial(self) -> dict[str, tuple[int, ...]]:
        """The sums that no rank has whole, and the mesh dimensions over which each is to be added up."""
        axes = {k: axis for k, axis in enumerate(self.axes) if axis is not None}
        dimensions = {"scalars": tuple(axes)}
        if isinstance(f := self.factoring, Factored):
            for name, key in (("rows", "row"), ("cols", "col")):
                if key in f.statistics:
                    dimensions[name] = tuple(k for k, axis in axes.items() if axis == f.summed_axis(key))
            if f.estimator == "outer" and f.row_axis in self.axes:
                dimensions["mean_row"] = tuple(k for k, axis in axes.items() if axis in (f.row_axis, f.col_axis))
        return {name: over for name, over in dimensions.items() if over}

    def shapes(self, part: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of a rank's sums, given that of its part of the tensor."""
        f = self.factoring
        if not isinstance(f, Factored):
            return {}
        names = {"row": "rows", "col": "cols"}
        shapes = {names[key]: summed(part, f.summed_axis(key)) for key in f.statistics}
        if "mean_row" in self.partial():
            shapes["mean_row"] = summed(summed(part, f.row_axis), f.col_axis)
        return shapes


class Group(NamedTuple):
    """The ranks along one mesh dimension."""

    handle: ProcessGroup
    size: int
    device: str

    def ranks(self) -> list[int]:
        """Their numbers among all processes."""
        import torch.distributed as dist

        return dist.get_process_group_ranks(self.handle)

    def ask(self, value: Any) -> list[Any]:
        """The value of each rank, of any size."""
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values


def groups_of(p: DTensor) -> list[Group | None]:
    """The ranks along each mesh dimension of a parameter; None where there is only one."""
    mesh = p.device_mesh
    sizes = [mesh.size(k) for k in range(mesh.ndim)]
    return [Group(mesh.get_group(k), n, mesh.device_type) if n > 1 else None for k, n in enumerate(sizes)]


class Shard:
    """A sharded parameter on this rank: what does not change from step to step."""

    def __init__(self, p: DTensor, name: str, factoring: Factoring, sliced: bool = False):
        """What the mesh and the placements of `p` say; whole slices that step by themselves have no partial sums."""
        part, self.sliced = local(p), sliced
        self.p, self.name, self.placements = p, name, tuple(p.placements)
        self.part, self.device = tuple(part.shape), part.device
        self.groups, axes = groups_of(p), map(cut_axis, self.placements)
        cut = (None if group is None else axis for group, axis in zip(self.groups, axes, strict=True))
        self.split = Split(factoring, tuple(cut))
        partial = {} if sliced else self.split.partial()
        self.partial = {sum_: self.over(dimensions) for sum_, dimensions in partial.items()}
        self.shapes = self.split.shapes(self.part)
        # the placements and local shape of the last gradient; None: it has never had one
        self.arrival: tuple[tuple[Placement, ...], tuple[int, ...]] | None = None

    @classmethod
    def of(cls, p: Tensor, name: str, factoring: Factoring, sliced: bool, before: Shard | None) -> Shard:
        """The shard that was made of a parameter before, if that is still what it was; else a new one."""
        assert is_sharded(p)
        facts = factoring, sliced, tuple(p.placements)
        if before is not None and before.p is p:
            if (before.split.factoring, before.sliced, before.placements) == facts:
                return before
        return cls(p, name, factoring, sliced)

    def over(self, dimensions: Sequence[int]) -> tuple[Group, ...]:
        """The groups of some mesh dimensions, of more than one rank each."""
        return tuple(group for k in dimensions if (group := self.groups[k]) is not None)

    @cached_property
    def everyone(self) -> tuple[Group, ...]:
        """All of its groups."""
        return self.over(range(len(self.groups)))

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole."""
        return beginning(self.p)

    @cached_property
    def counts_row(self) -> bool:
        """Whether this rank's copy of R counts for mean(R): the first one of those along the mesh dimensions."""
        f, here = self.split.factoring, self.p.device_mesh.get_coordinate()
        if here is None or not isinstance(f, Factored):
            return False
        return all(here[k] == 0 for k, cut in enumerate(self.split.axes) if cut == f.col_axis)

    def zeros(self, *shape: int) -> Tensor:
        """A sum of nothing."""
        return torch.zeros(shape, dtype=sum_dtype(self.device), device=self.device)

    def mean_row(self, rows: Tensor | None, row: Tensor | None, beta2: Scalar, w2: Scalar) -> Tensor | None:
        """This rank's part of mean(Rₜ) = (1 − β̂₂ₜ)·mean(G² + ε₁) + β̂₂ₜ·mean(Rₜ₋₁); None where a rank has R whole.

        G is sharded by rows and perhaps by columns too, Rₜ₋₁ only by rows: so of its copies one counts.
        """
        f = self.split.factoring
        if not isinstance(f, Factored) or "mean_row" not in self.shapes or rows is None or row is None:
            return None
        n = f.shape[f.row_axis]
        # contiguous on every rank: torch rounds other strides differently, and copies must not differ
        new = rows.contiguous().sum(f.row_axis, keepdim=True)
        old = row.sum(f.row_axis, keepdim=True, dtype=new.dtype) if self.counts_row else torch.zeros_like(new)
        return new * (w2 / n) + old * (beta2 / n)
