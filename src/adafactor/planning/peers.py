"""What other optimizers keep for a parameter and hold during a step.

Temporaries follow the peers' code line by line: what an expression makes while its operands live, and what a loop's
variables still hold from the parameter before. All were measured (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from adafactor.dtensor import drop
from adafactor.planning.setting import FLOAT, Cut, Kept, Situation
from adafactor.shapes import Shape

STEP = 4  # bytes: torch's optimizers count steps in a float32 tensor


def adamw_keeps(dtype: torch.dtype) -> Callable[[Cut], Kept]:
    """Both averages are in the parameter's dtype."""

    def keeps(cut: Cut) -> Kept:
        count = prod(cut[1])
        return Kept(count * dtype.itemsize + STEP, count * dtype.itemsize)

    return keeps


def adamw_holds(dtype: torch.dtype) -> Callable[[Sequence[Cut], Situation], int]:
    """Fused: nothing. foreach: √v of all parameters. Loop: √v and √v/√(1 − β₂ᵗ), and the latter of the one before."""

    def holds(cuts: Sequence[Cut], situation: Situation) -> int:
        sizes = [prod(part) * dtype.itemsize for _, part in cuts]
        if situation.adamw == "loop":
            return in_turn(sizes, 2)
        return sum(sizes) if situation.adamw == "foreach" else 0

    return holds


def mixed_holds(cuts: Sequence[Cut], situation: Situation) -> int:
    """One parameter at a time: its gradient in float32, and what AdamW holds."""
    copies = {"fused": 1, "foreach": 2, "loop": 3}[situation.adamw]
    return max(copies * prod(part) * FLOAT.itemsize for _, part in cuts)


BITS_BLOCK, BITS_LEAST = 256, 4096  # elements that share a scale; elements from which a tensor is kept in 8 bits


def adamw_8bit_keeps(cut: Cut) -> Kept:
    """Of bitsandbytes: a byte for each average and a float32 for each block of them; small tensors stay in float32."""
    count = prod(cut[1])
    one = count + 4 * -(-count // BITS_BLOCK) if count >= BITS_LEAST else 4 * count
    return Kept(one, one)


def adamw_8bit_shares(cuts: Sequence[Cut]) -> int:
    """What the 256 values of a byte stand for, in float32, for each of the averages."""
    return 2 * 256 * FLOAT.itemsize if any(prod(part) >= BITS_LEAST for _, part in cuts) else 0


def nothing_held(cuts: Sequence[Cut], situation: Situation) -> int:
    """A kernel that works in place."""
    return 0


def torch_keeps(dtype: torch.dtype) -> Callable[[Cut], Kept]:
    """Of torch.optim.Adafactor: factors over the last two axes, in the gradient's dtype."""

    def keeps(cut: Cut) -> Kept:
        return Kept(_last_two(cut[1]) * dtype.itemsize + STEP)

    return keeps


def torch_holds(dtype: torch.dtype) -> Callable[[Sequence[Cut], Situation], int]:
    """Of torch.optim.Adafactor: V̂, which becomes the update, and the last parameter's; for vectors also G²."""

    def holds(cuts: Sequence[Cut], situation: Situation) -> int:
        most = update = squared = 0
        for _, part in cuts:
            size = prod(part) * dtype.itemsize
            most = max(most, update + squared + size)
            if len(part) < 2:
                most, squared = max(most, update + 2 * size), size
            update = size
        return most

    return holds


def transformers_keeps(cut: Cut) -> Kept:
    """Of transformers' Adafactor: float32 factors over the last two axes, and RMS(X) as a tensor."""
    return Kept(_last_two(cut[1]) * FLOAT.itemsize + FLOAT.itemsize)


def transformers_holds(dtype: torch.dtype) -> Callable[[Sequence[Cut], Situation], int]:
    """Of transformers' Adafactor: G² and G² + ε₁, the last update; for 16 bits also G and X, all in float32."""

    def holds(cuts: Sequence[Cut], situation: Situation) -> int:
        return in_turn([prod(part) * FLOAT.itemsize for _, part in cuts], 2 if dtype == FLOAT else 4)

    return holds


def in_turn(sizes: Sequence[int], copies: int) -> int:
    """The peak of a loop that makes so many copies of a tensor while its variable still holds one of the last's."""
    before = [0, *sizes[:-1]]
    return max(copies * size + last for size, last in zip(sizes, before, strict=True))


def _last_two(shape: Shape) -> int:
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(drop(shape, len(shape) - 2))
