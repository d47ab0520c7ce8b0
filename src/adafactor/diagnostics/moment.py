"""How well the factors fit: the unfactored second moment of chosen parameters, for some steps, beside the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from adafactor.core import equations as eq
from adafactor.core.dtensor import is_sharded
from adafactor.core.factoring import Factored, Factoring, sum_dtype
from adafactor.core.settings import Settings
from adafactor.core.state import factoring_of
from adafactor.diagnostics.naming import select
from adafactor.diagnostics.report import parameters, unwrap


@dataclass(frozen=True)
class Fit:
    """One parameter's second moment over the observed steps: V unfactored, and V̂ from V's row and column means.

    Both are of the same gradients with the same weights, so that what they differ by is the factoring and nothing else.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        estimator: `"outer"`, `"row"`, `"column"`, or `"full"`, which fits by definition.
        steps: how many were observed.
        coverage: the share of the optimizer's own average that falls on the observed steps; 1 from its first step on.
        divergence: Σd(V, V̂)/ΣV, in nats: 0 for a V of rank 1. Of `"outer"`, how much a row tells of the column.
        noise: the divergence that independent normal gradients with a V of rank 1 would show over as many steps.
        largest_ratio: the largest V/V̂: there the update is too large by its root.
        smallest_ratio: the smallest V/V̂: there the update is too small by its root.
        within_two: the share of elements whose update is right within a factor of two: ¼ ≤ V/V̂ ≤ 4.
        cosine: between the last G/√V̂ and G/√V.
        difference: ‖G/√V̂ − G/√V‖/‖G/√V‖, of the same.
        rms_factored: RMS(G/√V̂), of the same.
        rms_full: RMS(G/√V), of the same.
    """

    name: str
    shape: tuple[int, ...]
    estimator: str
    steps: int
    coverage: float
    divergence: float
    noise: float
    largest_ratio: float
    smallest_ratio: float
    within_two: float
    cosine: float
    difference: float
    rms_factored: float
    rms_full: float

    def __str__(self) -> str:
        """Write three lines; `docs/diagnostics.md` says what is much."""
        return (
            f"{self.name} {self.shape}, {self.estimator}: divergence {self.divergence:.3f} nats over {self.steps} "
            f"steps ({self.noise:.3f} would be noise; coverage {self.coverage:.0%})\n"
            f"  V is {self.smallest_ratio:.2g} to {self.largest_ratio:.2g} times its estimate, "
            f"{self.within_two:.0%} of the updates right within a factor of two\n"
            f"  last update against the unfactored one: cosine {self.cosine:.3f}, difference {self.difference:.0%}, "
            f"RMS(U) {self.rms_factored:.2f} against {self.rms_full:.2f}"
        )


class FullMoment:
    r"""Averages the unfactored second moment of chosen parameters while the optimizer goes on with its factors.

    It costs eight bytes an element of these parameters and a pass over them a step (and, where they are sharded, a
    gathered gradient on every rank), so use it for some steps and not for a whole run. It changes nothing in the
    optimizer. More steps give less noise.

    Args:
        optimizer: an `Adafactor`, also as Accelerate or Lightning wrap it.
        names: the parameters, by name or by patterns with stars: `"h.*.attn.c_attn.weight"`.
        model: where to take names from, if the optimizer was given parameters without.

    Examples:
        >>> with FullMoment(optimizer, "h.0.*.weight") as moment:
        ...     train(steps=200)
        >>> print(*moment.compare(), sep="\n")
    """

    def __init__(self, optimizer: object, names: str | Iterable[str], model: Module | None = None) -> None:
        """Begin with the next step."""
        self.optimizer = unwrap(optimizer)
        groups = self.optimizer.param_groups
        known = {name: (p, groups[i]) for name, p, i in parameters(self.optimizer, model)}
        chosen = select(list(known), names)
        self._observed = {name: _Observed(*known[name], self.optimizer.state) for name in chosen}
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._observe())

    @torch.no_grad()
    def _observe(self) -> None:
        # after the step: a closure makes the gradients inside of it, and a step that was skipped does not count
        for observed in self._observed.values():
            observed.look()

    @torch.no_grad()
    def compare(self) -> list[Fit]:
        """Return the fit of every chosen parameter that has been stepped since, the worst divergence first."""
        fits = [observed.fit(name) for name, observed in self._observed.items() if observed.steps]
        return sorted(fits, key=lambda fit: -fit.divergence)

    def close(self) -> None:
        """Stop observing; `compare` still has what was observed."""
        self._hook.remove()

    def __enter__(self) -> FullMoment:
        """Look until the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Look no longer."""
        self.close()


class _Observed:
    """The second moment of one parameter since it is looked at: a sum of G² + ε₁ with the optimizer's weights."""

    def __init__(self, p: Tensor, group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
        self.p, self.group, self.state = p, group, state
        self.step, self.steps = self._step(), 0
        self.v = self.g = torch.zeros(())
        self.past = 1.0  # the weight that the optimizer's average still gives to what came before
        self.square = 0.0  # Σ of the observed steps' squared weights

    def _step(self) -> int:
        step = self.state.get(self.p, {}).get("step")
        return 0 if step is None else int((step.full_tensor() if is_sharded(step) else step).max())

    def look(self) -> None:
        t, g = self._step(), self.p.grad
        if t == self.step:
            return
        if g is None:
            raise RuntimeError("a gradient was freed before FullMoment saw it, as step_in_backward frees them")
        s = Settings.of(self.group)
        rates = s.rates(t)
        decay, weight = float(rates.beta2), float(rates.w2)
        self.g = (g.full_tensor() if is_sharded(g) else g).to(sum_dtype(g.device))
        new = self.g.square() + s.eps[0]
        self.v = self.v * decay + new * weight
        self.past *= decay
        self.square = self.square * decay**2 + weight**2
        self.step, self.steps = t, self.steps + 1

    def fit(self, name: str) -> Fit:
        s = Settings.of(self.group)
        factoring = factoring_of(self.p, s)
        coverage = 1 - self.past
        v = self.v / coverage
        estimate = from_factors(v, factoring)
        ratio = v / estimate
        mine, full = self.g * estimate.rsqrt(), self.g * v.rsqrt()
        return Fit(
            name=name,
            shape=tuple(self.p.shape),
            estimator=factoring.estimator,
            steps=self.steps,
            coverage=coverage,
            divergence=float(eq.i_divergence(v, estimate) / v.sum()),
            noise=noise(coverage**2 / self.square) if factoring.estimator != "full" else 0.0,
            largest_ratio=float(ratio.max()),
            smallest_ratio=float(ratio.min()),
            within_two=float(((ratio >= 0.25) & (ratio <= 4)).double().mean()),
            cosine=float((mine * full).sum() / (mine.norm() * full.norm())),
            difference=float((mine - full).norm() / full.norm()),
            rms_factored=float(mine.square().mean().sqrt()),
            rms_full=float(full.square().mean().sqrt()),
        )


def from_factors(v: Tensor, factoring: Factoring) -> Tensor:
    """Return V̂ = R·C/mean(R) of a second moment, or its row or column means alone (§3, §3.2)."""
    if not isinstance(factoring, Factored):
        return v
    row, col = v.mean(factoring.col_axis, keepdim=True), v.mean(factoring.row_axis, keepdim=True)
    if factoring.estimator == "outer":
        return (row / row.mean(factoring.row_axis, keepdim=True)) * col
    return (row if factoring.estimator == "row" else col).expand_as(v)


def noise(samples: float) -> float:
    """Return the divergence, per element of mean V, of a mean of so many independent squares of normal numbers.

    E[x·ln x] of x = χ²ₙ/n is ψ(n/2 + 1) − ln(n/2): 0.73 for one gradient, about 1/n for many.
    """
    half = torch.tensor(samples / 2, dtype=torch.float64)
    return float(torch.special.digamma(half + 1) - half.log()) if samples > 0 else math.nan
