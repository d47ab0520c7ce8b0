"""The paper in float64 NumPy, line by line. It imports nothing from `src`: where the two differ, `src` is wrong.

Each function is one algorithm of Shazeer & Stern (2018) as printed, with sums where the paper has sums and the
bias correction where the paper has it. `Row` and `run` put them together the way Table 2 does. What the
paper leaves open is marked CHOICE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms(x: Array) -> float:
    """§5: the root of the mean square over all entries."""
    return float(np.sqrt(np.mean(np.square(x))))


def i_divergence(p: Array, q: Array) -> float:
    """§3: Σ d(p, q) with d(p, q) = p log(p/q) − p + q, and 0 log 0 = 0."""
    positive = p > 0
    log = np.zeros_like(p)
    log[positive] = p[positive] * np.log(p[positive] / q[positive])
    return float(np.sum(log - p + q))


def algorithm_1(x: Array, grads: Sequence[Array], alpha: Callable[[int], float], beta1: float, beta2: float) -> Array:
    """Adam, with ε = 0."""
    m = np.zeros_like(x)
    v = np.zeros_like(x)
    for t, g in enumerate(grads, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        x = x - alpha(t) * m_hat / np.sqrt(v_hat)
    return x


def algorithm_2(x: Array, grads: Sequence[Array], alpha: Callable[[int], float], beta2: float) -> Array:
    """Adam for a matrix with factored second moments and β₁ = 0, with ε = 0."""
    n, m = x.shape
    r = np.zeros((n, 1))
    c = np.zeros((1, m))
    for t, g in enumerate(grads, start=1):
        r = beta2 * r + (1 - beta2) * (g**2) @ np.ones((m, 1))
        c = beta2 * c + (1 - beta2) * np.ones((1, n)) @ (g**2)
        v_hat = (r @ c / np.sum(r)) / (1 - beta2**t)
        x = x - alpha(t) * g / np.sqrt(v_hat)
    return x


def algorithm_3(x: Array, grads: Sequence[Array], alpha: Callable[[int], float], beta1: float, beta2: float) -> Array:
    """Adam with decay-rate adjustments in place of bias adjustments, with ε = 0."""
    m_hat = np.zeros_like(x)
    v_hat = np.zeros_like(x)
    for t, g in enumerate(grads, start=1):
        beta1_hat = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
        beta2_hat = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
        m_hat = beta1_hat * m_hat + (1 - beta1_hat) * g
        v_hat = beta2_hat * v_hat + (1 - beta2_hat) * g**2
        x = x - alpha(t) * m_hat / np.sqrt(v_hat)
    return x


def algorithm_4(
    x: Array,
    grads: Sequence[Array],
    rho: Callable[[int], float],
    beta2_hat: Callable[[int], float],
    eps1: float = 1e-30,
    eps2: float = 1e-3,
    d: float = 1.0,
) -> Array:
    """Adafactor for weight matrices."""
    n, m = x.shape
    ones_n, ones_m = np.ones((n, 1)), np.ones((m, 1))
    r = np.zeros((n, 1))
    c = np.zeros((1, m))
    for t, g in enumerate(grads, start=1):
        alpha = max(eps2, rms(x)) * rho(t)
        b = beta2_hat(t)
        r = b * r + (1 - b) * (g**2 + eps1 * ones_n @ ones_m.T) @ ones_m
        c = b * c + (1 - b) * ones_n.T @ (g**2 + eps1 * ones_n @ ones_m.T)
        v_hat = r @ c / (ones_n.T @ r)
        u = g / np.sqrt(v_hat)
        u_hat = u / max(1.0, rms(u) / d)
        x = x - alpha * u_hat
    return x


def algorithm_5(
    x: Array,
    grads: Sequence[Array],
    rho: Callable[[int], float],
    beta2_hat: Callable[[int], float],
    eps1: float = 1e-30,
    eps2: float = 1e-3,
    d: float = 1.0,
) -> Array:
    """Adafactor for weight vectors."""
    v_hat = np.zeros_like(x)
    for t, g in enumerate(grads, start=1):
        alpha = max(eps2, rms(x)) * rho(t)
        b = beta2_hat(t)
        v_hat = b * v_hat + (1 - b) * (g**2 + eps1)
        u = g / np.sqrt(v_hat)
        u_hat = u / max(1.0, rms(u) / d)
        x = x - alpha * u_hat
    return x


def algorithm_6() -> dict[str, Any]:
    """The proposed hyperparameters."""
    return {
        "eps1": 1e-30,
        "eps2": 1e-3,
        "d": 1.0,
        "rho": lambda t: min(1e-2, 1 / np.sqrt(t)),
        "beta2_hat": lambda t: 1 - t**-0.8,
    }


@dataclass(frozen=True)
class Row:
    """One row of Table 2: which of the paper's ideas are on."""

    estimator: str = "none"  # "none", "outer" (§3), "row", "column" (§3.2)
    beta1: float = 0.0
    momentum: str = "gradient"  # CHOICE: row P averages the update, as the authors' code does; big_vision the direction
    beta2: float | None = None  # None: 1 − t^−c (§7.2); a number: Adam's correction (§7.1)
    c: float = 0.8
    beta2_max: float | None = None  # CHOICE: big_vision's cap of 1 − t^−c
    d: float | None = None
    relative: bool = False
    multiplier: float = 0.1
    eps1: float = 1e-30
    eps2: float = 1e-3
    weight_decay: float = 0.0
    decay_by: str | float = "rho"  # CHOICE: what others multiply λ by: "alpha", "lr", "constant", or lr₀ for ρ²/lr₀
    lr: float = 0.0  # for "lr"
    axes: tuple[int, int] | None = None  # CHOICE: tensors of more than two axes; the rest are a batch
    min_factored: int = 0  # CHOICE: optax factors only where both axes are at least so long
    per_slice: bool = False  # CHOICE: T5X steps each layer of a stack by itself

    def beta2_hat(self, t: int) -> float:
        """β̂₂ₜ."""
        if self.beta2 is None:
            increasing = float(1 - float(t) ** -self.c)
            return increasing if self.beta2_max is None else min(self.beta2_max, increasing)
        return self.beta2 * (1 - self.beta2 ** (t - 1)) / (1 - self.beta2**t)

    def newest(self, t: int) -> float:
        """1 − β̂₂ₜ, the weight of the newest square, where β̂₂ₜ is too near 1 for a difference."""
        if self.beta2 is None and self.beta2_max is None:
            return float(float(t) ** -self.c)
        return 1 - self.beta2_hat(t)


