"""The two reductions of a sharded step: one collective per group of ranks each, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from adafactor.core import sums as host
from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.dtensor import cut_axis, is_sharded, local, parts
from adafactor.core.factoring import statistics_dtype, sum_dtype
from adafactor.core.state import check_gradient
from adafactor.distributed.agreement import check_agreement
from adafactor.distributed.shard import Group, Shard, groups_of

Groups = tuple[Group, ...]
Term = tuple[Tensor, Groups]  # a sum, and the groups over which it is partial
Member = tuple[Shard, Sums | None]  # None: no gradient on this rank, or its step is not taken
Pair = Sequence[Any]  # two numbers: Python's, or on a device tensors


class Ranks:
    """The sharded parameters of a bucket: the same ones in the same order on every rank.

    Those without a gradient take part with zeros, so that the sizes of the collectives never depend on what one rank
    alone knows, and a gradient that is missing on some ranks only is noticed by all of them.
    """

    def __init__(self, parameters: list[Parameter], before: Ranks | None):
        """Nothing is sent yet; what was agreed on before still holds."""
        self.members = [(p, p.shard) for p in parameters if p.shard is not None]
        self.is_agreed: bool = before is not None and before.is_agreed
        shards = [shard for _, shard in self.members]
        busy = {group for shard in shards for groups in shard.partial.values() for group in groups}
        # flags go only where something is sent anyway
        self._flags = Table(shards, [tuple(group for group in shard.everyone if group in busy) for shard in shards])
        self._squares = Table(shards, [shard.partial.get("scalars", ()) for shard in shards])
        self._kinds: list[list[Any]] | None = None  # of gradients that only had to be made local

    def ask_again(self) -> None:
        """Agree anew at the next step: a state was loaded, on all ranks."""
        self.is_agreed = False

    def align(self, parameters: list[Parameter], grads: Gradients) -> Gradients:
        """Check every gradient, bring it to its parameter's placements, and make it local. This communicates."""
        kinds: list[list[Any]] = [list(map(type, grads)), [getattr(g, "_spec", None) for g in grads]]
        if kinds == self._kinds and self.is_agreed:
            return parts(grads)  # type: ignore[arg-type, return-value]
        for parameter, g in zip(parameters, grads, strict=True):
            if g is not None:
                check_gradient(parameter.p, g, parameter.name)
        if not self.is_agreed:
            check_agreement(self.members)
            self.is_agreed = True
        by_parameter = dict(zip(parameters, grads, strict=True))
        own = [(shard, by_parameter[p]) for p, shard in self.members]
        for (p, _), g in zip(self.members, align(own), strict=True):
            by_parameter[p] = g
        in_place = all(shard.arrival is None or shard.arrival[0] == shard.placements for shard, _ in own)
        self._kinds = kinds if in_place else None
        return [by_parameter[p] for p in parameters]

    def complete_moments(self, sums: Sequence[Sums]) -> None:
        """First reduction: rows, columns and mean(R) where they are partial, and whether each gradient is there."""
        members = self._with(sums)
        flags = self._flags.add_up([_presence(one) for _, one in members], _moments(members))
        masks = self._flags.masks()
        for (shard, one), size, flag, mask in zip(members, self._flags.sizes, flags, masks, strict=True):
            here, finite = flag
            if mask is None and 0 < here < size:
                missing, own = size - int(here), "this one among them" if one is None else "but not on this one"
                raise RuntimeError(
                    f"the gradient of {shard.name} (shape {tuple(shard.p.shape)}) is missing on {missing} of {size} "
                    f"ranks, {own}; nothing was updated"
                )
            if one is not None:
                one.finite = finite == here if mask is None else mask

    def complete_norms(self, sums: Sequence[Sums]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken; all ranks know which they are."""
        members = self._with(sums)
        totals = self._squares.add_up([_squares(one) for _, one in members])
        for (_, one), (u2, x2) in zip(members, totals, strict=True):
            if one is not None:
                one.u2, one.x2 = u2, x2

    def _with(self, sums: Sequence[Sums]) -> list[Member]:
        """Every member with its sums."""
        by_parameter = {one.parameter: one for one in sums}
        return [(shard, by_parameter.get(p)) for p, shard in self.members]


class Table:
    """Two numbers of each shard, which are added up over its groups."""

    def __init__(self, shards: list[Shard], over: list[Groups]):
        """Shards with the same groups and device have their rows in one tensor."""
        self.sizes = [prod(group.size for group in groups) for groups in over]
        self._rows: dict[tuple[Groups, torch.device], list[int]] = {}
        for i, (shard, groups) in enumerate(zip(shards, over, strict=True)):
            self._rows.setdefault((groups, shard.device), []).append(i)
        self._totals: list[Tensor] = []

    def add_up(self, pairs: list[Pair], terms: Sequence[Term] = ()) -> list[Pair]:
        """Return the totals of the pairs; the terms are added up where they are."""
        self._totals = [_table([pairs[i] for i in rows], device) for (_, device), rows in self._rows.items()]
        reduce_([*zip(self._totals, (groups for groups, _ in self._rows), strict=True), *terms])
        result = list(pairs)
        for rows, table in zip(self._rows.values(), self._totals, strict=True):
            for i, row in zip(rows, table.tolist() if host.on_host(table) else table.unbind(), strict=True):
                result[i] = row
        return result

    def masks(self) -> list[Tensor | None]:
        """Whether both totals are those of all ranks; None where the host can read them itself."""
        result: list[Tensor | None] = [None] * len(self.sizes)
        for rows, table in zip(self._rows.values(), self._totals, strict=True):
            if not host.on_host(table):  # to read it would make the host wait
                for i, mask in zip(rows, (table == self.sizes[rows[0]]).all(1).unbind(), strict=True):
                    result[i] = mask
        return result


def _table(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """The pairs below each other; where they are on a device, in a few operations whatever their number."""
    if not any(isinstance(value, Tensor) for pair in pairs for value in pair):
        return torch.tensor(pairs, dtype=sum_dtype(device), device=device)
    return torch.stack([host.vector(values, device) for values in zip(*pairs, strict=True)], dim=1)


def _moments(members: list[Member]) -> list[Term]:
    """The partial sums of each parameter; where there is no gradient, zeros."""
    terms = []
    for shard, one in members:
        for name, groups in shard.partial.items():
            if name in shard.shapes:
                total = None if one is None else getattr(one, name)
                terms.append((shard.zeros(*shard.shapes[name]) if total is None else total, groups))
    return terms


def _presence(one: Sums | None) -> Pair:
    """1 for a gradient that is here, and 1 for one that is finite: sums of these tell what the others have."""
    return (0.0, 0.0) if one is None else (1.0, one.finite if isinstance(one.finite, Tensor) else float(one.finite))


def _squares(one: Sums | None) -> Pair:
    """ΣU² and ΣX², if the step is taken."""
    if one is None or one.finite is False:
        return 0.0, 0.0
    return one.u2, 0.0 if one.x2 is None else one.x2


def reduce_(terms: Sequence[Term]) -> None:
    """Add up every term over its groups, in place: one collective per group, whatever the number of terms.

    The groups are taken in the order in which they come up, which is the same on all ranks; their names are not.
    """
    import torch.distributed as dist

    for group in dict.fromkeys(group for _, groups in terms for group in groups):
        own = [term for term, groups in terms if group in groups]
        packed = torch.cat([term.reshape(-1) for term in own])
        sent = packed.to(group.device)  # with CPU offload the shards are not where the group's backend needs them
        dist.all_reduce(sent, group=group.handle)
        pieces = sent.to(packed.device).split([term.numel() for term in own])
        torch._foreach_copy_(own, [piece.view(term.shape) for piece, term in zip(pieces, own, strict=True)])


def whole_norms(norms: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The norms of some parameters' gradients, of those of this rank's parts."""
    if not any(map(is_sharded, norms)):
        return list(norms.values())
    squares = {p: norm.double().square() for p, norm in norms.items()}
    terms: list[Term] = []
    for p, square in squares.items():
        if is_sharded(p):
            cut = zip(groups_of(p), map(cut_axis, p.placements), strict=True)
            terms.append((square, tuple(group for group, axis in cut if group is not None and axis is not None)))
    reduce_(terms)
    return [squares[p].sqrt().to(norm.dtype) for p, norm in norms.items()]


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
            shard.arrival = g.placements, tuple(g._local_tensor.shape)
            if g.placements == shard.placements:
                grads[i] = local(g)
                continue
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
