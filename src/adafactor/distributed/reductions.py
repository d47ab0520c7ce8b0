"""The two reductions of a sharded step: one collective per group of ranks each, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from adafactor.core import sums as host
from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.dtensor import cut_axis, is_sharded, local
from adafactor.core.factoring import statistics_dtype, sum_dtype
from adafactor.core.settings import RATES
from adafactor.distributed.agreement import ALONE, Agreement, Facts, facts_of, find_difference
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

    def __init__(self, parameters: list[Parameter], agreement: Agreement):
        """Nothing is sent yet."""
        self.members = [(p, p.shard) for p in parameters if isinstance(p.shard, Shard)]
        self.agreement = agreement
        self.facts: list[Facts] = [facts_of(p, shard) for p, shard in self.members]
        self._everyone = _groups_of_flags([shard for _, shard in self.members])
        if self.facts == agreement.facts:
            for (_, shard), before in zip(self.members, agreement.shards, strict=True):
                shard.arrival = shard.arrival or before.arrival
            agreement.shards = [shard for _, shard in self.members]

    def align(self, parameters: list[Parameter], grads: Gradients) -> Gradients:
        """Bring every gradient to its parameter's placements, and make it local. This communicates."""
        by_parameter = dict(zip(parameters, grads, strict=True))
        own = [(shard, by_parameter[p]) for p, shard in self.members]
        if self.facts != self.agreement.facts:
            self._agree()
            _agree_on_gradients(own)
            self.agreement.shards, self.agreement.facts = [shard for shard, _ in own], self.facts
        for (p, _), g in zip(self.members, align(own), strict=True):
            by_parameter[p] = g
        return [by_parameter[p] for p in parameters]

    def complete_moments(self, sums: Sequence[Sums]) -> None:
        """First reduction: rows, columns and mean(R) where they are partial, and whether each gradient is there."""
        members = self._with(sums)
        flags = _reduce_moments(members, self._everyone, [_presence(one) for _, one in members])
        for (shard, one), groups, (here, bad) in zip(members, self._everyone, flags, strict=True):
            size = prod(group.size for group in groups)
            if isinstance(here, Tensor):  # to read it would make the host wait: it is masked where it may not be taken
                finite: Tensor | bool = (bad == 0) & (here == size)
            else:
                if here < 0:  # something has changed on another rank
                    raise self._disagreement(_busy(self.agreement.shards))
                _insist(shard, one is not None, size, here)
                finite = bad == 0
            if one is not None:
                one.finite = finite

    def complete_norms(self, sums: Sequence[Sums]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken; all ranks know which they are."""
        members = [(shard, one) for shard, one in self._with(sums) if one is None or one.finite is not False]
        for (_, one), (u2, x2) in zip(members, _reduce_norms(members), strict=True):
            if one is not None:
                one.u2, one.x2 = u2, x2

    def _with(self, sums: Sequence[Sums]) -> list[Member]:
        """Every member with its sums."""
        by_parameter = {one.parameter: one for one in sums}
        return [(shard, by_parameter.get(p)) for p, shard in self.members]

    def _agree(self) -> None:
        """Raise, on all ranks, unless they step the same parameters with the same settings."""
        groups = _busy(self.agreement.shards)
        if groups:  # the others may be in the middle of a step such as the last one
            without: list[Member] = [(shard, None) for shard in self.agreement.shards]
            align([(shard, None) for shard, _ in without])
            everyone = _groups_of_flags(self.agreement.shards)
            sizes = [prod(group.size for group in over) for over in everyone]
            # zeros, and a presence that makes every sum negative
            flags = _reduce_moments(without, everyone, [(float(-size), 0.0) for size in sizes])
            if any(here > -(size**2) for (here, _), size in zip(flags, sizes, strict=True) if size > 1):
                if isinstance(flags[0][0], Tensor):  # the others did not read the flags, but do not take this step
                    _reduce_norms(without)
                    raise RuntimeError(f"{ALONE}; this rank is one where they did. Nothing was updated")
                raise self._disagreement(groups)
        every = list(dict.fromkeys(group for _, shard in self.members for group in shard.everyone))
        if problem := self._difference(every, RATES):
            raise RuntimeError(problem)

    def _disagreement(self, groups: list[Group]) -> RuntimeError:
        """What to raise when something has changed on some ranks only."""
        return RuntimeError(self._difference(groups) or f"{ALONE}; nothing was updated")

    def _difference(self, groups: list[Group], rates: Sequence[str] = ()) -> str:
        return find_difference(self.members, self.facts, groups, rates)


def _busy(shards: Iterable[Shard]) -> list[Group]:
    """The groups in which some sum is partial: every step of these shards communicates there."""
    return list(dict.fromkeys(group for shard in shards for groups in shard.partial.values() for group in groups))


def _groups_of_flags(shards: Sequence[Shard]) -> list[Groups]:
    """The groups in which each shard says whether its gradient is there: those in which something is sent anyway."""
    busy = _busy(shards)
    return [tuple(group for group in shard.everyone if group in busy) for shard in shards]


def _reduce_moments(members: list[Member], everyone: list[Groups], flags: Sequence[Pair]) -> list[Pair]:
    """Add up the first sums; return how many ranks have each gradient, and how many a bad one."""
    terms = [term for shard, one in members for term in _moments(shard, one)]
    return _reduce_pairs([shard for shard, _ in members], flags, everyone, terms)


def _reduce_norms(members: list[Member]) -> list[Pair]:
    """Add up ΣU² and ΣX² of some members."""
    pairs: list[Pair] = [
        (0.0, 0.0) if one is None else (one.u2, 0.0 if one.x2 is None else one.x2) for _, one in members
    ]
    shards = [shard for shard, _ in members]
    return _reduce_pairs(shards, pairs, [shard.partial.get("scalars", ()) for shard in shards])


def _reduce_pairs(
    shards: list[Shard], pairs: Sequence[Pair], over: list[Groups], terms: Sequence[Term] = ()
) -> list[Pair]:
    """Add up two numbers of each shard over its groups, and other terms in the same collectives."""
    alike: dict[tuple[Groups, torch.device], list[int]] = {}
    for i, (shard, groups) in enumerate(zip(shards, over, strict=True)):
        alike.setdefault((groups, shard.device), []).append(i)
    tables = {key: _table([pairs[i] for i in rows], key[1]) for key, rows in alike.items()}
    reduce_([*((table, groups) for (groups, _), table in tables.items()), *terms])
    result = list(pairs)
    for key, rows in alike.items():
        table = tables[key]
        for i, pair in zip(rows, table.tolist() if host.on_host(table) else table, strict=True):
            result[i] = pair
    return result


def _table(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    dtype = sum_dtype(device)
    if not any(isinstance(value, Tensor) for pair in pairs for value in pair):
        return torch.tensor(pairs, dtype=dtype, device=device)
    values = [torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for pair in pairs for value in pair]
    return torch.stack(values).view(-1, 2)


def _agree_on_gradients(given: list[tuple[Shard, Tensor | None]]) -> None:
    """Ask whether every gradient is there on all ranks or on none: before gradients of unknown placement move."""
    shards, flags = [shard for shard, _ in given], [(float(g is not None), 0.0) for _, g in given]
    present = _reduce_pairs(shards, flags, [shard.everyone for shard in shards])
    for (shard, g), (here, _) in zip(given, present, strict=True):
        _insist(shard, g is not None, prod(group.size for group in shard.everyone), float(here))


def _moments(shard: Shard, one: Sums | None) -> list[Term]:
    """The partial sums of one parameter; where there is no gradient, zeros."""
    terms = []
    for name, shape in shard.shapes.items():
        if name in shard.partial:
            total = None if one is None else getattr(one, name)
            terms.append((shard.zeros(*shape) if total is None else total, shard.partial[name]))
    return terms


def _presence(one: Sums | None) -> tuple[Any, Any]:
    """1 for a gradient that is here, and 1 for one that is not finite: sums of these tell what the others have."""
    if one is None:
        return 0.0, 0.0
    return 1.0, ~one.finite if isinstance(one.finite, Tensor) else float(not one.finite)


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
        totals = zip(bucket.split([part.numel() for part in parts]), parts, strict=True)
        torch._foreach_copy_(parts, [total.view(part.shape) for total, part in totals])


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
