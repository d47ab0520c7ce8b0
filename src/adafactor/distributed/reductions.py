"""A sharded step: which sums of a parameter are partial on one rank, and the two reductions that complete them.

A mesh dimension cuts one axis of a tensor between its ranks, or holds copies of it. What that makes of the sums of an
n × m matrix on one rank:

| cut axis | mean over columns (→ R) | mean over rows (→ C) | mean(R) | ΣU², ΣX², is G finite? |
|---|---|---|---|---|
| rows | whole | partial | partial | partial |
| columns | partial | whole | whole, once R is | partial |
| both, by two dimensions | partial over the second | partial over the first | partial over both | partial over both |
| another one, of a stack of matrices | whole | whole | whole | partial |

The factors are cut as their parameter is, and never gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core import sums
from adafactor.core.dtensor import beginning, cut_axis, drop, is_sharded, local
from adafactor.core.factoring import Factoring, statistics_dtype, sum_dtype
from adafactor.core.settings import RATES, Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from adafactor.core.bucket import Gradients, Parameter
    from adafactor.core.step import Update

SWEEPS = 3  # of a question: in a mesh of three dimensions an answer has reached every rank after so many
SAME = "all ranks of a mesh need the same parameters in the same order, with the same settings and step"
ALONE = "state, parameters or settings changed on some ranks of a mesh and not on others"
Facts = dict[str, Any]  # what of a parameter must be the same on all ranks


@dataclass(frozen=True)
class Cut:
    """Which axis of a tensor each mesh dimension cuts; None where it holds copies, or has one rank only."""

    factoring: Factoring
    axes: tuple[int | None, ...]

    def partial(self) -> dict[str, tuple[int, ...]]:
        """The sums that no rank has whole, and the mesh dimensions over which each is to be added up."""
        row, col, kept = self.factoring.row_axis, self.factoring.col_axis, self.factoring.statistics
        cuts = [(k, axis) for k, axis in enumerate(self.axes) if axis is not None]
        sums = {"scalars": tuple(k for k, _ in cuts)}
        if "row" in kept:
            sums["rows"] = tuple(k for k, axis in cuts if axis == col)
        if "col" in kept:
            sums["cols"] = tuple(k for k, axis in cuts if axis == row)
        if self.factoring.estimator == "outer" and row in self.axes:
            sums["mean_row"] = tuple(k for k, axis in cuts if axis in (row, col))
        return {name: over for name, over in sums.items() if over}

    def shapes(self, part: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of a rank's sums, given that of its part of the tensor."""
        row, col, kept, shapes = self.factoring.row_axis, self.factoring.col_axis, self.factoring.statistics, {}
        if "row" in kept and col is not None:
            shapes["rows"] = drop(part, col)
        if "col" in kept and row is not None:
            shapes["cols"] = drop(part, row)
        if "mean_row" in self.partial() and col is not None:
            shapes["mean_row"] = drop(tuple(1 if axis == row else n for axis, n in enumerate(part)), col)
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


class Shard:
    """A sharded parameter on this rank: what does not change from step to step."""

    def __init__(self, p: DTensor, name: str, factoring: Factoring):
        """What the mesh and the placements of `p` say."""
        mesh, part = p.device_mesh, local(p)
        alone = [mesh.size(k) == 1 for k in range(mesh.ndim)]
        self.p, self.name, self.placements = p, name, tuple(p.placements)
        self.part, self.device = tuple(part.shape), part.device
        self.groups = [
            None if a else Group(mesh.get_group(k), mesh.size(k), mesh.device_type) for k, a in enumerate(alone)
        ]
        self.cut = Cut(
            factoring, tuple(None if a else cut_axis(q) for a, q in zip(alone, self.placements, strict=True))
        )
        self.partial = {sum_: self.over(dimensions) for sum_, dimensions in self.cut.partial().items()}
        self.shapes = self.cut.shapes(self.part)
        # the placements and local shape of the last gradient; None: it has never had one
        self.arrival: tuple[tuple[Placement, ...], tuple[int, ...]] | None = None

    def fits(self, p: Tensor, factoring: Factoring) -> bool:
        """Is the parameter still what it was?"""
        return factoring == self.cut.factoring and p is self.p and self.placements == tuple(self.p.placements)

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
    def first_copy(self) -> bool:
        """Where columns are cut, every rank along that dimension has a copy of R: is this the first one?"""
        here = self.p.device_mesh.get_coordinate()
        col = self.cut.factoring.col_axis
        return here is not None and all(here[k] == 0 for k, axis in enumerate(self.cut.axes) if axis == col)

    def zeros(self, *shape: int) -> Tensor:
        """A sum of nothing."""
        return torch.zeros(shape, dtype=sum_dtype(self.device), device=self.device)

    def numbers(self, *values: Any) -> Tensor:
        """Some scalars as one tensor."""
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack(
                [torch.as_tensor(value, dtype=sum_dtype(self.device), device=self.device) for value in values]
            )
        return torch.tensor(values, dtype=sum_dtype(self.device), device=self.device)

    def mean_row(self, u: Update) -> Tensor:
        """This rank's part of mean(Rₜ) = (1 − β̂₂ₜ)·mean(G² + ε₁) + β̂₂ₜ·mean(Rₜ₋₁).

        G is cut by rows and perhaps by columns too; Rₜ₋₁ only by rows, so that of its copies the first one counts.
        """
        row, col = self.cut.factoring.row_axis, self.cut.factoring.col_axis
        assert row is not None and col is not None and u.rows is not None
        axis, n = row - (col < row), self.cut.factoring.shape[row]
        mean = u.rows.sum(axis, keepdim=True) * (u.w2 / n)
        if self.first_copy:
            mean += u.parameter.state["row"].sum(axis, keepdim=True, dtype=mean.dtype) * (u.beta2 / n)
        return mean