@dataclass
class Memory:
    """What a row carries from step to step, always as sums over whole rows and columns."""

    r: Any = 0.0
    c: Any = 0.0
    v: Any = 0.0
    m: Any = 0.0
    rms_u: list[float] = field(default_factory=list)
    x: list[Array] = field(default_factory=list)


def second_moment(row: Row, g: Array, t: int, memory: Memory) -> Array:
    """V̂ₜ by the row's estimator. `g` has the factored axes last, or fewer than two axes."""
    b, w = row.beta2_hat(t), row.newest(t)
    q = g**2 + row.eps1
    if row.estimator == "none" or g.ndim < 2 or min(g.shape[-2:]) < row.min_factored:
        memory.v = b * memory.v + w * q
        return np.asarray(memory.v)
    memory.r = b * memory.r + w * q.sum(-1, keepdims=True)
    memory.c = b * memory.c + w * q.sum(-2, keepdims=True)
    if row.estimator == "row":
        return np.broadcast_to(memory.r / g.shape[-1], g.shape)
    if row.estimator == "column":
        return np.broadcast_to(memory.c / g.shape[-2], g.shape)
    # (R / ΣR)·C, since R·C alone can leave float64 at the extremes that are tested
    return np.asarray(memory.r / memory.r.sum(-2, keepdims=True) * memory.c)


