"""Compares X and the state of a tensor with what they should be: to the bit, or as near as rounding leaves them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adafactor.core import momentum
from adafactor.core.rounding import SIXTEEN_BIT

State = dict[str, Tensor]  # X, and what the optimizer keeps for it
Wrong = tuple[str, str]  # what is not as it should be; the first wrong element, and what computes it
# Largest deviation of X from `eager`, relative to the distance travelled: what rounding leaves, far below any mistake.
TOLERANCE, TOLERANCE_FLOAT64 = 1e-4, 1e-9
MOMENTUM = (*momentum.BUFFERS, "momentum_scale")
SHORT = (torch.bfloat16, torch.int8)  # of a momentum
PASSES = {"row": "first pass", "col": "reduction of the columns"}  # where a number is computed; others in the last pass


def change(expected: State, actual: State, when: str = "") -> Wrong | None:
    """Say what is not the same to the bit, and where; None if all is."""
    wrong = {name: _bits(expected[name]) != _bits(actual[name]) for name in expected}
    names = [name for name, elements in wrong.items() if bool(elements.any())]
    if not names:
        return None
    first = _first_wrong(names[0], wrong[names[0]], actual[names[0]], expected[names[0]])
    return f"{' and '.join(names)} changed{when}", first


def _bits(t: Tensor) -> Tensor:
    """View numbers as integers: NaN is equal to itself, and the zeros differ."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.itemsize]) if t.is_floating_point() else t


def deviation(ours: State, eager: State, distance: float) -> Wrong | None:
    """Say how X or the state differs by more than rounding leaves, and where; None if it does not."""
    if not torch.equal(ours["step"], eager["step"]):
        return f"t is {float(ours['step']):g}, not {float(eager['step']):g}", ""
    tolerance = TOLERANCE_FLOAT64 if eager["X"].dtype == torch.float64 else TOLERANCE
    for name in [name for name in ("X", "row", "col", "full", *MOMENTUM) if name in eager]:
        a, b = ours[name].double(), eager[name].double()
        # relative to what: means one by one, as they differ by orders of magnitude
        sizes: dict[str, float | Tensor] = {"X": distance}
        if name in momentum.BUFFERS:
            sizes[name] = momentum.MOST if eager[name].dtype == torch.int8 else b.abs().max()
        size = sizes.get(name, b.abs())
        error = (a - b).abs()
        too_far = ~(error <= tolerance * size * (1 if name == "X" else 2))  # also where it is NaN
        if int(too_far.sum()) <= 2 + b.numel() // 200:
            too_far &= ~((error > 0) & (error <= _grain(name, eager, size)))
        if bool(too_far.any()):
            worst = float((error / size).nan_to_num(nan=math.inf).max())
            what = "X" if name == "X" else f"state {name!r}"
            of = " of the distance travelled" if name == "X" else ""
            count = f"in {int(too_far.sum())} of {b.numel()} elements"
            return f"{what} is off by {worst:.0e}{of}, {count}", _first_wrong(name, too_far, a, b)
    return None


def _grain(name: str, state: State, size: float | Tensor) -> float | Tensor:
    """Return how far apart numbers may be, seldom: near the border of two of its format, one may be rounded either way.

    A momentum in bfloat16 or int8 that was rounded to a neighbour moves X by a part of a hundredth.
    """
    x, is_coarse = state["X"], any(state[key].dtype in SHORT for key in MOMENTUM if key in state)
    grain: float | Tensor = size / 50 if is_coarse and name in ("X", *MOMENTUM) else 0.0
    if name == "X" and x.dtype in SIXTEEN_BIT:  # in every step once
        info = torch.finfo(x.dtype)
        grain = grain + (int(state["step"]) + 0.01) * info.eps * (x.double().abs() + info.tiny)
    return grain


def _first_wrong(name: str, wrong: Tensor, actual: Tensor, expected: Tensor) -> str:
    """Name the first wrong element, both numbers, and the pass that computes it."""
    place = tuple(wrong.nonzero()[0].tolist())
    index = f"{name}[{', '.join(map(str, place))}]" if place else name
    computed = PASSES.get(name, "last pass")
    return f"{index} is {actual[place].item():.9g}, not {expected[place].item():.9g}; computed in the {computed}"
