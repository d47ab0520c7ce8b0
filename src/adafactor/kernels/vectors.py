"""Algorithm 5 for the many small vectors of a model on a device: laid end to end, they step as one.

A model has more biases and norms than matrices. One at a time each would cost as many launches as a matrix. Here a
batch of them is one long vector; what is a scalar for one of them is spread over its elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adafactor.bucket import Parameter
from adafactor.equations import Scalar
from adafactor.kernels.blocks import BLOCK_DEVICE
from adafactor.layout import statistics_dtype, sum_dtype

if TYPE_CHECKING:
    from adafactor.kernels.scalars import Batch
    from adafactor.step import Update

SMALL = 2**16  # elements: above this a launch of its own costs little beside the work


class Vectors:
    """Small tensors on a device whose second moment is kept whole, end to end."""

    @staticmethod
    def of(batch: Batch, updates: list[Update]) -> list[Vectors]:
        """Find those of a batch that can be laid end to end, by dtype, no longer than a block."""
        found: dict[object, list[int]] = {}
        for place in batch.places:
            u = updates[place]
            if not batch.on_host and _is_small(u):
                found.setdefault((u.parameter.x.dtype, u.g.dtype), []).append(place)
        most = BLOCK_DEVICE // SMALL
        runs = [places[i : i + most] for places in found.values() for i in range(0, len(places), most)]
        return [Vectors(batch, run, [updates[i].parameter for i in run]) for run in runs if len(run) > 1]

    def __init__(self, batch: Batch, places: list[int], parameters: list[Parameter]):
        """Prepare what lasts: to which parameter each element belongs."""
        self.batch, self.places, self.parameters = batch, places, parameters
        self.sizes = [p.x.numel() for p in parameters]
        x = parameters[0].x
        self.dtype = statistics_dtype(x.dtype)
        lengths = torch.tensor(self.sizes, device=x.device)
        self.entry = torch.arange(len(places), device=x.device).repeat_interleave(lengths, output_size=sum(self.sizes))
        self.updates: list[Update] = []
        self.g = self.u = self.v = self.x = self.mask = None  # of this step

    def begin(self, updates: list[Update]) -> None:
        """Take the gradients."""
        self.updates = updates
        self.g = self._lay([u.g for u in updates])

    def moments(self) -> None:
        """Whether each G² is finite: in double, no sum of float32 squares is infinite unless one of them is."""
        squares = (self.g * self.g).to(sum_dtype(self.g.device))
        finite = torch.stack(torch._foreach_norm(self._cut(squares), 1)).isfinite()
        for u, one in zip(self.updates, finite.unbind(), strict=True):
            u.finite = one

    def energy(self) -> None:
        """V̂ₜ and m̂ₜ (lines 5–6), ΣU² and ΣX²."""
        s, g = self.batch.settings, self.g
        self.mask = self._mask()
        if self.mask is not None:
            g = self.g = g.masked_fill(~self.mask, 0)
        beta2, w2 = self._spread([u.beta2 for u in self.updates]), self._spread([u.w2 for u in self.updates])
        self.v = self._lay([p.state["full"] for p in self.parameters]) * beta2 + (g * g + s.eps[0]) * w2
        self._store("full", self.v)
        if s.beta1 and s.momentum_of == "gradient":
            g = self.g = self._average("momentum", g)
        self.u = g * self.v.rsqrt()
        self._measure("u2", self.u)
        self.x = self._lay([p.x for p in self.parameters])
        if s.relative:
            self._measure("x2", self.x)

    def apply_(self) -> None:
        """X (line 10)."""
        s = self.batch.settings
        change = self.u * self._spread([u.scale for u in self.updates])
        if self.mask is not None:  # a weight of zero does not keep a NaN out of an average
            change = change.masked_fill(~self.mask, 0)
        if s.beta1 and s.momentum_of == "update":
            change = self._average("momentum", change)
        decay = self._spread([u.decay for u in self.updates])
        if isinstance(decay, Tensor) or decay != 1:
            new = self.x * decay - change
        else:
            new = self.x - change
        if self.mask is not None:
            new = torch.where(self.mask, new, self.x)
        torch._foreach_copy_([p.x.view(-1) for p in self.parameters], self._cut(new))

    def end(self) -> None:
        """Let go of everything that is of this step."""
        self.updates = []
        self.g = self.u = self.v = self.x = self.mask = None

    def _lay(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors]).to(self.dtype)

    def _cut(self, laid: Tensor) -> list[Tensor]:
        return list(laid.split(self.sizes))

    def _spread(self, values: list[Scalar]) -> Scalar:
        """The scalars of these parameters, one for each element; a number that is the same for all stays one."""
        if not isinstance(values[0], Tensor):
            return values[0]
        return torch.stack([value for value in values if isinstance(value, Tensor)]).to(self.dtype)[self.entry]

    def _mask(self) -> Tensor | None:
        masks = [u.mask for u in self.updates if u.mask is not None]
        return torch.stack(masks)[self.entry] if masks else None

    def _average(self, key: str, new: Tensor) -> Tensor:
        weight = self._spread([u.w1 for u in self.updates])
        m = self._lay([p.state[key] for p in self.parameters])
        m = m + (new - m) * weight
        self._store(key, m)
        return m

    def _store(self, key: str, laid: Tensor) -> None:
        torch._foreach_copy_([p.state[key].view(-1) for p in self.parameters], self._cut(laid))

    def _measure(self, name: str, laid: Tensor) -> None:
        norms = torch._foreach_norm(self._cut(laid.to(sum_dtype(laid.device))))
        for u, norm in zip(self.updates, torch.stack(norms).square().unbind(), strict=True):
            setattr(u, name, norm)


def _is_small(u: Update) -> bool:
    """Whether a parameter can be laid end to end with others, and is small enough to be worth it."""
    p, tensors = u.parameter, (u.parameter.x, u.g, *u.parameter.state.values())
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.is_contiguous() for t in tensors)
    ordinary = p.layout.estimator == "full" and p.rounding == "nearest" and p.shard is None
    return plain and ordinary and 0 < p.x.numel() <= SMALL
