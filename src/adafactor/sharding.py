"""DTensor: this rank's shard of each parameter, which of its sums are partial, and the reductions that complete them.

A mesh dimension cuts one axis of a tensor between its ranks, or holds copies of it. What that makes of the sums of an
n × m matrix on one rank:

| cut axis | mean over columns (→ R) | mean over rows (→ C) | mean(R) | ΣU², ΣX², is G finite? |
|---|---|---|---|---|
| rows | whole | partial | partial | partial |
| columns | partial | whole | whole, once R is | partial |
| both, by two dimensions | partial over the second | partial over the first | partial over both | partial over both |
| another one, of a stack of matrices | whole | whole | whole | partial |

The factors are cut as their parameter is, and never gathered. Nothing of torch.distributed is imported before there is
a DTensor: it takes as long as the rest of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adafactor.layout import Layout, statistics_dtype, wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

    from adafactor.step import Update


def is_sharded(t: object) -> TypeIs[DTensor]:
    """Is it a DTensor? Without their module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        part = t.to_local()
    waited: Tensor = part.wait() if hasattr(part, "wait") else part  # a gradient may still be on its way
    return waited.detach()


@dataclass(frozen=True)
class Cut:
    """Which axis of a tensor each mesh dimension cuts; None where it holds copies, or has one rank only."""

    layout: Layout
    axes: tuple[int | None, ...]

    def partial(self) -> dict[str, tuple[int, ...]]:
        """The sums that no rank has whole, and the mesh dimensions over which each is to be added up."""
        row, col, kept = self.layout.row_axis, self.layout.col_axis, self.layout.statistics
        sums = {"scalars": tuple(k for k, axis in enumerate(self.axes) if axis is not None)}
        if "row" in kept:
            sums["rows"] = tuple(k for k, axis in enumerate(self.axes) if axis is not None and axis == col)
        if "col" in kept:
            sums["cols"] = tuple(k for k, axis in enumerate(self.axes) if axis is not None and axis == row)
        if self.layout.estimator == "outer" and row in self.axes:
            sums["mean_row"] = tuple(k for k, axis in enumerate(self.axes) if axis is not None and axis in (row, col))
        return {name: over for name, over in sums.items() if over}

    def shapes(self, part: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of a rank's sums, given that of its part of the tensor."""
        row, col = self.layout.row_axis, self.layout.col_axis
        if row is None or col is None:
            return {}
        one = tuple(1 if axis == row else n for axis, n in enumerate(part))
        shapes = {"rows": _without(part, col), "cols": _without(part, row), "mean_row": _without(one, col)}
        return {name: shape for name, shape in shapes.items() if name[:3] in (*self.layout.statistics, "mea")}


class Group(NamedTuple):
    """The ranks along one mesh dimension."""

    handle: ProcessGroup
    size: int
    device: str


@dataclass(eq=False)
class Shard:
    """A sharded parameter on this rank."""

    p: DTensor
    name: str
    cut: Cut
    groups: tuple[Group | None, ...]  # one per mesh dimension; None where there is nobody else
    update: Update | None  # None: no gradient on this rank

    @classmethod
    def of(cls, p: DTensor, name: str, layout: Layout, update: Update | None) -> Shard:
        """What the mesh and the placements of `p` say."""
        mesh = p.device_mesh
        alone = [mesh.size(k) == 1 for k in range(mesh.ndim)]
        groups = tuple(
            None if a else Group(mesh.get_group(k), mesh.size(k), mesh.device_type) for k, a in enumerate(alone)
        )
        axes = tuple(None if a else cut_axis(place) for a, place in zip(alone, p.placements, strict=True))
        return cls(p, name, Cut(layout, axes), groups, update)

    def over(self, dimensions: Sequence[int]) -> tuple[Group, ...]:
        """The groups of some mesh dimensions."""
        return tuple(group for k in dimensions if (group := self.groups[k]) is not None)

    def everyone(self) -> tuple[Group, ...]:
        """All groups of more than one rank."""
        return self.over(range(len(self.groups)))

    def zeros(self, *shape: int) -> Tensor:
        """A sum of nothing."""
        device = self.p.to_local().device
        return torch.zeros(shape, dtype=wide(device), device=device)

    def numbers(self, *values: Any) -> Tensor:
        """Some scalars as one tensor."""
        device = self.p.to_local().device
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack([torch.as_tensor(value, dtype=wide(device), device=device) for value in values])
        return torch.tensor(values, dtype=wide(device), device=device)

    def mean_row(self, u: Update) -> Tensor:
        """This rank's part of mean(Rₜ) = (1 − β̂₂ₜ)·mean(G² + ε₁) + β̂₂ₜ·mean(Rₜ₋₁).

        G is cut by rows and perhaps by columns too; Rₜ₋₁ only by rows, so that of its copies the first one counts.
        """
        row, col = self.cut.layout.row_axis, self.cut.layout.col_axis
        assert row is not None and col is not None and u.rows is not None
        axis, n = row - (col < row), self.cut.layout.shape[row]
        mean = u.w2 * u.rows.sum(axis, keepdim=True) / n
        here = self.p.device_mesh.get_coordinate()
        assert here is not None
        if all(here[k] == 0 for k, axis_of_k in enumerate(self.cut.axes) if axis_of_k == col):
            mean += u.beta2 * u.state["row"].sum(axis, keepdim=True, dtype=mean.dtype) / n
        return mean


Term = tuple[Tensor, tuple[Group, ...]]  # a sum, and the groups over which it is partial


class Ranks:
    """All sharded parameters that may have a gradient: the same ones in the same order on every rank.

    Those without a gradient take part with zeros, so that the sizes of the collectives never depend on what one rank
    alone knows, and a gradient that is missing on some ranks only is noticed by all of them.
    """

    def __init__(self, shards: list[Shard], seen: dict[Tensor, Any]):
        """Make every update local; `seen` remembers how each gradient came, from step to step."""
        self.shards = shards
        if any(shard.p not in seen for shard in shards):
            self._agree()
        align(shards, seen)
        for shard in shards:
            if (u := shard.update) is not None:
                u.x, u.sharded = local(u.x), True
                u.state = {key: local(value) for key, value in u.state.items()}
        # the groups that add up anything at all
        self.busy = {g for shard in shards for over in shard.cut.partial().values() for g in shard.over(over)}

    def complete_moments(self) -> None:
        """First reduction: rows, columns and mean(R) where they are partial, and whether each gradient is there."""
        flags = []
        terms: list[Term] = []
        for shard in self.shards:
            groups = tuple(group for group in shard.everyone() if group in self.busy)
            flag = shard.numbers(*_presence(shard.update))
            flags.append((shard, groups, flag))
            terms.append((flag, groups))
            terms += self._moments(shard)
        reduce_(terms)
        self._decide(flags)

    def complete_energies(self, taken: list[Update]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken."""
        terms, stepped = [], set(taken)
        going = [s for s in self.shards if s.update is None or s.update in stepped]
        for shard in going:
            u = shard.update
            pair = shard.zeros(2) if u is None else shard.numbers(u.u2, 0.0 if u.x2 is None else u.x2)
            terms.append((pair, shard.over(shard.cut.partial().get("scalars", ()))))
        reduce_(terms)
        for shard, (pair, _) in zip(going, terms, strict=True):
            if (u := shard.update) is not None:
                u2, x2 = pair.tolist() if pair.is_cpu else pair
                u.u2, u.x2 = u2, x2 if u.settings.relative else None

    def _agree(self) -> None:
        """Is every gradient there on all ranks or on none? Asked once, before gradients of unknown placement move."""
        flags = [(shard, shard.everyone(), shard.numbers(*_presence(shard.update))) for shard in self.shards]
        reduce_([(flag, groups) for _, groups, flag in flags])
        for shard, groups, flag in flags:
            _insist(shard, groups, flag[0].item())

    def _moments(self, shard: Shard) -> list[Term]:
        """The partial sums of one parameter; where the walk had nothing to do, zeros."""
        u, terms = shard.update, []
        partial, shapes = shard.cut.partial(), shard.cut.shapes(tuple(shard.p.to_local().shape))
        for name, shape in shapes.items():
            if u is None:
                total = shard.zeros(*shape)
            elif name == "mean_row":
                if name not in partial:
                    continue
                total = u.mean_row = shard.mean_row(u)
            else:
                found = getattr(u, name)
                # contiguous on every rank: torch rounds other strides differently, and copies must not differ
                total = shard.zeros(*shape) if found is None else found.contiguous()
                setattr(u, name, total)
            if name in partial:
                terms.append((total, shard.over(partial[name])))
        return terms

    def _decide(self, flags: list[tuple[Shard, tuple[Group, ...], Tensor]]) -> None:
        for shard, groups, flag in flags:
            if flag.is_cpu:
                here, bad = flag.tolist()
                _insist(shard, groups, here)
                finite: Tensor | bool = bad == 0
            else:  # reading it would make the host wait: the step is not taken where it may not be
                finite = (flag[1] == 0) & (flag[0] == prod(group.size for group in groups))
            if shard.update is not None:
                shard.update.finite = finite


def _presence(u: Update | None) -> tuple[Any, Any]:
    """1 for a gradient that is here, and 1 for one that is not finite: sums of these tell what the others have."""
    if u is None:
        return 0.0, 0.0
    return 1.0, ~u.finite if isinstance(u.finite, Tensor) else float(not u.finite)


def _insist(shard: Shard, groups: tuple[Group, ...], here: float) -> None:
    size = prod(group.size for group in groups)
    if 0 < here < size:
        raise RuntimeError(
            f"the gradient of {shard.name} (shape {tuple(shard.p.shape)}) is missing on {size - int(here)} of {size} "
            f"ranks, {'this one among them' if shard.update is None else 'but not on this one'}; nothing was updated"
        )


def reduce_(terms: list[Term]) -> None:
    """Add up every term over its groups, in place: one collective per group, whatever the number of terms.

    The groups are taken in the order in which they come up, which is the same on all ranks; their names are not.
    """
    import torch.distributed as dist

    for group in dict.fromkeys(group for _, groups in terms for group in groups):
        parts = [term for term, groups in terms if group in groups]
        # with CPU offload the shards are not where the group's backend needs them
        bucket = torch.cat([part.reshape(-1) for part in parts]).to(group.device)
        dist.all_reduce(bucket, group=group.handle)
        for part, total in zip(parts, bucket.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view(part.shape))


def align(shards: list[Shard], seen: dict[Tensor, Any]) -> None:
    """Bring every gradient to its parameter's placements, and make it local.

    Under tensor parallel a gradient can come as a sum that is still partial (a SequenceParallel norm's), or whole for
    a sharded parameter (a rowwise embedding's). Partial ones share a bucket of their own.
    """
    from torch.distributed.tensor import DTensor, Replicate

    terms: list[Term] = []
    for shard in shards:
        u, (placements, shape) = shard.update, _arrival(shard, seen)
        sums = [k for k, place in enumerate(placements) if _is_sum(place)]
        if not sums:
            continue
        dtype = statistics_dtype(shard.p.dtype)
        total = shard.zeros(*shape).to(dtype) if u is None else local(u.g).to(dtype, copy=True)
        terms.append((total, shard.over(sums)))
        if u is not None:
            whole = [Replicate() if k in sums else place for k, place in enumerate(placements)]
            mesh, g = u.g.device_mesh, u.g  # type: ignore[attr-defined]
            u.g = DTensor.from_local(total, mesh, whole, run_check=False, shape=g.shape, stride=g.stride())
    reduce_(terms)
    for shard in shards:
        if (u := shard.update) is not None:
            if is_sharded(u.g) and tuple(u.g.placements) != tuple(shard.p.placements):
                u.g = u.g.redistribute(placements=shard.p.placements)
            u.g = local(u.g)


def _arrival(shard: Shard, seen: dict[Tensor, Any]) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """The placements and local shape of a gradient: of the one that is here, or of the last one that was."""
    u = shard.update
    if u is not None and is_sharded(u.g):
        seen[shard.p] = tuple(u.g.placements), tuple(u.g.to_local().shape)
    elif shard.p not in seen:
        seen[shard.p] = tuple(shard.p.placements), tuple(shard.p.to_local().shape)
    found: tuple[tuple[Placement, ...], tuple[int, ...]] = seen[shard.p]
    return found


def _is_sum(place: Placement) -> bool:
    from torch.distributed.tensor import Partial

    return type(place) is Partial and place.reduce_op == "sum"


def cut_axis(place: Placement) -> int | None:
    """The axis that a placement cuts; torch has more than one kind that does, and not all say so of themselves."""
    return None if place.is_replicate() or place.is_partial() else int(place.dim)  # type: ignore[attr-defined]


def zeros(p: DTensor, without: int, dtype: torch.dtype) -> Tensor:
    """A statistic of `p` with one axis summed away: cut as `p` is, except where that axis is what is cut."""
    from torch.distributed.tensor import DTensor

    part, shape = p.to_local(), _without(tuple(p.shape), without)
    flat = torch.zeros(_without(tuple(part.shape), without), dtype=dtype, device=part.device)
    stride = torch.empty(shape, device="meta").stride()
    placements = [_place_without(place, without) for place in p.placements]
    made = DTensor.from_local(flat, p.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return made.to(part.device)  # with CPU offload, where the parameter is and not where its mesh is


def copy_(to: Tensor, value: Tensor) -> None:
    """Copy whole or sharded values into a whole or sharded tensor of the same shape."""
    if is_sharded(value) and not (is_sharded(to) and value.device_mesh == to.device_mesh):
        value = value.full_tensor()
    if is_sharded(to):
        from torch.distributed.tensor import DTensor, Replicate

        mesh, everywhere = to.device_mesh, [Replicate()] * to.device_mesh.ndim
        if not is_sharded(value):
            value = DTensor.from_local(value.to(to.device, to.dtype), mesh, everywhere, run_check=False)
        value = value.redistribute(placements=to.placements)  # from copies each rank takes its part, alone
    to.copy_(value)


def _place_without(place: Placement, axis: int) -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    cut = cut_axis(place)
    if cut is None or cut == axis:
        return Replicate()
    if cut < axis:
        return place
    return Shard(cut - 1) if type(place) is Shard else type(place)(cut - 1, split_factor=place.split_factor)  # type: ignore


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
