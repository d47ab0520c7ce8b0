"""Runs `Adafactor` and the oracle over the same gradients and measures how far apart they end.

`python -m tests.compare` prints the oracle table of the docs: rows of Table 2 × shapes × dtypes, largest error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LambdaLR

from adafactor import Adafactor, schedules
from tests import oracle
from tests.cases import Case

SHAPES = {
    "tall": (37, 5),
    "wide": (5, 37),
    "1×m": (1, 23),
    "n×1": (23, 1),
    "vector": (31,),
    "scalar": (),
}
# In a few steps, which are all that Triton's interpreter is given, a parameter does not go far beside its last digit.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def arguments(row: oracle.Row) -> dict[str, Any]:
    """The keywords of `Adafactor` that are this row of Table 2; the schedule is the caller's."""
    return {
        "lr": row.multiplier,
        "lr_decay": None,
        "relative": row.relative,
        "factored": False if row.estimator == "none" else row.estimator,
        "beta1": row.beta1,
        "momentum_of": row.momentum,
        "beta2": row.beta2,
        "decay_rate": row.c,
        "beta2_max": row.beta2_max,
        "clip": row.d,
        "eps": (row.eps1, row.eps2),
        "weight_decay": row.weight_decay,
        "weight_decay_by": row.decay_by,
        "axes": row.axes,
        "min_factored": row.min_factored,
        "per_slice": row.per_slice,
    }


def start(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The parameter that every case begins with."""
    return Case("", shape).start().detach().double().numpy()


def gradients(shape: tuple[int, ...], steps: int) -> list[NDArray[np.float64]]:
    """Gradients that float32 holds exactly, of uneven scale over rows, columns and time."""
    return [Case("", shape).gradient(t).double().numpy() for t in range(1, steps + 1)]


def trained(
    row: oracle.Row,
    x: NDArray[np.float64],
    grads: list[NDArray[np.float64]],
    s: Callable[[int], float],
    dtype: torch.dtype = torch.float64,
    **keywords: Any,
) -> torch.Tensor:
    """The parameter after `Adafactor` has seen the gradients."""
    p = torch.nn.Parameter(torch.tensor(x, dtype=dtype))
    optimizer = Adafactor([p], **{**arguments(row), **keywords})
    schedule = LambdaLR(optimizer, lambda epoch: s(epoch + 1))
    for g in grads:
        p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        schedule.step()
    return p.detach()


def error(
    row: oracle.Row,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    steps: int = 60,
    s: Callable[[int], float] = schedules.without_warmup,
    **keywords: Any,
) -> float:
    """Largest deviation from the oracle, as a share of the distance that the parameter has travelled."""
    x, grads = start(shape), gradients(shape, steps)
    path = oracle.run(row, x, grads, s).x
    travelled = sum(np.abs(b - a).max() for a, b in zip(path, path[1:], strict=False))
    ours = trained(row, x, grads, s, dtype, **keywords).double().numpy()
    return float(np.abs(ours - path[-1]).max() / travelled)


def main() -> None:
    """Print the oracle table."""
    for dtype in TOLERANCE:
        print(f"\n{dtype}, 60 steps, largest error relative to the distance travelled\n")
        print("| row | " + " | ".join(SHAPES) + " |\n|---|" + "---|" * len(SHAPES))
        for name, row in oracle.TABLE_2.items():
            print(f"| {name} | " + " | ".join(f"{error(row, shape, dtype):.0e}" for shape in SHAPES.values()) + " |")


if __name__ == "__main__":
    main()
