"""What each optimizer keeps for a parameter and holds during a step, and all settings that a plan compares.

Temporaries of other optimizers follow their code line by line: what an expression makes while its operands live, and
what a loop's variables still hold from the parameter before. All were measured (docs/plan.md). Ours are those of the
compiled step on a CPU, and of plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from adafactor.core.dtensor import drop
from adafactor.core.factoring import STEP_DTYPE, find_factoring
from adafactor.kernels import memory_order as memory_order
from adafactor.kernels.eager.blocks import BLOCK_DEVICE
from adafactor.planning.shapes import Shape

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
    """Where and how training runs."""

    device: str = "cpu"  # our compiled step is for the CPU; everywhere else ours is plain torch in blocks
    adamw: str = "fused"
    batch: int = 0  # sequences on each device; 0: activations are not counted
    tokens: int = 0  # of each sequence
    checkpointing: bool = False
    lora: int = 0  # the rank; 0: all weights are trained


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
    keywords: str | None = None  # of our optimizer, as they are written; None for the others


# ---- other optimizers -----------------------------------------------------------------------------------------------

TORCH_STEP = 4  # bytes: torch's optimizers count steps in a float32 tensor


def adamw_keeps(dtype: torch.dtype) -> Callable[[Cut], Kept]:
    """Both averages are in the parameter's dtype."""

    def keeps(cut: Cut) -> Kept:
        count = prod(cut[1])
        return Kept(count * dtype.itemsize + TORCH_STEP, count * dtype.itemsize)

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
        return Kept(_last_two(cut[1]) * dtype.itemsize + TORCH_STEP)

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


# ---- ours -----------------------------------------------------------------------------------------------------------


def ours(key: str, label: str, dtype: torch.dtype, momentum: bool = False, rounding: str = "nearest") -> Setting:
    """One of our modes."""

    def keeps(cut: Cut) -> Kept:
        count = prod(cut[1])
        return Kept(
            factors(cut) * FLOAT.itemsize + STEP_DTYPE.itemsize,
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
    written = [', rounding="' + rounding + '"'] * (rounding != "nearest") + [", beta1=0.9"] * momentum
    return Setting(
        key, label, dtype, keeps, holds, in_backward=in_backward, unsharded=reason, keywords="".join(written)
    )


def factors(cut: Cut) -> int:
    """The elements of our statistics on one device: the whole decides what is factored, a cut axis is cut in both."""
    whole, part = cut
    shapes = find_factoring(whole, "outer")
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
    """The bytes that the compiled step reserves for a contiguous parameter (`memory_order.scratch_lengths`)."""
    shapes, part = find_factoring(cut[0], "outer"), cut[1]
    strides = tuple(prod(part[axis + 1 :]) for axis in range(len(part)))
    if shapes.row_axis is None or shapes.col_axis is None:
        order = memory_order.flat_order(part, strides, strides)
    else:
        order = memory_order.factored_order(part, strides, strides, shapes.row_axis, shapes.col_axis)
    assert isinstance(order, memory_order.MemoryOrder)  # there is a way through every contiguous tensor
    return 8 * order.scratch


RAISES = "it raises on sharded matrices"

SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("adamw-float32", "AdamW, float32", FLOAT, adamw_keeps(FLOAT), adamw_holds(FLOAT)),
        Setting("adamw-mixed", "AdamW, mixed precision", SHORT, adamw_keeps(FLOAT), mixed_holds, master=True),
        Setting("adamw-bfloat16", "AdamW, bfloat16", SHORT, adamw_keeps(SHORT), adamw_holds(SHORT)),
        Setting("adamw-8bit", "AdamW 8-bit, float32", FLOAT, adamw_8bit_keeps, nothing_held, shares=adamw_8bit_shares),
        Setting(
            "adamw-8bit-bfloat16",
            "AdamW 8-bit, bfloat16",
            SHORT,
            adamw_8bit_keeps,
            nothing_held,
            shares=adamw_8bit_shares,
        ),
        Setting(
            "torch-float32",
            "torch.optim.Adafactor, float32",
            FLOAT,
            torch_keeps(FLOAT),
            torch_holds(FLOAT),
            unsharded=RAISES,
        ),
        Setting(
            "torch-bfloat16",
            "torch.optim.Adafactor, bfloat16",
            SHORT,
            torch_keeps(SHORT),
            torch_holds(SHORT),
            unsharded=RAISES,
        ),
        Setting(
            "transformers-float32",
            "transformers' Adafactor, float32",
            FLOAT,
            transformers_keeps,
            transformers_holds(FLOAT),
            unsharded=RAISES,
        ),
        Setting(
            "transformers-bfloat16",
            "transformers' Adafactor, bfloat16",
            SHORT,
            transformers_keeps,
            transformers_holds(SHORT),
            unsharded=RAISES,
        ),
        ours("adafactor-float32", "adafactor, float32", FLOAT),
        ours("adafactor-float32-momentum", "adafactor, float32, momentum", FLOAT, momentum=True),
        ours("adafactor-bfloat16", "adafactor, bfloat16", SHORT),
        ours("adafactor-stochastic", "adafactor, bfloat16, stochastic", SHORT, rounding="stochastic"),
        ours("adafactor-stochastic-momentum", "adafactor, bfloat16, stochastic, momentum", SHORT, True, "stochastic"),
        ours("adafactor-kahan", "adafactor, bfloat16, kahan", SHORT, rounding="kahan"),
        ours("adafactor-backward", "adafactor, bfloat16, stochastic, in backward", SHORT, rounding="stochastic"),
    )
}
