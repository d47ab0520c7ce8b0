"""Is a contender's update the one that its own formula says? Nobody is to be fast by being wrong.

What each says that it computes is here in float64 and as plainly as possible.
A formula takes X₀ and the gradients G₁ … G_T (NumPy arrays) to X_T. `unit` is the machine epsilon of the dtype that
the contender runs in, which one of them builds into its update. Written from the papers and from each
implementation's documentation; nothing is shared with the contenders, ours included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import DTYPES, Contender
from benchmarks.results import Checked

# A vector, a tall and a wide matrix, two convolutions, and both matrices again where optax begins to factor.
SHAPES = [(7,), (40, 24), (24, 40), (32, 20, 3, 3), (3, 5, 20, 18), (144, 130), (130, 144)]
# Gradients that grow, so that clipping acts, and that shrink, so that clipping where none is due shows.
SIZES = [1.0, 3.0, 0.1, 2.0, 0.5]
# Largest deviation allowed, relative to the distance travelled: what rounding leaves, far below any mistake.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
ROUNDED = 5e-2  # where the momentum is rounded to fewer bits
Array = Any  # numpy.ndarray of float64; only its methods are used, so NumPy itself is not imported
Formula = Callable[[Array, Sequence[Array], float], Array]


def rms(x: Array) -> float:
    """The root of the mean square."""
    return math.sqrt(float((x * x).mean()))


@dataclass(frozen=True)
class SGD:
    """X ← X − lr·G."""

    lr: float = 1e-2

    def __call__(self, x: Array, grads: Sequence[Array], unit: float) -> Array:
        """All steps."""
        for g in grads:
            x = x - self.lr * g
        return x


@dataclass(frozen=True)
class AdamW:
    """Loshchilov & Hutter (2019), with torch's defaults."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __call__(self, x: Array, grads: Sequence[Array], unit: float) -> Array:
        """All steps."""
        m, v = 0.0 * x, 0.0 * x
        for t, g in enumerate(grads, start=1):
            x = x * (1 - self.lr * self.weight_decay)
            m = self.beta1 * m + (1 - self.beta1) * g
            v = self.beta2 * v + (1 - self.beta2) * g**2
            x = x - self.lr * m / (1 - self.beta1**t) / ((v / (1 - self.beta2**t)) ** 0.5 + self.eps)
        return x


@dataclass(frozen=True)
class Factored:
    """Shazeer & Stern (2018), Algorithms 4 to 6, with the choices that implementations make.

    `axes` are those that are factored: the `"last"` two, the `"largest"` two, or the first two of a convolution
    (`"channels"`); an axis shorter than `least` is not factored. Momentum is an average of the scaled update.
    """

    axes: str = "largest"
    least: int = 1
    lr: float = 1e-2
    rsqrt: bool = True  # ρₜ = min(lr, 1/√t)
    relative: bool = True  # α = max(ε₂, RMS(X))·ρ
    cap: float = 1.0  # of β̂₂ₜ = 1 − t^−0.8
    beta1: float = 0.0
    clip: float = 1.0

    def __call__(self, x: Array, grads: Sequence[Array], unit: float) -> Array:
        """All steps."""
        pair = factored_axes(x.shape, self.axes, self.least)
        r: Array = 0.0
        c: Array = 0.0
        v: Array = 0.0
        m: Array = 0.0
        for t, g in enumerate(grads, start=1):
            rho = min(self.lr, 1 / math.sqrt(t)) if self.rsqrt else self.lr
            alpha = max(1e-3, rms(x)) * rho if self.relative else rho
            b = min(self.cap, 1 - t**-0.8)
            q = g**2 + 1e-30
            if pair is None:
                v = b * v + (1 - b) * q
                u = g / v**0.5
            else:
                row, col = pair
                r = b * r + (1 - b) * q.mean(col, keepdims=True)
                c = b * c + (1 - b) * q.mean(row, keepdims=True)
                u = g / ((r / r.mean(row, keepdims=True)) ** 0.5 * c**0.5)
            change = alpha * u / max(1.0, rms(u) / self.clip)
            if self.beta1:
                m = self.beta1 * m + (1 - self.beta1) * change
                change = m
            x = x - change
        return x


