"""A setting of the bill: an optimizer, the precision it trains in, and what both need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adafactor.shapes import Shape

FLOAT, SHORT = torch.float32, torch.bfloat16
ADAMW = ("fused", "foreach", "loop")

Cut = tuple[Shape, Shape]  # a parameter's shape, and that of the part which is on one device


@dataclass(frozen=True)
class Kept:
    """Bytes that one parameter's state takes from step to step."""

    statistics: int
    momentum: int = 0
    rounding: int = 0


@dataclass(frozen=True)
class Situation:
    """Where and how the step runs."""

    device: str = "cpu"  # our compiled step is for the CPU; everywhere else ours is plain torch in blocks
    adamw: str = "fused"


@dataclass(frozen=True)
class Setting:
    """An optimizer with the precision that it trains in."""

    key: str
    label: str
    dtype: torch.dtype  # of the weights and their gradients
    keeps: Callable[[Cut], Kept]
    holds: Callable[[Sequence[Cut], Situation], int]  # the most that exists beyond all else at one time in a step
    master: bool = False  # a float32 copy of the weights, which is what the optimizer steps
    in_backward: bool = False  # a gradient is freed as soon as its parameter has stepped
    unsharded: str = ""  # why it cannot step sharded parameters
    shares: Callable[[Sequence[Cut]], int] = lambda cuts: 0  # bytes that all parameters' states have in common