Term = tuple[Tensor, tuple[Group, ...]]  # a sum, and the groups over which it is partial


@dataclass
class Agreement:
    """What the ranks last agreed on. It outlives a bucket.

    They ask each other at the first step. A rank where something has changed since then takes part in the first
    reduction of its next step with the sizes that the others expect, and says so in place of which gradients it has. So
    all of them know it at once, and steps between which nothing changes send nothing more.
    """

    shards: list[Shard] = field(default_factory=list)
    facts: list[Facts] | None = None  # one for each shard; None: never asked, or a state was loaded since


class Ranks:
    """The sharded parameters of a bucket: the same ones in the same order on every rank.

    Those without a gradient take part with zeros, so that the sizes of the collectives never depend on what one rank
    alone knows, and a gradient that is missing on some ranks only is noticed by all of them.
    """

    def __init__(self, parameters: list[Parameter], agreement: Agreement):
        """Nothing is sent yet."""
        self.members = [(p, p.shard) for p in parameters if p.shard is not None]
        self.agreement = agreement
        self.facts = [_facts(p) for p, _ in self.members]
        self._absent: set[Parameter] = set()
        if self.facts == agreement.facts:
            for (_, shard), before in zip(self.members, agreement.shards, strict=True):
                shard.arrival = shard.arrival or before.arrival
            agreement.shards = [shard for _, shard in self.members]

    def align(self, parameters: list[Parameter], grads: Gradients) -> Gradients:
        """Bring every gradient to its parameter's placements, and make it local. This communicates."""
        found = dict(zip(parameters, grads, strict=True))
        given = [(shard, found[p]) for p, shard in self.members]
        if self.facts != self.agreement.facts:
            self._agree()
            _agree_on_gradients(given)
            self.agreement.shards, self.agreement.facts = [shard for shard, _ in given], self.facts
        for (p, _), g in zip(self.members, align(given), strict=True):
            found[p] = g
        return [found[p] for p in parameters]

    def complete_moments(self, updates: list[Update]) -> None:
        """First reduction: rows, columns and mean(R) where they are partial, and whether each gradient is there."""
        members = self._with(updates)
        self._absent = {p for (p, _), (_, u) in zip(self.members, members, strict=True) if u is None}
        for (shard, u), (flag, size) in zip(members, _reduce_moments(members), strict=True):
            if sums.on_host(flag):
                here, bad = flag.tolist()
                if here < 0:  # something has changed on another rank
                    raise self._disagreement(_busy(self.agreement.shards))
                _insist(shard, u is not None, size, here)
                finite: Tensor | bool = bad == 0
            else:  # reading it would make the host wait: the step is not taken where it may not be
                finite = (flag[1] == 0) & (flag[0] == size)
            if u is not None:
                u.finite = finite

    def complete_energies(self, updates: list[Update]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken."""
        members = zip(self.members, self._with(updates), strict=True)
        going = [(shard, u) for (p, _), (shard, u) in members if u is not None or p in self._absent]
        for (_, u), pair in zip(going, _reduce_energies(going), strict=True):
            if u is not None:
                u2, x2 = pair.tolist() if pair.is_cpu else pair
                u.u2, u.x2 = u2, x2

    def _with(self, updates: list[Update]) -> list[tuple[Shard, Update | None]]:
        """Every member with its update; None: it has no gradient on this rank, or its step is not taken."""
        found = {u.parameter: u for u in updates}
        return [(shard, found.get(p)) for p, shard in self.members]

    def _agree(self) -> None:
        """Raise, on all ranks, unless they step the same parameters with the same settings."""
        groups = _busy(self.agreement.shards)
        if groups:  # the others may be in the middle of a step such as the last one
            without: list[tuple[Shard, Update | None]] = [(shard, None) for shard in self.agreement.shards]
            align([(shard, None) for shard, _ in without])
            flags = _reduce_moments(without, changed=True)
            if any(flag[0] > -(size**2) for flag, size in flags if size > 1):  # not all ranks have changed
                if not sums.on_host(flags[0][0]):  # the others did not read the flags, but do not take this step
                    _reduce_energies(without)
                    raise RuntimeError(f"{ALONE}; this rank is one where they did. Nothing was updated")
                raise self._disagreement(groups)
        everyone = list(dict.fromkeys(group for _, shard in self.members for group in shard.everyone))
        if problem := self._difference(everyone, RATES):
            raise RuntimeError(problem)

    def _disagreement(self, groups: list[Group]) -> RuntimeError:
        """What to raise when something has changed on some ranks only."""
        return RuntimeError(self._difference(groups) or f"{ALONE}; nothing was updated")

    def _difference(self, groups: list[Group], rates: Sequence[str] = ()) -> str:
        """Ask all ranks of some groups for their facts, and say in what they differ, if they do."""
        problem = ""
        # in an order that does not depend on the parameters, or two ranks could wait for each other in two groups
        for group in SWEEPS * sorted(groups, key=lambda group: (group.ranks(), group.handle.group_name)):
            own = [
                {**facts, **{key: _rounded(getattr(p.settings, key)) for key in rates}, "step": int(p.state["step"])}
                for (p, shard), facts in zip(self.members, self.facts, strict=True)
                if group in shard.everyone
            ]
            answers = group.ask((sha256(repr(own).encode()).hexdigest(), problem))
            if len({digest for digest, _ in answers}) > 1:
                problem = _first_difference(group.ranks(), group.ask(own))
            problem = problem or next((text for _, text in answers if text), "")
        return problem


def _facts(parameter: Parameter) -> Facts:
    """What must be the same on all ranks, except for what may differ from step to step."""
    assert parameter.shard is not None
    is_named = parameter.name != f"parameter {parameter.number}"
    settings = {f.name: getattr(parameter.settings, f.name) for f in fields(Settings) if f.name not in RATES}
    return {
        "name": parameter.name if is_named else None,
        "shape": parameter.shape,
        "dtype": str(parameter.x.dtype),
        "placements": str(parameter.shard.placements),
        **settings,
    }


def _rounded(value: Any) -> Any:
    """A rate to six digits: machines of different kinds may compute a schedule with different last bits."""
    return value if value is None or isinstance(value, str) else float(f"{float(value):.6g}")


def _first_difference(ranks: list[int], lists: list[list[Facts]]) -> str:
    """The first fact that differs, and its value on two ranks."""
    for number, (first, *others) in enumerate(zip_longest(*lists)):
        for rank, other in zip(ranks[1:], others, strict=True):
            if first == other:
                continue
            which = f"sharded parameter {number}"
            values = _called(first), _called(other)
            if first and other and first["name"] == other["name"]:
                key = next(key for key in first if first[key] != other[key])
                which, values = f"{key} of {which}, {_called(first)},", (repr(first[key]), repr(other[key]))
            return (
                f"{which} is {values[0]} on rank {ranks[0]} but {values[1]} on rank {rank}: {SAME}; nothing was updated"
            )
    return ""


def _called(facts: Facts | None) -> str:
    return "not there" if facts is None else f"{facts['name'] or 'unnamed'} (shape {facts['shape']})"


def _busy(shards: Iterable[Shard]) -> list[Group]:
    """The groups in which some sum is partial: every step of these shards communicates there."""
    return list(dict.fromkeys(group for shard in shards for groups in shard.partial.values() for group in groups))


def _reduce_moments(members: list[tuple[Shard, Update | None]], changed: bool = False) -> list[tuple[Tensor, int]]:
    """Add up the first sums; return how many ranks have each gradient and how many a bad one, and of how many ranks.

    Where this rank has `changed`, it sends zeros, and a presence that makes every sum negative.
    """
    busy = _busy(shard for shard, _ in members)
    terms: list[Term] = []
    flags = []
    for shard, u in members:
        groups = tuple(group for group in shard.everyone if group in busy)
        size = prod(group.size for group in groups)
        flag = shard.numbers(*((float(-size), 0.0) if changed else _presence(u)))
        flags.append((flag, size))
        terms += [(flag, groups), *_moments(shard, u)]
    reduce_(terms)
    return flags


def _reduce_energies(members: list[tuple[Shard, Update | None]]) -> list[Tensor]:
    """Add up ΣU² and ΣX² of some members."""
    pairs = [
        shard.zeros(2) if u is None else shard.numbers(u.u2, 0.0 if u.x2 is None else u.x2) for shard, u in members
    ]
    reduce_([(pair, shard.partial.get("scalars", ())) for (shard, _), pair in zip(members, pairs, strict=True)])
    return pairs


def _agree_on_gradients(given: list[tuple[Shard, Tensor | None]]) -> None:
    """Ask whether every gradient is there on all ranks or on none: before gradients of unknown placement move."""
    flags = [shard.numbers(float(g is not None)) for shard, g in given]
    reduce_([(flag, shard.everyone) for (shard, _), flag in zip(given, flags, strict=True)])
    for (shard, g), flag in zip(given, flags, strict=True):
        _insist(shard, g is not None, prod(group.size for group in shard.everyone), flag[0].item())


def _moments(shard: Shard, u: Update | None) -> list[Term]:
    """The partial sums of one parameter; where the walk had nothing to do, zeros."""
    terms = []
    for name, shape in shard.shapes.items():
        if u is None:
            total = shard.zeros(*shape)
        elif name == "mean_row":
            total = u.mean_row = shard.mean_row(u)
        else:
            found = getattr(u, name)
            # contiguous on every rank: torch rounds other strides differently, and copies must not differ
            total = shard.zeros(*shape) if found is None else found.contiguous()
            setattr(u, name, total)
        if name in shard.partial:
            terms.append((total, shard.partial[name]))
    return terms


def _presence(u: Update | None) -> tuple[Any, Any]:
    """1 for a gradient that is here, and 1 for one that is not finite: sums of these tell what the others have."""
    if u is None:
        return 0.0, 0.0
    return 1.0, ~u.finite if isinstance(u.finite, Tensor) else float(not u.finite)


def _insist(shard: Shard, is_here: bool, size: int, here: float) -> None:
    if 0 < here < size:
        raise RuntimeError(
            f"the gradient of {shard.name} (shape {tuple(shard.p.shape)}) is missing on {size - int(here)} of {size} "
            f"ranks, {'but not on this one' if is_here else 'this one among them'}; nothing was updated"
        )


def reduce_(terms: Sequence[Term]) -> None:
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


def align(given: list[tuple[Shard, Tensor | None]]) -> Gradients:
    """Bring every gradient to its parameter's placements, and make it local.

    Under tensor parallel a gradient can come as a sum that is still partial (a SequenceParallel norm's), or whole for
    a sharded parameter (a rowwise embedding's). Partial ones share a bucket of their own.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    terms: list[Term] = []
    grads = [g for _, g in given]
    for i, (shard, g) in enumerate(given):
        if g is not None and is_sharded(g):
            shard.arrival = tuple(g.placements), tuple(g.to_local().shape)
        placements, shape = shard.arrival = shard.arrival or (shard.placements, shard.part)
        partial = [k for k, place in enumerate(placements) if type(place) is Partial and place.reduce_op == "sum"]
        if not partial:
            continue
        dtype = statistics_dtype(shard.p.dtype)
        total = shard.zeros(*shape).to(dtype) if g is None else local(g).to(dtype, copy=True)
        terms.append((total, shard.over(partial)))
        if g is not None:
            whole = [Replicate() if k in partial else place for k, place in enumerate(placements)]
            mesh = shard.p.device_mesh
            grads[i] = DTensor.from_local(total, mesh, whole, run_check=False, shape=g.shape, stride=g.stride())
    reduce_(terms)
    for i, ((shard, _), g) in enumerate(zip(given, grads, strict=True)):
        if g is not None:
            if is_sharded(g) and tuple(g.placements) != shard.placements:
                g = g.redistribute(placements=shard.placements)
            grads[i] = local(g)
    return grads
