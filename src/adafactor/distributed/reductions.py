"""The two reductions of a sharded step: one collective per group of ranks each, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from adafactor.core import sums as host
from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.dtensor import is_sharded, local
from adafactor.core.factoring import statistics_dtype
from adafactor.core.settings import RATES
from adafactor.distributed.agreement import ALONE, Agreement, Facts, facts_of, find_difference
from adafactor.distributed.shard import Group, Shard

Term = tuple[Tensor, tuple[Group, ...]]  # a sum, and the groups over which it is partial
Member = tuple[Shard, Sums | None]  # None: no gradient on this rank, or its step is not taken


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
        for (shard, one), (flag, size) in zip(members, _reduce_moments(members), strict=True):
            if host.on_host(flag):
                here, bad = flag.tolist()
                if here < 0:  # something has changed on another rank
                    raise self._disagreement(_busy(self.agreement.shards))
                _insist(shard, one is not None, size, here)
                finite: Tensor | bool = bad == 0
            else:  # reading it would make the host wait: the step is not taken where it may not be
                finite = (flag[1] == 0) & (flag[0] == size)
            if one is not None:
                one.finite = finite

    def complete_norms(self, sums: Sequence[Sums]) -> None:
        """Second reduction: ΣU² and ΣX² of the steps that are taken; all ranks know which they are."""
        members = [(shard, one) for shard, one in self._with(sums) if one is None or one.finite is not False]
        for (_, one), pair in zip(members, _reduce_norms(members), strict=True):
            if one is not None:
                one.u2, one.x2 = pair.tolist() if pair.is_cpu else pair

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
            flags = _reduce_moments(without, changed=True)
            if any(flag[0] > -(size**2) for flag, size in flags if size > 1):  # not all ranks have changed
                if not host.on_host(flags[0][0]):  # the others did not read the flags, but do not take this step
                    _reduce_norms(without)
                    raise RuntimeError(f"{ALONE}; this rank is one where they did. Nothing was updated")
                raise self._disagreement(groups)
        everyone = list(dict.fromkeys(group for _, shard in self.members for group in shard.everyone))
        if problem := self._difference(everyone, RATES):
            raise RuntimeError(problem)

    def _disagreement(self, groups: list[Group]) -> RuntimeError:
        """What to raise when something has changed on some ranks only."""
        return RuntimeError(self._difference(groups) or f"{ALONE}; nothing was updated")

    def _difference(self, groups: list[Group], rates: Sequence[str] = ()) -> str:
        return find_difference(self.members, self.facts, groups, rates)


def _busy(shards: Iterable[Shard]) -> list[Group]:
    """The groups in which some sum is partial: every step of these shards communicates there."""
    return list(dict.fromkeys(group for shard in shards for groups in shard.partial.values() for group in groups))


def _reduce_moments(members: list[Member], changed: bool = False) -> list[tuple[Tensor, int]]:
    """Add up the first sums; return how many ranks have each gradient and how many a bad one, and of how many ranks.

    Where this rank has `changed`, it sends zeros, and a presence that makes every sum negative.
    """
    busy = _busy(shard for shard, _ in members)
    terms: list[Term] = []
    flags = []
    for shard, one in members:
        groups = tuple(group for group in shard.everyone if group in busy)
        size = prod(group.size for group in groups)
        flag = shard.numbers(*((float(-size), 0.0) if changed else _presence(one)))
        flags.append((flag, size))
        terms += [(flag, groups), *_moments(shard, one)]
    reduce_(terms)
    return flags


def _reduce_norms(members: list[Member]) -> list[Tensor]:
    """Add up ΣU² and ΣX² of some members."""
    pairs = [
        shard.zeros(2) if one is None else shard.numbers(one.u2, 0.0 if one.x2 is None else one.x2)
        for shard, one in members
    ]
    reduce_([(pair, shard.partial.get("scalars", ())) for (shard, _), pair in zip(members, pairs, strict=True)])
    return pairs


def _agree_on_gradients(given: list[tuple[Shard, Tensor | None]]) -> None:
    """Ask whether every gradient is there on all ranks or on none: before gradients of unknown placement move."""
    flags = [shard.numbers(float(g is not None)) for shard, g in given]
    reduce_([(flag, shard.everyone) for (shard, _), flag in zip(given, flags, strict=True)])
    for (shard, g), flag in zip(given, flags, strict=True):
        _insist(shard, g is not None, prod(group.size for group in shard.everyone), flag[0].item())


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
