"""The two reductions of a sharded step: one collective per group of ranks each, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import is_
from typing import Any

import torch
from torch import Tensor

from adafactor.core import sums as host
from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.dtensor import cut_axis, is_sharded, local, parts
from adafactor.core.factoring import statistics_dtype, sum_dtype
from adafactor.core.settings import RATES
from adafactor.core.state import check_gradient
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

    def __init__(self, parameters: list[Parameter], before: object):
        """Nothing is sent yet; what was agreed on before still holds."""
        self.members = [(p, p.shard) for p in parameters if isinstance(p.shard, Shard)]
        self.agreement: Agreement = before.agreement if isinstance(before, Ranks) else Agreement()
        self.facts: list[Facts] = [facts_of(p, shard) for p, shard in self.members]
        shards = [shard for _, shard in self.members]
        self._moments = Reduction(shards, _groups_of_flags(shards))
        self._norms = Reduction(shards, [shard.partial.get("scalars", ()) for shard in shards])
        self._kinds: list[list[Any]] | None = None  # of gradients that only had to be made local
        if self.facts == self.agreement.facts:
            for shard, known in zip(shards, self.agreement.shards, strict=True):
                shard.arrival = shard.arrival or known.arrival
            self.agreement.shards = shards

    def ask_again(self) -> None:
        """Agree anew at the next step; the other ranks may not know why, and expect the same sums as before."""
        self.agreement.facts = None

    def align(self, parameters: list[Parameter], grads: Gradients) -> Gradients:
        """Check every gradient, bring it to its parameter's placements, and make it local. This communicates."""
        kinds: list[list[Any]] = [list(map(type, grads)), [getattr(g, "_spec", None) for g in grads]]
        if kinds == self._kinds and self.facts is self.agreement.facts:
            return parts(grads)  # type: ignore[arg-type, return-value]
        for parameter, g in zip(parameters, grads, strict=True):
            if g is not None:
                check_gradient(parameter.p, g, parameter.name)
        by_parameter = dict(zip(parameters, grads, strict=True))
        own = [(shard, by_parameter[p]) for p, shard in self.members]
        if self.facts != self.agreement.facts:
            self._agree()
            _agree_on_gradients(own)
            self.agreement.shards = [shard for shard, _ in own]
        self.agreement.facts = self.facts
        for (p, _), g in zip(self.members, align(own), strict=True):
            by_parameter[p] = g
        in_place = all(shard.arrival is None or shard.arrival[0] == shard.placements for shard, _ in own)
        self._kinds = kinds if in_place else None
        return [by_parameter[p] for p in parameters]

    def complete_moments(self, sums: Sequence[Sums]) -> None:
        """First reduction: rows, columns and mean(R) where they are partial, and whether each gradient is there."""
        members = self._with(sums)
        flags = self._moments.add_up([_presence(one) for _, one in members], _moments(members))
        masks = self._moments.masks()
        for (shard, one), size, flag, mask in zip(members, self._moments.sizes, flags, masks, strict=True):
            if mask is None:
                here, finite = flag
                if here < 0:  # something has changed on another rank
                    raise self._disagreement(_busy(self.agreement.shards))
                if 0 < here < size:
                    raise _missing(shard, one is not None, size, here)
            if one is not None:
                one.finite = finite == here if mask is None else mask

    def complete_norms(self, sums: Sequence[Sums]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken; all ranks know which they are."""
        members = self._with(sums)
        for (_, one), (u2, x2) in zip(members, self._norms.add_up([_squares(one) for _, one in members]), strict=True):
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
            shards = self.agreement.shards
            without: list[Member] = [(shard, None) for shard in shards]
            align([(shard, None) for shard in shards])
            moments = Reduction(shards, _groups_of_flags(shards))
            # zeros, and a presence that makes every sum negative
            flags = moments.add_up([(float(-size), 0.0) for size in moments.sizes], _moments(without))
            if any(here > -(size**2) for (here, _), size in zip(flags, moments.sizes, strict=True) if size > 1):
                if isinstance(flags[0][0], Tensor):  # the others did not read the flags, but do not take this step
                    norms = Reduction(shards, [shard.partial.get("scalars", ()) for shard in shards])
                    norms.add_up([(0.0, 0.0)] * len(shards))
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


class Reduction:
    """Adds up two numbers of each shard over its groups, and other terms with them; what it needs is kept."""

    def __init__(self, shards: list[Shard], over: list[Groups]):
        """The numbers of shards with the same groups and device are a table."""
        self.sizes = [prod(group.size for group in groups) for groups in over]
        self._rows: dict[tuple[Groups, torch.device], list[int]] = {}
        for i, (shard, groups) in enumerate(zip(shards, over, strict=True)):
            self._rows.setdefault((groups, shard.device), []).append(i)
        self._tables = {
            key: torch.empty(len(rows), 2, dtype=sum_dtype(key[1]), device=key[1]) for key, rows in self._rows.items()
        }
        self._packs: dict[Group, Pack] = {}

    def add_up(self, pairs: list[Pair], terms: Sequence[Term] = ()) -> list[Pair]:
        """Return the totals of the pairs; the terms are added up where they are."""
        for key, rows in self._rows.items():
            self._tables[key].copy_(_table([pairs[i] for i in rows], key[1]))
        reduce_([*((table, groups) for (groups, _), table in self._tables.items()), *terms], self._packs)
        result = list(pairs)
        for key, rows in self._rows.items():
            table = self._tables[key]
            for i, pair in zip(rows, table.tolist() if host.on_host(table) else table.clone(), strict=True):
                result[i] = pair
        return result

    def masks(self) -> list[Tensor | None]:
        """Whether both totals of each shard are as many as its ranks; None where the host can read them itself."""
        result: list[Tensor | None] = [None] * len(self.sizes)
        for rows, table in zip(self._rows.values(), self._tables.values(), strict=True):
            if not host.on_host(table):  # to read it would make the host wait
                for i, mask in zip(rows, (table == self.sizes[rows[0]]).all(1).unbind(), strict=True):
                    result[i] = mask
        return result


def _table(pairs: Sequence[Pair], device: torch.device) -> Tensor:
    """The pairs below each other; where they are on a device, in a few operations whatever their number."""
    if not any(isinstance(value, Tensor) for pair in pairs for value in pair):
        return torch.tensor(pairs, dtype=sum_dtype(device), device=device)
    return torch.stack([host.vector(values, device) for values in zip(*pairs, strict=True)], dim=1)


def _agree_on_gradients(given: list[tuple[Shard, Tensor | None]]) -> None:
    """Ask whether every gradient is there on all ranks or on none: before gradients of unknown placement move."""
    shards = [shard for shard, _ in given]
    asked = Reduction(shards, [shard.everyone for shard in shards])
    present = asked.add_up([(float(g is not None), 0.0) for _, g in given])
    for (shard, g), size, (here, _) in zip(given, asked.sizes, present, strict=True):
        if 0 < float(here) < size:
            raise _missing(shard, g is not None, size, float(here))


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


def _missing(shard: Shard, is_here: bool, size: int, here: float) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {shard.name} (shape {tuple(shard.p.shape)}) is missing on {size - int(here)} of {size} "
        f"ranks, {'but not on this one' if is_here else 'this one among them'}; nothing was updated"
    )


class Pack:
    """Terms that are added up in one collective, and the buffer that takes them there and back."""

    def __init__(self, terms: list[Tensor]):
        """Terms of any shapes, on one device."""
        self._terms, self._flat = terms, [term.reshape(-1) for term in terms]
        self._buffer = torch.cat(self._flat)
        pieces = zip(self._buffer.split([term.numel() for term in terms]), terms, strict=True)
        self._totals = [total.view(term.shape) for total, term in pieces]
        self._lasts = all(term.is_contiguous() for term in terms)  # then `_flat` are views

    def is_of(self, terms: list[Tensor]) -> bool:
        """Whether it can be used again for these terms: they lie where they lay."""
        return self._lasts and len(terms) == len(self._terms) and all(map(is_, terms, self._terms))

    def add_up(self, group: Group) -> None:
        """Add up every term over a group, in place."""
        import torch.distributed as dist

        torch.cat(self._flat, out=self._buffer)
        # with CPU offload the shards are not where the group's backend needs them
        sent = self._buffer.to(group.device)
        dist.all_reduce(sent, group=group.handle)
        if sent is not self._buffer:
            self._buffer.copy_(sent)
        torch._foreach_copy_(self._terms, self._totals)


def reduce_(terms: Sequence[Term], packs: dict[Group, Pack] | None = None) -> None:
    """Add up every term over its groups, in place: one collective per group, whatever the number of terms.

    The groups are taken in the order in which they come up, which is the same on all ranks; their names are not. Packs
    are kept from step to step as long as the terms are the same tensors.
    """
    packs = {} if packs is None else packs
    for group in dict.fromkeys(group for _, groups in terms for group in groups):
        own = [term for term, groups in terms if group in groups]
        pack = packs.get(group)
        if pack is None or not pack.is_of(own):
            pack = packs[group] = Pack(own)
        pack.add_up(group)


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