def step(row: Row, x: Array, g: Array, t: int, s_t: float, memory: Memory) -> Array:
    """One step of a row of Table 2, from Xₜ₋₁ to Xₜ."""
    size = row.multiplier * s_t
    alpha = max(row.eps2, rms(x)) * size if row.relative else size
    if row.axes is not None:
        g = np.moveaxis(g, row.axes, (-2, -1))
    v_hat = second_moment(row, g, t, memory)
    if row.beta1 and row.momentum == "gradient":
        b1 = row.beta1 * (1 - row.beta1 ** (t - 1)) / (1 - row.beta1**t)
        memory.m = b1 * memory.m + (1 - b1) * g
        u = memory.m / np.sqrt(v_hat)
    else:
        u = g / np.sqrt(v_hat)
    memory.rms_u.append(rms(u))
    u_hat = u / (max(1.0, rms(u) / row.d) if row.d is not None else 1.0)
    change = alpha * u_hat
    if row.beta1 and row.momentum == "update":
        memory.m = row.beta1 * memory.m + (1 - row.beta1) * change
        change = memory.m
    elif row.beta1 and row.momentum == "direction":
        memory.m = row.beta1 * memory.m + (1 - row.beta1) * u_hat
        change = alpha * memory.m
    if row.axes is not None:
        change = np.moveaxis(change, (-2, -1), row.axes)
    return np.asarray(x * (1 - decay(row, size, alpha) * row.weight_decay) - change)


def decay(row: Row, rho: float, alpha: float) -> float:
    """What λ is multiplied by."""
    if isinstance(row.decay_by, str):
        return {"rho": rho, "alpha": alpha, "lr": row.lr, "constant": 1.0}[row.decay_by]
    return rho * (rho / row.decay_by)


def run(row: Row, x: Array, grads: Sequence[Array], s: Callable[[int], float]) -> Memory:
    """All steps of a row: `memory.x` is X₀, X₁ and so on, `memory.rms_u` is RMS(U₁) and so on."""
    if row.per_slice:
        alone = [run(replace(row, per_slice=False), x[i], [g[i] for g in grads], s).x for i in range(len(x))]
        return Memory(x=[np.stack(slices) for slices in zip(*alone, strict=True)])
    memory = Memory(x=[x])
    for t, g in enumerate(grads, start=1):
        x = step(row, x, g, t, s(t), memory)
        memory.x.append(x)
    return memory


def warm_up(t: int) -> float:
    """Table 2, with warm-up: sₜ = min(10⁻⁶·t, 1/√t)."""
    return min(1e-6 * t, 1 / math.sqrt(t))


def no_warm_up(t: int) -> float:
    """Table 2, without: sₜ = min(10⁻², 1/√t)."""
    return min(1e-2, 1 / math.sqrt(t))


TABLE_2 = {
    "A": Row(beta2=0.999),
    "B": Row(beta1=0.9, beta2=0.999),
    "C": Row(estimator="outer", beta2=0.999),
    "D": Row(estimator="row", beta2=0.999),
    "E": Row(estimator="column", beta2=0.999),
    "F": Row(beta2=0.99),
    "G": Row(beta2=0.9),
    "H": Row(beta2=0.999, d=1.0),
    "I": Row(beta2=0.999, d=2.0),
    "J": Row(estimator="outer", beta2=0.999, d=1.0),
    "K": Row(c=0.5),
    "L": Row(c=0.8),
    "M": Row(c=1.0),
    "N": Row(c=0.8, d=1.0),
    "O": Row(estimator="outer", d=1.0, relative=True, multiplier=1.0),
    "P": Row(estimator="outer", beta1=0.9, momentum="update", d=1.0, relative=True, multiplier=1.0),
}
