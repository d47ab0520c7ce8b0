"""What surrounds the algorithm in eager PyTorch: blocks, rounding, masks, and many parameters at a time on a device.

On a CPU a batch is one parameter, and its scalars are numbers. On a device it is many, and their scalars are vectors
with an entry for each, so that hundreds of parameters take a few dozen launches for them and the host never waits: a
step that is not taken is masked. Small tensors, and all R and C, are packed end to end for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from adafactor.algorithm import Direction
from adafactor.core import equations as eq
from adafactor.core import sums
from adafactor.core.contract import EXACT_TYPES, Parameter
from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype, sum_dtype
from adafactor.core.rounding import elements, keys, lost, random_words, remainder, roots, stochastic
from adafactor.core.settings import Rates, Settings
from adafactor.kernels.eager.blocks import Block, add, blocks, part
from adafactor.kernels.eager.factors import Factor
from adafactor.kernels.eager.pack import Pack


@dataclass
class Member:
    """One tensor of a batch with its gradient and state, or all of them packed."""

    x: Tensor
    g: Tensor
    state: dict[str, Tensor]


class Batch:
    """Parameters with the same settings on one device, on their way through a step."""

    def __init__(self, parameters: list[Parameter], packed: bool):
        """Prepare what lasts."""
        self.parameters, x = parameters, parameters[0].x
        self.dtype, self.wide, self.device = statistics_dtype(x.dtype), sum_dtype(x.device), x.device
        self.on_host = len(parameters) == 1 and sums.on_host(x)
        counts = [float(p.factoring.count) for p in parameters]
        self.count: Scalar = counts[0] if self.on_host else torch.tensor(counts, dtype=self.wide, device=x.device)
        self.pack = Pack([p.x.numel() for p in parameters], x.device) if packed else None
        self.row, self.col = (Factor.of(parameters, key) for key in ("row", "col"))
        self._roots: Any = None
        if any(p.rounding == "stochastic" for p in parameters):
            pairs = [roots(p.settings.seed, p.number) for p in parameters]
            self._roots = pairs[0] if self.on_host else tuple(torch.tensor(pairs, device=x.device).unbind(1))
        self._metrics: dict[str, Tensor] = {}  # on a device: vectors of what `flush` hands to the parameters

    def begin(self, grads: list[Tensor], settings: Settings) -> None:
        """Take the gradients; compute the rates of step t (Algorithm 6)."""
        steps = [p.state["step"] for p in self.parameters]
        t = float(steps[0].item()) if self.on_host else torch.stack(steps).to(self.wide)
        self.settings, self._source = settings, "g"
        self._set_mask(None)
        self.rates: Rates = settings.rates(t + 1)
        self._beta2 = self.rates.beta2
        self._keys: Any = None if self._roots is None else keys(self._roots, t + 1)
        grads = [_as_plain(g, p.x) for p, g in zip(self.parameters, grads, strict=True)]
        self._members = [Member(p.x, g, p.state) for p, g in zip(self.parameters, grads, strict=True)]
        if self.pack is not None:
            everyone, state = self.parameters, {}
            for key in self.parameters[0].state.keys() & {"full", "momentum"}:
                state[key] = self.pack.join([p.state[key] for p in everyone], self.dtype)
            x, g = (self.pack.join(tensors, self.dtype) for tensors in ([p.x for p in everyone], grads))
            self._members = [Member(x, g, state)]

    def end(self) -> None:
        """Let go of the gradients."""
        self._members = []

    # ---- what the algorithm reads and writes

    def mean_squares(self, eps1: float) -> tuple[Tensor | None, Tensor | None]:
        """Means of G² + ε₁ over the columns and over the rows, in double, where ε₁ cannot be lost.

        G² fits float32 but a sum of it may not: where it is taken in float32, a power of two keeps it in range.
        """
        is_wide = not self.device.type == "cpu" and self.wide == torch.float64
        shrink = [1.0 if is_wide else sums.shrink_of(p.shape) for p in self.parameters]
        totals: list[dict[str, Tensor]] = [{} for _ in self.parameters]
        for i, (member, total) in enumerate(zip(self._members, totals, strict=True)):
            for block in blocks(member.g):
                g = part(member.g, block)
                q = g * g if g.dtype == self.dtype else g.to(self.dtype).square_()
                if shrink[i] != 1:
                    q.mul_(shrink[i])
                for factor in (self.row, self.col):
                    if factor is not None:
                        axis, shape = factor.summed[i], factor.states[i].shape
                        total[factor.key] = add(
                            total.get(factor.key), sums.sum_along(q, axis), block, axis, tuple(shape)
                        )
                del g, q  # before the next block's are made
        rows, cols = (
            None if factor is None else factor.means([total[factor.key] for total in totals], shrink, eps1)
            for factor in (self.row, self.col)
        )
        return rows, cols

    def finite(self, rows: Tensor | None, cols: Tensor | None) -> Sequence[Tensor | bool]:
        """Whether all of each G² is finite, from its means or from G."""
        if self.row is not None and rows is not None:
            flags = self.row.finite(rows)
        elif self.col is not None and cols is not None:
            flags = self.col.finite(cols)
        elif self.pack is not None:
            g = self._members[0].g
            flags = self.pack.sums((g * g).to(self.wide)).isfinite()
        else:
            flags = torch.stack([self._largest_square(member.g) for member in self._members]).isfinite()
        return [bool(flags)] if self.on_host else flags.unbind()

    def average_squares_(self, eps1: float, decay: Scalar, weight: Scalar) -> list[Tensor]:
        """β̂·V̂ + (1 − β̂)·(G² + ε₁), in place of V̂, with all digits in float32.

        β̂ is split into keep − fade: in float32, β̂ near 1 and 1 − β̂ would no longer add up to 1, and a long run would
        drift.
        """
        keep, fade = (self._narrow(value) for value in _keep_and_fade(decay, weight))
        weight = self._narrow(weight)
        for i, member, block in self._blocks():
            v, g = part(member.state["full"], block), self._gradient(i, block)
            q = (g * g).add_(eps1)
            if isinstance(keep, Tensor):
                v.mul_(self._at(keep, i)).addcmul_(v, self._at(fade, i), value=-1).addcmul_(q, self._at(weight, i))
            else:
                if keep != 1:
                    v.mul_(keep)
                v.sub_(v, alpha=float(fade)).add_(q, alpha=float(weight))
        return [member.state["full"] for member in self._members]

    def average_gradient_(self, weight: Scalar) -> None:
        """m̂ₜ, which is read in place of G from now on."""
        weight = self._narrow(weight)
        for i, member, block in self._blocks():
            part(member.state["momentum"], block).lerp_(self._gradient(i, block), self._at(weight, i))
        self._source = "momentum"

    def norm(self, direction: Direction, operands: Sequence[Any]) -> Scalar:
        """ΣU², by blocks."""
        parts: list[list[Any]] = [[] for _ in self._members]
        for i, member, block in self._blocks():
            parts[i].append(self._norm(self._direction(direction, operands, i, member, block)))
        return self._total(parts)

    def norm_x(self) -> Scalar | None:
        """ΣX², where it is wanted."""
        if not self.parameters[0].measures_x:
            return None
        parts = [[self._norm(self._load(part(m.x, block))) for block in blocks(m.x)] for m in self._members]
        return self._total(parts)

    def as_scalars(self, *values: Scalar | None) -> tuple[Any, ...]:
        """Scalars of one parameter as those of a batch: vectors on a device."""
        return tuple(v.reshape(1) if isinstance(v, Tensor) and not self.on_host else v for v in values)

    def rms(self, sum_of_squares: Scalar) -> Scalar:
        """RMS of each parameter."""
        return eq.root_mean_square(sum_of_squares, self.count)

    def descend_(
        self, direction: Direction, operands: Sequence[Any], scale: Scalar, decay: Scalar, weight: Scalar
    ) -> None:
        """X·decay − scale·U, rounded as the settings say; with momentum of the update, the average of scale·U."""
        s, mask = self.settings, self.mask
        if mask is not None:  # neither U nor the scale may be NaN where the step is not taken
            scale = _where(mask, scale, 0.0)
            decay = _where(mask, decay, 1.0) if s.weight_decay else 1.0
        scale, weight, masked = self._narrow(scale), self._narrow(weight), None if mask is None else ~mask
        rounding = self.parameters[0].rounding  # of a float32 weight to nearest, whatever the settings say
        is_plain = not s.beta1 and not s.weight_decay and not self.on_host and rounding == "nearest"
        for i, member, block in self._blocks(rounding):
            change = self._direction(direction, operands, i, member, block)
            if masked is not None:
                change.masked_fill_(self._at(masked, i), 0)
            if is_plain and isinstance(scale, Tensor):
                part(member.x, block).addcmul_(change, self._at(scale, i), value=-1)
                del change  # before the next block's is made
                continue
            change.mul_(self._at(scale, i))  # last: α·r alone may leave float32
            if s.beta1 and s.momentum_of == "update":
                m = part(member.state["momentum"], block)
                m.lerp_(change, self._at(weight, i))
                change = m if mask is None else m * self._at(mask, i)
            self._write(i, member, block, change, self._at(self._narrow(decay), i))
            del change
        if self.pack is not None:
            self._unpack()
        self._count_step()

    def note(self, rms_x: Scalar | None, alpha: Scalar, rms_u: Scalar, clipped: Tensor | bool) -> None:
        """Keep the metrics of this step, or on a device of the last one that was taken."""
        if self.on_host:
            self.parameters[0].metrics.add(self._beta2, rms_x, alpha, rms_u, int(clipped), 1)
            return
        new: dict[str, Any] = {"beta2": self._beta2, "step_size": alpha, "rms_update": rms_u, "rms_parameter": rms_x}
        old, like = self._metrics, torch.zeros_like(self.count)  # type: ignore[arg-type]
        taken = like.long() + 1 if self.mask is None else self.mask.long()
        for key, value in new.items():
            if value is not None:
                value = like + value
                self._metrics[key] = torch.where(taken > 0, value, old[key]) if key in old else value
        for key, count in {"clipped": taken * clipped, "taken": taken, "skipped": 1 - taken}.items():
            self._metrics[key] = old[key] + count if key in old else count

    def flush(self) -> None:
        """Hand what is on a device to the parameters, without reading it."""
        columns = {key: value.unbind() for key, value in self._metrics.items()}
        for i, parameter in enumerate(self.parameters if columns else ()):
            values = {key: column[i] for key, column in columns.items()}
            parameter.metrics.skipped = parameter.metrics.skipped + values.pop("skipped")
            parameter.metrics.add(rms_parameter=values.pop("rms_parameter", None), **values)
        self._metrics = {}

    def skip(self, finite: Sequence[Tensor | bool]) -> None:
        """Mask the steps that are not taken. An average with a decay of one and a weight of zero stays as it was."""
        if all(flag is True for flag in finite):
            return
        flags = [flag if isinstance(flag, Tensor) else torch.full((), flag, device=self.device) for flag in finite]
        mask = torch.stack(flags).bool()
        self._set_mask(mask)
        beta2, w1, w2, rho = self.rates
        self.rates = Rates(_where(mask, beta2, 1.0), _where(mask, w1, 0.0), _where(mask, w2, 0.0), rho)

    # ---- inside

    def _set_mask(self, mask: Tensor | None) -> None:
        """Remember which steps are taken; None: all."""
        self.mask = mask
        for factor in (self.row, self.col):
            if factor is not None:
                factor.mask = mask

    def _blocks(self, rounding: str = "nearest") -> Iterator[tuple[int, Member, Block]]:
        for i, member in enumerate(self._members):
            for block in blocks(member.g, rounding):
                yield i, member, block

    def _gradient(self, i: int, block: Block) -> Tensor:
        """G of a block, for an average: even with a weight of zero, a NaN would reach it."""
        member = self._members[i]
        g = part(member.g, block).to(self.dtype)
        return g if self.mask is None else g.masked_fill(~self._at(self.mask, i), 0)

    def _direction(self, direction: Direction, operands: Sequence[Any], i: int, member: Member, block: Block) -> Tensor:
        g = member.g if self._source == "g" else member.state["momentum"]
        return direction(self._load(part(g, block)), *(part(operand[i], block) for operand in operands))

    def _load(self, t: Tensor) -> Tensor:
        """A tensor in the statistics' precision; on a device the operation that reads it converts it."""
        return t.to(self.dtype) if self.on_host else t

    def _narrow(self, value: Scalar) -> Scalar:
        """Scalars in the precision that torch's in-place operations want."""
        return value.to(self.dtype) if isinstance(value, Tensor) else value

    def _at(self, value: Scalar, i: int) -> Any:
        """The entry of a scalar that belongs to member i."""
        if not isinstance(value, Tensor):
            return value
        return value[self.pack.entry] if self.pack is not None else value[i] if value.dim() else value

    def _norm(self, u: Tensor) -> Any:
        if self.pack is not None:
            wide = u.to(self.wide)
            return self.pack.sums(wide * wide)
        return sums.sum_of_squares(sums.in_memory_order(u)) if self.on_host else vector_norm(u, dtype=self.wide)

    def _total(self, parts: list[list[Any]]) -> Scalar:
        """The sum of squares of each parameter, from what `_norm` gave for its blocks."""
        if self.on_host or self.pack is not None:
            return sums.total(parts[0])
        norms = torch.stack([norm for of_blocks in parts for norm in of_blocks])
        if len(norms) > len(parts):
            by_parameter = list(norms.split([len(of_blocks) for of_blocks in parts]))
            norms = torch.stack(torch._foreach_norm(by_parameter))
        return norms.square()

    def _largest_square(self, g: Tensor) -> Tensor:
        largest = torch.zeros((), dtype=self.dtype, device=self.device)
        for block in blocks(g) if g.numel() else ():
            q = part(g, block).to(self.dtype)
            largest = torch.maximum(largest, (q * q).amax())
        return largest

    def _write(self, i: int, member: Member, block: Block, change: Tensor, decay: Scalar) -> None:
        """X of a block, rounded."""
        old, parameter = part(member.x, block), self.parameters[i]
        x = old.to(self.dtype)  # X itself where it has the statistics' precision
        rounding = "nearest" if self.pack is not None else parameter.rounding
        compensation = part(member.state["compensation"], block) if rounding == "kahan" else None
        if compensation is not None:
            x.add_(remainder(compensation, x))
        if isinstance(decay, Tensor) or decay != 1:
            x.mul_(decay)
        x.sub_(change)
        if compensation is not None:
            new = x.to(old.dtype)
            rest = lost(x, new)
            taken = None if self.mask is None else self.mask[i]
            old.copy_(new if taken is None else torch.where(taken, new, old))
            compensation.copy_(rest if taken is None else torch.where(taken, rest, compensation))
        elif rounding == "stochastic":
            start = [0] * old.dim() if block is None else [s.start for s in block]
            place = tuple(a + b for a, b in zip(start, parameter.offset or (0,) * old.dim(), strict=True))
            number = elements(tuple(old.shape), parameter.shape, place, old.device)
            words = random_words(number, self._keys if self.on_host else tuple(key[i] for key in self._keys))
            old.copy_(stochastic(x, old.dtype, words))
        elif x is not old:
            old.copy_(x)

    def _unpack(self) -> None:
        assert self.pack is not None
        member = self._members[0]
        self.pack.store(member.x, [p.x for p in self.parameters])
        for key, joined in member.state.items():
            self.pack.store(joined, [p.state[key] for p in self.parameters])

    def _count_step(self) -> None:
        counts = [p.state["step"] for p in self.parameters]
        if self.mask is None:
            torch._foreach_add_(counts, 1)
        else:  # in two operations: a wrapper of two tensors would add to its one count twice
            new = torch._foreach_add(counts, list(self.mask.to(counts[0].dtype).unbind()))
            torch._foreach_copy_(counts, new)


def _as_plain(g: Tensor, x: Tensor) -> Tensor:
    """A gradient that is no plain tensor, for a parameter that is, as one: operations in place would do too much."""
    is_plain = type(g) in EXACT_TYPES or type(x) not in EXACT_TYPES
    return g if is_plain and not g._is_zerotensor() else torch.empty(g.shape, dtype=g.dtype, device=g.device).copy_(g)


def _keep_and_fade(decay: Scalar, weight: Scalar) -> tuple[Scalar, Scalar]:
    """Split β̂ into keep − fade, such that neither β̂ near 0 nor 1 − β̂ near 0 is lost in float32."""
    if isinstance(weight, Tensor):
        slow = weight < 0.5
        return torch.where(slow, 1.0, decay), torch.where(slow, weight, 0.0)
    return (1.0, weight) if weight < 0.5 else (decay, 0.0)


def _where(mask: Tensor, value: Scalar, other: float) -> Tensor:
    """`value` where the mask says so, else `other`; a number does not lose digits on the way."""
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=sum_dtype(mask.device), device=mask.device)
    return torch.where(mask, value, other)
