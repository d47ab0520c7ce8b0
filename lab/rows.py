"""The rows of the paper's Table 2 as data, with the paper's BLEU beside them, and the step-size schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from adafactor import Adafactor, recipes

DIVERGED = math.nan  # where the paper prints "diverged"


@dataclass(frozen=True)
class Row:
    """One optimizer setting; the two last fields are the paper's BLEU with and without warm-up."""

    name: str
    factored: str | bool = False
    beta1: float = 0.0
    momentum: str = "gradient"
    beta2: float | None = 0.999  # None: 1 − t^−decay_rate
    decay_rate: float = 0.8
    clip: float | None = None
    step: str = "absolute"  # α = 0.1·s; "relative": ρ = s; "sgd": lr = scale·s; "2017": as Vaswani et al. have it
    scale: float = 0.1
    warm: float = DIVERGED
    cold: float = DIVERGED

    def describe(self) -> str:
        """The row in a few words."""
        if self.step == "sgd":
            return f"SGD, lr = {self.scale:g}·s"
        second = f"β₂ = {self.beta2:g}" if self.beta2 is not None else f"β₂ = 1 − t^−{self.decay_rate:g}"
        words = [{"outer": "factored", "row": "row mean", "column": "column mean"}.get(str(self.factored), "")]
        words += [f"β₁ = {self.beta1:g}" if self.beta1 else "", second]
        words += [
            f"clip {self.clip:g}" if self.clip else "",
            "relative step" if self.step == "relative" else "",
        ]
        return ", ".join(word for word in words if word)


def _of_the_paper(name: str, warm: float, cold: float) -> Row:
    """One of rows A to P, with its keywords as the package has them."""
    keywords = recipes.TABLE_2[name]
    return Row(
        name,
        factored=keywords["factored"],
        beta1=keywords.get("beta1", 0.0),
        momentum=keywords.get("momentum_of", "gradient"),
        beta2=keywords.get("beta2"),
        decay_rate=keywords.get("decay_rate", 0.8),
        clip=keywords["clip"],
        step="relative" if keywords["relative"] else "absolute",
        scale=keywords["lr"],
        warm=warm,
        cold=cold,
    )


# The paper's BLEU with warm-up and without.
BLEU = {
    "A": (25.6, 0.1), "B": (25.4, 23.1), "C": (25.4, 0.2), "D": (25.2, 0.3), "E": (0.3, 0.5), "F": (25.0, 0.4),
    "G": (18.4, 15.6), "H": (25.4, 21.5), "I": (25.7, 0.2), "J": (25.6, 22.4), "K": (25.6, 21.1), "L": (25.6, 0.1),
    "M": (25.4, 0.1), "N": (25.9, 22.4), "O": (25.0, 25.5), "P": (24.9, 25.3),
}  # fmt: skip
TABLE_2 = (
    *(_of_the_paper(name, *bleu) for name, bleu in BLEU.items()),
    Row("Q1", step="sgd", scale=1.0, warm=0.6, cold=0.8),
    Row("Q10", step="sgd", scale=10.0, warm=8.2, cold=9.1),
    *(Row(f"Q{rate}", step="sgd", scale=float(rate), warm=bleu)
      for rate, bleu in ((100, 22.9), (150, 24.0), (200, 24.3), (300, DIVERGED))),
)  # fmt: skip
# Table 3's Adam: the second-moment decay of Vaswani et al. (2017); at the paper's own scale also their step size.
ADAM = Row("Adam", beta1=0.9, beta2=0.98)
ADAM_2017 = Row("Adam2017", beta1=0.9, beta2=0.98, step="2017", scale=1.0)
# A with a window of 160 steps: the flat phase of `deep` is ten times as long, as in the paper.
A_SHORT = Row("A160", beta2=0.99375)
ROWS = {row.name: row for row in (*TABLE_2, ADAM, ADAM_2017, A_SHORT)}

# Table 3: embedding scheme → the paper's BLEU with Adam and with Adafactor.
TABLE_3 = {"scaled": (26.4, 26.6), "unit": (25.8, 26.4), "plain": (24.2, 25.4)}

PAPER_STEPS = 100_000


def schedule(step: int, steps: int, warmup: bool) -> float:
    """The paper's sₜ, compressed in time from 100,000 steps to `steps`; `step` counts from 1.

    With warm-up min(10⁻⁶·t, 1/√t), without min(10⁻², 1/√t): in both the knee is at a tenth of the run.
    """
    t = step * PAPER_STEPS / steps
    return min(1e-6 * t if warmup else 1e-2, 1 / math.sqrt(t))


def schedule_2017(t: int, width: int, warmup: int = 4000) -> float:
    """The step size of Vaswani et al. (2017, equation 3), for a model of this width."""
    return float(width**-0.5 * min(t**-0.5, t * warmup**-1.5))


def make_optimizer(row: Row, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer of a row; its learning rate is set before every step."""
    if row.step == "sgd":
        return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.0)
    return Adafactor(
        parameters,
        lr=1.0,
        lr_decay=None,
        relative=row.step == "relative",
        factored=row.factored,
        beta1=row.beta1,
        momentum_of=row.momentum,
        beta2=row.beta2,
        decay_rate=row.decay_rate,
        clip=row.clip,
        on_nonfinite="ignore",  # the lab wants to see a divergence, not to survive it
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors the optimizer keeps."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
