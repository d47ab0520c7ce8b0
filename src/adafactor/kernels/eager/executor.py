"""What surrounds the algorithm in eager PyTorch: blocks, rounding, masks, and many parameters at a time on a device.

On a CPU an executor has one parameter, and its scalars are numbers. On a device it has many, and their scalars are
vectors with an entry for each, so that hundreds of parameters take a few dozen launches for them and the host never
waits: a step that is not taken is masked. R, C and small V̂ are packed end to end for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adafactor.algorithm import Blockwise, factored_step, unfactored_step
from adafactor.core import equations as eq
from adafactor.core import momentum, rounding, sums
from adafactor.core.contract import EXACT_TYPES, Gradients, Parameter, Scale, Sums, check_finite
from adafactor.core.equations import Scalar
from adafactor.core.factoring import Factored, statistics_dtype, sum_dtype
from adafactor.core.settings import Settings
from adafactor.core.signals import held_back
from adafactor.kernels.eager.blocks import Block, Pack, blocks, part, sums_of_squares


class Executor:
    """Parameters with the same settings that step side by side: the contract's verbs, and the algorithm's."""

    takes_scale = False

    def __init__(self, parameters: list[Parameter]):
        """Prepare for gradients of all of them."""
        self.parameters, self.in_lockstep = parameters, parameters[0].in_lockstep
        self.sums: list[Sums] = []
        self._run: Iterator[None] = iter(())  # a step, which pauses after the moments and after the norms
        self._skipped: list[Parameter] = []  # in this step, as far as the host knows
        self._metrics: tuple[Tensor, Tensor] | None = None  # on a device: what `flush` hands to the parameters
        x = parameters[0].x
        self._dtype, self._wide, self._device = statistics_dtype(x.dtype), sum_dtype(x.device), x.device
        self._on_host = len(parameters) == 1 and sums.on_host(x)
        self._prepare(parameters)

    def _prepare(self, members: list[Parameter]) -> None:
        """Prepare what lasts for as long as the same ones have gradients."""
        self._members = members
        self.count = self._scalars([p.factoring.count for p in members])
        self._factored = [p.factoring for p in members if isinstance(p.factoring, Factored)]
        packed = members[0].factoring.statistics if self._factored or len(members) > 1 else ()
        self._packs = {key: Pack([p.state[key] for p in members]) for key in packed}
        self._axes = [{key: f.summed_axis(key) for key in packed} for f in self._factored]
        self._lengths = {key: self._scalars([f.shape[f.summed_axis(key)] for f in self._factored]) for key in packed}
        roots = [rounding.roots(p.settings.seed, p.number) for p in members]
        self._blocks_kept = [momentum.blocks_of(p.factoring, p.settings) for p in members]  # of int8 momenta
        self._is_rounded = [momentum.is_rounded(p.state, p.settings, self._dtype) for p in members]
        self._roots: Any = roots[0] if self._on_host else tuple(torch.tensor(roots, device=self._device).unbind(1))

    def begin(
        self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None, scale: Scale | None
    ) -> None:
        """Take the gradients; compute the rates of step t (Algorithm 6)."""
        members = [p for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        self._grads = [_as_plain(g, p.x) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        if not members:
            return
        if members != self._members:
            self.flush()
            self._prepare(members)
        steps = [p.state["step"] for p in members]
        t = 1 + (float(steps[0].item()) if self._on_host else torch.stack(steps).to(self._wide))
        self._settings = settings[members[0].group]
        self.rates = self._settings.rates(t)
        is_random = members[0].rounding == "stochastic" or any(self._is_rounded)
        self._keys: Any = rounding.keys(self._roots, t) if is_random else None
        self._averages: dict[str, Tensor] = {}  # of this step, packed, until they go into the state
        self._may_write = False  # nothing of X or the state, before all sums are complete
        self._run = self._phases()

    def moments(self) -> None:
        """Run the algorithm to its next pause."""
        next(self._run, None)

    norms = moments  # the second pause

    def apply_(self) -> None:
        """Run what is left of it."""
        for _ in self._run:
            pass

    def step(self) -> None:
        """Run all of it. A signal that comes meanwhile is handled at the end."""
        with held_back():
            self.moments()
            check_finite(self.sums)
            self.apply_()

    def end(self) -> list[Parameter]:
        """Let go of the gradients."""
        skipped, self._skipped = self._skipped, []
        self.sums, self._grads, self._averages, self._run = [], [], {}, iter(())
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

    def _phases(self) -> Iterator[None]:
        """Run the algorithm; fill `sums` at its pauses and go on with what they are then."""
        first = self._members[0]
        phases = (factored_step if self._factored else unfactored_step)(self, self._settings)
        rows, cols = next(phases)
        self.sums = [Sums(p, flag) for p, flag in zip(self._members, self._finite(rows, cols), strict=True)]
        one = self.sums[0]
        if first.shard is not None:  # then it is alone
            one.rows, one.cols = rows, cols
            one.mean_row = first.shard.mean_row(rows, first.state.get("row"), self.rates.beta2, self.rates.w2)
        yield  # other ranks add their shares, into the same tensors
        if one.finite is False:  # on a CPU, where it is alone
            first.metrics.skipped += 1
            self._skipped = [first]
            return
        flags = [one.finite for one in self.sums if isinstance(one.finite, Tensor)]  # all of them or none
        self._mask = torch.stack(flags) if flags else None  # which steps are taken; None: all
        one.u2, one.x2 = phases.send(one.mean_row)
        yield  # other ranks add their shares
        try:
            phases.send((one.u2, one.x2))
        except StopIteration as end:
            self._note(*end.value)

    def _finite(self, rows: Tensor | None, cols: Tensor | None) -> Sequence[Tensor | bool]:
        """Whether all of each G² is finite, from its means or from G."""
        if rows is not None:
            flags = self._packs["row"].sums(rows).isfinite()
        elif cols is not None:
            flags = self._packs["col"].sums(cols).isfinite()
        elif "full" in self._packs:
            flags = self._packs["full"].sums(self._packed_squares()).isfinite()
        else:  # it is alone
            parts = (part(self._grads[0], block).to(self._dtype).square() for block in blocks(self._grads[0]))
            flags = torch.stack([q.isfinite().all() for q in parts]).all()
        return [bool(flags)] if self._on_host else flags.reshape(-1).unbind()

    def _note(self, rms_x: Scalar | None, alpha: Scalar, rms_u: Scalar, clipped: Tensor | bool) -> None:
        """Keep the metrics of this step, or on a device of the last one that was taken."""
        figures = self.rates.beta2, rms_x, alpha, rms_u
        if self._on_host:
            self._members[0].metrics.add(*figures, int(clipped), 1)
            return
        zero = torch.zeros_like(self.count)  # type: ignore[arg-type]
        taken = zero + (1 if self._mask is None else self._mask)
        new = torch.stack([zero + (nan if figure is None else figure) for figure in figures])
        counts = torch.stack([taken * clipped, taken, 1 - taken])
        if self._metrics is not None:
            new, counts = torch.where(taken > 0, new, self._metrics[0]), counts + self._metrics[1]
        self._metrics = new, counts

    def g(self, i: int, block: Block) -> Tensor:
        """A block of G."""
        return part(self._grads[i], block)

    def mean_squares(self, eps1: float) -> tuple[Tensor | None, Tensor | None]:
        """Means of G² + ε₁ over the columns and over the rows, in double, where ε₁ cannot be lost."""
        # G² fits float32 but a sum of it may not: where it is taken in float32, a power of two keeps it in range
        is_wide = self._device.type != "cpu" and self._wide == torch.float64
        shrink = 1.0 if is_wide else min(sums.shrink_of(p.shape) for p in self._members)
        totals = [
            sums_of_squares(g, axes, self._dtype, shrink) for g, axes in zip(self._grads, self._axes, strict=True)
        ]
        means: dict[str, Tensor] = {}
        for key, pack in self._packs.items():
            total, length = pack.join([total[key] for total in totals], self._wide), pack.spread(self._lengths[key])
            here = length if len(totals) > 1 else self._grads[0].shape[self._axes[0][key]]  # of a shard, its share
            means[key] = (total / shrink + here * eps1) / length
        return means.get("row"), means.get("col")

    def average(self, key: str, means: Tensor | None, decay: Scalar, weight: Scalar) -> Tensor | None:
        """β̂·old + (1 − β̂)·means, as precise as the means; `descend_` rounds it into the states of this name."""
        if means is None:
            return None
        pack = self._packs[key]
        old = pack.join([p.state[key] for p in self._members], means.dtype)
        new = eq.average(old, means, pack.spread(decay), pack.spread(weight))
        self._averages[key] = new if self._mask is None else torch.where(pack.spread(self._mask), new, old)
        return self._averages[key]

    def mean_row(self, row: Tensor) -> Tensor:
        """The mean of each matrix's R over n, spread over R."""
        pack, totals = self._packs["row"], []
        for r, f in zip(pack.split(row), self._factored, strict=True):
            totals.append(sums.sum_along(r, f.row_axis).unsqueeze(f.row_axis).expand_as(r))
        return pack.join(totals, row.dtype).div(pack.spread(self._lengths["col"]))

    def over_x(self, key: str, scale: Tensor) -> Blockwise:
        """A scale of R's or C's shape, (…, n, 1) or (…, 1, m), in the statistics' precision."""
        over = self._packs[key].split(scale.to(self._dtype))
        return lambda i, block: part(over[i], block)

    def average_squares(self, eps1: float, decay: Scalar, weight: Scalar) -> Blockwise:
        """β̂·V̂ + (1 − β̂)·(G² + ε₁)."""
        if "full" in self._packs:
            self.average("full", self._packed_squares() + eps1, decay, weight)
            averages = self._packs["full"].split(self._averages["full"].to(self._dtype))
            return lambda i, block: part(averages[i], block)
        decays, weights = self._entries(decay), self._entries(weight)

        def average(i: int, block: Block) -> Tensor:
            v, g = self._own(self._state("full", i, block)), self.g(i, block).to(self._dtype)
            eq.average_(v, self._if_taken(i, (g * g).add_(eps1), v), decays[i], weights[i])
            return v

        return average

    def average_gradient(self, weight: Scalar) -> Blockwise:
        """m̂ₜ, which takes the place of G."""
        weights = self._entries(weight)

        def average(i: int, block: Block) -> Tensor:
            m = self._average(i, block, self.g(i, block), weights[i])
            self._keep(i, block, m)
            return m

        return average

    def norms_of(self, update: Blockwise) -> tuple[Scalar, Scalar | None]:
        """ΣU², and ΣX² where it is wanted."""
        u2, x = self._norm(update, self._grads), [p.x for p in self._members]
        return u2, self._norm(lambda i, block: part(x[i], block), x) if self._members[0].measures_x else None

    def descend_(self, update: Blockwise, scale: Scalar, rate: Scalar, decay: Scalar, weight: Scalar) -> None:
        """X·decay − rate·scale·U, rounded as the settings say; with momentum, rate times the average of scale·U.

        Averages that were formed so far go into the state, those of a block when `update` forms them again.
        """
        self._may_write = True
        for key, new in self._averages.items():
            torch._foreach_copy_([p.state[key] for p in self._members], self._packs[key].split(new))
        s, skipped = self._settings, None if self._mask is None else ~self._mask
        if self._mask is not None and s.weight_decay:
            decay = 1 - (1 - decay) * self._mask.to(self._wide)
        scales, rates, decays, weights = map(self._entries, (scale, rate, decay, weight))
        # random numbers take as much room for the momentum as for X
        how = "stochastic" if any(self._is_rounded) else self._members[0].rounding
        for i, block in self._blocks(how):
            change = update(i, block).mul_(scales[i])  # last: α·r alone may leave float32
            if s.beta1 and s.momentum_of != "gradient":
                m = self._average(i, block, change, weights[i])
                change = m if s.momentum_of == "update" else m * rates[i]
                change = change if skipped is None else change.masked_fill(skipped[i], 0)
                self._keep(i, block, m)
            elif skipped is not None:
                change.masked_fill_(skipped[i], 0)
            self._subtract(i, block, change, decays[i])
            del change  # before the next block's is made
        counts = [p.state["step"] for p in self._members]
        if self._mask is None:
            torch._foreach_add_(counts, 1)
        else:  # in two operations: a wrapper of two tensors would add to its one count twice
            torch._foreach_copy_(counts, torch._foreach_add(counts, list(self._mask.to(counts[0].dtype).unbind())))

    def _scalars(self, values: Sequence[float]) -> Scalar:
        """A number for each parameter, as the algorithm's scalars are."""
        return float(values[0]) if self._on_host else torch.tensor(values, dtype=self._wide, device=self._device)

    def _entries(self, value: Scalar) -> list[Any]:
        """The entry of a scalar for each parameter, in the precision that torch's operations in place want."""
        n = len(self._members)
        return list(value.to(self._dtype).expand(n).unbind()) if isinstance(value, Tensor) else [value] * n

    def _blocks(self, how: str = "nearest") -> Iterator[tuple[int, Block]]:
        pairs = zip(self._grads, self._blocks_kept, strict=True)
        return ((i, block) for i, (g, kept) in enumerate(pairs) for block in blocks(g, how, kept))

    def _state(self, key: str, i: int, block: Block) -> Tensor:
        return part(self._members[i].state[key], block)

    def _own(self, state: Tensor) -> Tensor:
        """A block of the state to write to: itself, or a copy as long as the step may still be given up."""
        return state if self._may_write else state.clone()

    def _average(self, i: int, block: Block, new: Tensor, weight: Any) -> Tensor:
        """A block of the momentum with new numbers averaged in: in the state itself, if it is kept so and may be."""
        m = momentum.load(self._members[i].state, self._blocks_kept[i], block, self._dtype)
        m = m if self._is_rounded[i] else self._own(m)
        return m.lerp_(self._if_taken(i, new.to(self._dtype), m), weight)

    def _keep(self, i: int, block: Block, m: Tensor) -> None:
        """Round a block of the momentum into the state, if it is not the state itself, and may be."""
        if self._is_rounded[i] and self._may_write:
            random = self._random_words(i, block, m) if self._settings.momentum_rounding == "stochastic" else None
            taken = None if self._mask is None else self._mask[i]
            momentum.store(self._members[i].state, self._blocks_kept[i], block, m, random, taken)

    def _random_words(self, i: int, block: Block, like: Tensor) -> Tensor:
        """The random words of the elements of a block."""
        p = self._members[i]
        start = [0] * like.dim() if block is None else [s.start for s in block]
        place = tuple(a + b for a, b in zip(start, p.offset or (0,) * like.dim(), strict=True))
        keys = self._keys if self._on_host else tuple(key[i] for key in self._keys)
        words: Tensor = rounding.random_words(rounding.elements(tuple(like.shape), p.shape, place, like.device), keys)
        return words

    def _if_taken(self, i: int, new: Tensor, old: Tensor) -> Tensor:
        """The new values, or the old ones where the step is not taken: a NaN must not reach them."""
        return new if self._mask is None else torch.where(self._mask[i], new, old)

    def _packed_squares(self) -> Tensor:
        return self._packs["full"].join(self._grads, self._dtype).square().to(self._wide)

    def _norm(self, tensor: Blockwise, like: list[Tensor]) -> Scalar:
        """Σ of the squares of a tensor, in blocks that follow the memory of another one."""
        if self._on_host:
            every = blocks(like[0], whole=self._blocks_kept[0])
            return sums.total([sums.sum_of_squares(sums.in_memory_order(tensor(0, block))) for block in every])
        norms = []
        for i, (t, kept) in enumerate(zip(like, self._blocks_kept, strict=True)):
            parts = [vector_norm(tensor(i, block), dtype=self._wide) for block in blocks(t, whole=kept)]
            norms.append(parts[0] if len(parts) == 1 else vector_norm(torch.stack(parts)))
        return torch.stack(norms).square()

    def _subtract(self, i: int, block: Block, change: Tensor, decay: Scalar) -> None:
        """X·decay − change of a block, rounded."""
        p = self._members[i]
        old, has_decay = part(p.x, block), isinstance(decay, Tensor) or decay != 1
        if p.rounding == "nearest" and not has_decay:
            old.sub_(change)
            return
        compensation = self._state("compensation", i, block) if p.rounding == "kahan" else None
        x = rounding.load(old, compensation, self._dtype)
        if has_decay:
            x.mul_(decay)
        x.sub_(change)
        random = self._random_words(i, block, old) if p.rounding == "stochastic" else None
        rounding.store(old, x, compensation, random, None if self._mask is None else self._mask[i])


def _as_plain(g: Tensor, x: Tensor) -> Tensor:
    """G no wider than the statistics, and a plain tensor if X is one: operations in place would do too much."""
    g = g.to(statistics_dtype(x.dtype)) if g.dtype.itemsize > max(x.itemsize, 4) else g
    is_plain = type(g) in EXACT_TYPES or type(x) not in EXACT_TYPES
    return g if is_plain and not g._is_zerotensor() else torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g)
