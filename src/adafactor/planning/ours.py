"""What our optimizer keeps for a parameter and holds during a step, on a CPU (compiled) and elsewhere (plain torch)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from adafactor.dtensor import drop
from adafactor.kernels import walk_order
from adafactor.kernels.eager.blocks import BLOCK_DEVICE
from adafactor.layout import STEP_DTYPE, layout
from adafactor.planning.setting import FLOAT, SHORT, Cut, Kept, Setting, Situation

STEP = STEP_DTYPE.itemsize


def ours(key: str, label: str, dtype: torch.dtype, momentum: bool = False, rounding: str = "nearest") -> Setting:
    """One of our modes."""

    def keeps(cut: Cut) -> Kept:
        count = prod(cut[1])
        return Kept(
            factors(cut) * FLOAT.itemsize + STEP,
            count * FLOAT.itemsize if momentum else 0,
            count * dtype.itemsize if rounding == "kahan" else 0,
        )

    def holds(cuts: Sequence[Cut], situation: Situation) -> int:
        # one parameter after the other, but sharded ones are on their way all at once
        vectors = sum if any(whole != part for whole, part in cuts) else max
        if situation.device == "cpu":
            return vectors(map(compiled_vectors, cuts))
        block = max(min(prod(part), BLOCK_DEVICE) for _, part in cuts) * BLOCK_BYTES[dtype, rounding]
        return block + vectors(12 * factors(one) for one in cuts)  # means in double, scales in float32

    in_backward = key.endswith("backward")
    reason = "sharded parameters step together, not inside backward" if in_backward else ""
    return Setting(key, label, dtype, keeps, holds, in_backward=in_backward, unsharded=reason)


def factors(cut: Cut) -> int:
    """The elements of our statistics on one device: the whole decides what is factored, a cut axis is cut in both."""
    whole, part = cut
    shapes = layout(whole, "outer")
    if shapes.row_axis is None or shapes.col_axis is None:
        return prod(part)
    return prod(drop(part, shapes.col_axis)) + prod(drop(part, shapes.row_axis))


# bytes for each element of the block that plain torch works on: room to compute in and for a converted copy, random
# numbers on their way, what rounding took away
BLOCK_BYTES = {
    (FLOAT, "nearest"): 4,
    (SHORT, "nearest"): 8,
    (SHORT, "stochastic"): 32,
    (SHORT, "kahan"): 19,
}


def compiled_vectors(cut: Cut) -> int:
    """The bytes that the compiled step reserves for a contiguous parameter: `walk_order.scratch_lengths` lists them."""
    shapes, part = layout(cut[0], "outer"), cut[1]
    strides = tuple(prod(part[axis + 1 :]) for axis in range(len(part)))
    if shapes.row_axis is None or shapes.col_axis is None:
        order = walk_order.flat_order(part, strides, strides)
    else:
        order = walk_order.factored_order(part, strides, strides, shapes.row_axis, shapes.col_axis)
    assert isinstance(order, walk_order.WalkOrder)  # there is a way through every contiguous tensor
    return 8 * order.scratch
