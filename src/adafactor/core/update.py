"""One parameter in one step, as `algorithm.py` sees it, and how X and the averages are read and written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adafactor.core import momentum, rounding, sums
from adafactor.core.contract import Sums
from adafactor.core.equations import Scalar
from adafactor.core.factoring import statistics_dtype
from adafactor.core.settings import Rates, Settings
from adafactor.core.sums import At


class Sizes(NamedTuple):
    """The scalars between U and X."""

    rms_x: Scalar | None
    alpha: Scalar
    rms_u: Scalar
    divisor: Scalar
    before: Scalar  # what multiplies Uₜ before β₁ averages it
    after: Scalar  # and what does after
    decay: Scalar  # the share that weight decay takes


@dataclass(eq=False, kw_only=True)
class Update(Sums):
    """One parameter in one step. Scalars are numbers on a CPU, elsewhere 0-d tensors: the host never waits for them.

    On a device nobody knows which gradients are finite. A step with one that is not runs with weights of zero, so that
    R, C, V̂, the momentum and X come out as they were.
    """

    x: Tensor  # (…, n, m), or any shape where nothing is factored
    g: Tensor
    axes: tuple[int, int]  # of n and of m
    row: Tensor | None  # Rₜ₋₁ (…, n, 1)
    col: Tensor | None  # Cₜ₋₁ (…, 1, m)
    full: Tensor | None  # V̂ₜ₋₁, in place of both
    s: Settings
    rates: Rates  # β̂₂ₜ, 1 − β̂₁ₜ, 1 − β̂₂ₜ, ρₜ: Algorithm 6
    keys: Any = None  # of stochastic rounding
    w1: Any = None  # 1 − β̂₁ₜ and 1 − β̂₂ₜ again, in X's precision
    w2: Any = None
    skipped: Tensor | None = None  # on a device, whether the step is left out; None: it is taken
    R: Tensor | None = None
    C: Tensor | None = None
    scales: list[Tensor] = field(default_factory=list)  # in X's shape; their product is 1/√V̂
    norm_u: Scalar = 0.0  # √ΣU²
    norm_x: Scalar | None = None  # √ΣX²; None where nobody needs it
    before: Any = 1.0  # as in `Sizes`
    after: Any = 1.0
    keep: Any = 1.0  # 1 − decay

    @cached_property
    def dtype(self) -> torch.dtype:
        """What X, U and the momentum are computed in."""
        return statistics_dtype(self.x.dtype)

    @cached_property
    def blocks(self) -> momentum.Blocks | None:
        """The blocks of a momentum that is kept in int8."""
        return momentum.blocks_of(self.parameter.factoring, self.parameter.settings) if self.s.beta1 else None

    @cached_property
    def rounds_momentum(self) -> bool:
        """Whether the momentum is kept in fewer bits than it is computed in."""
        return momentum.is_rounded(self.parameter.state, self.s, self.dtype)

    def chunks(self) -> Iterator[At]:
        """What to index tensors of X's shape with, so that extra memory stays bounded; int8 blocks stay whole."""
        draws = self.rounds_momentum or self.parameter.rounding == "stochastic"
        size = sums.CHUNK_CPU if self.g.is_cpu else sums.CHUNK_DEVICE // (sums.DRAWING if draws else 1)
        return sums.divide(self.g, size, self.blocks)

    def masked(self, t: Tensor) -> Tensor:
        """A tensor without the NaN of a step that is left out: a weight of zero does not take it away."""
        return t if self.skipped is None else t.masked_fill_(self.skipped, 0)

    def average(self, old: Tensor, new: Tensor, weight: Any, write: bool) -> Tensor:
        """Average old and new: in place of the old, or where that is not to be written yet, as a new tensor."""
        if write:
            new = self.masked(new)
        if isinstance(weight, float) and weight >= 0.5:  # `lerp` by a weight near 1 has no digits of 1 − weight
            average = new.lerp(old, 1 - weight)
            return old.copy_(average) if write else average
        return old.lerp_(new, weight) if write else old.lerp(new, weight)

    def average_momentum(self, at: At, new: Tensor, write: bool) -> Tensor:
        """Average new numbers into a chunk of the momentum; what the state keeps of it may be rounded."""
        state = self.parameter.state
        m = momentum.load(state, self.blocks, at, self.dtype)
        is_masked = self.s.momentum_of == "gradient" and self.skipped is not None  # in place, so not in G itself
        m = self.average(m, new.to(self.dtype, copy=is_masked), self.w1, write or self.rounds_momentum)
        if write and self.rounds_momentum:
            momentum.store(state, self.blocks, at, m, self.random_words(at, m), self.skipped)
        return m

    def subtract_(self, at: At, change: Tensor) -> None:
        """Write X·keep − after·change into a chunk of X, rounded as the settings say."""
        how, old = self.parameter.rounding, self.x[at]
        compensation = self.parameter.state["compensation"][at] if how == "kahan" else None
        decays = isinstance(self.keep, Tensor) or self.keep != 1
        in_place = how == "nearest" and not decays  # torch then rounds the result, which it has in change's precision
        x = old if in_place else rounding.load(old, compensation, self.dtype)
        if decays:
            x.mul_(self.keep)
        if isinstance(self.after, Tensor):
            x.addcmul_(change, self.after, value=-1)
        else:
            x.sub_(change, alpha=self.after)
        rounding.store(old, x, compensation, self.random_words(at, old) if how == "stochastic" else None, self.skipped)

    def random_words(self, at: At, like: Tensor) -> Tensor:
        """The random words of a chunk's elements, by their numbers in the whole parameter."""
        p = self.parameter
        start = [0] * like.dim() if at is ... else [along.start for along in at]
        place = tuple(a + b for a, b in zip(start, p.offset or (0,) * like.dim(), strict=True))
        words: Tensor = rounding.random_words(
            rounding.elements(tuple(like.shape), p.shape, place, like.device), self.keys
        )
        return words