@dataclass(frozen=True)
class TorchFactored:
    """torch.optim.Adafactor: no ε₁ in the statistics, but machine epsilon as a bound under them; the last two axes."""

    lr: float = 1e-2

    def __call__(self, x: Array, grads: Sequence[Array], unit: float) -> Array:
        """All steps."""
        r: Array = 0.0
        c: Array = 0.0
        v: Array = 0.0
        for t, g in enumerate(grads, start=1):
            alpha = max(1e-3, rms(x)) * min(self.lr, 1 / math.sqrt(t))
            b = 1 - t**-0.8
            if x.ndim > 1:
                r = b * r + (1 - b) * (g**2).mean(-1, keepdims=True)
                c = b * c + (1 - b) * (g**2).mean(-2, keepdims=True)
                estimate = r * c / r.mean(-2, keepdims=True).clip(min=unit)
            else:
                estimate = v = b * v + (1 - b) * g**2
            u = g / estimate.clip(min=unit**2) ** 0.5
            x = x - alpha * u / max(1.0, rms(u))
        return x


def factored_axes(shape: tuple[int, ...], rule: str, least: int) -> tuple[int, int] | None:
    """The two axes that a rule factors in a tensor of this shape, or None where it keeps the whole."""
    n = len(shape)
    if n < 2:
        return None
    second, largest = sorted(range(n), key=lambda axis: shape[axis])[-2:]
    last = (n - 2, n - 1)
    pairs = {"last": [last], "largest": [(second, largest)], "channels": [(0, 1), last]}
    for row, col in pairs[rule]:
        if min(shape[row], shape[col]) >= least:
            return row, col
    return None


FORMULAS: dict[str, Formula] = {
    "sgd": SGD(),
    **dict.fromkeys(("adamw-fused", "adamw-foreach", "adamw-loop"), AdamW()),
    **dict.fromkeys(("torch-loop", "torch-foreach"), TorchFactored()),
    "transformers": Factored("last"),
    "timm": Factored("channels", 17),
    "timm-bv": Factored("largest", 16, rsqrt=False, relative=False, cap=0.999),
    "pytorch-optimizer": Factored("last", cap=0.999),
    "optax": Factored("largest", 128),
    **dict.fromkeys(("eager", "cpu", "triton", "cpu-stochastic", "triton-stochastic"), Factored()),
    **dict.fromkeys(
        (f"{backend}-momentum{key}" for backend in ("cpu", "triton") for key in ("", "-bfloat16", "-int8")),
        Factored(beta1=0.9),
    ),
}


def check(contender: Contender, dtype: str, device: torch.device | None = None) -> Checked:
    """Take five steps on a few shapes and compare each parameter with the formula in float64."""
    formula = FORMULAS.get(contender.key)
    if formula is None:
        return Checked(contender.key, dtype, None, None)
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(0)
    # in bfloat16 from zero: elsewhere the rounding of X alone would hide the update
    start = [torch.randn(s, generator=generator).mul(0.1 if dtype == "float32" else 0.0) for s in SHAPES]
    grads = [[_gradient(shape, size, generator).to(kind) for shape in SHAPES] for size in SIZES]
    params = [torch.nn.Parameter(x.to(device, kind, copy=True)) for x in start]
    runner = None
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(device, copy=True)
        runner = runner or contender.make(params)
        runner.read_gradients()
        runner.step()
    assert runner is not None
    error = 0.0
    for i, x in enumerate(runner.values()):
        x0 = start[i].to(kind).double()
        history = [step[i].double().numpy() for step in grads]
        exact = torch.from_numpy(formula(x0.numpy(), history, torch.finfo(kind).eps))
        deviation = (x.double().cpu() - exact).abs().max() / (exact - x0).abs().max()
        error = max(error, float(deviation.nan_to_num(float("inf"))))
    tolerance = ROUNDED if contender.key.endswith(("-bfloat16", "-int8")) else TOLERANCE[dtype]
    return Checked(contender.key, dtype, error, error <= tolerance)


def _gradient(shape: tuple[int, ...], size: float, generator: torch.Generator) -> torch.Tensor:
    """Rows of different sizes: a factor that is dropped or taken along the wrong axis shows."""
    rows = torch.arange(1, shape[0] + 1).sqrt().reshape(-1, *[1] * (len(shape) - 1))
    columns = torch.arange(1, shape[-1] + 1).rsqrt()
    return 1e-2 * size * rows * columns * torch.randn(shape, generator=generator)
