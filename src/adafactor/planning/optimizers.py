"""The memory of each optimizer's state and step, and the settings that a plan compares.

Temporaries of other optimizers follow their code line by line: what an expression makes while its operands live, and
what a loop's variables still hold from the parameter before. All were measured (docs/plan.md). Ours are those of the
compiled step on a CPU, and of eager PyTorch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from adafactor.core.factoring import STEP_DTYPE, Factored, drop, find_factoring
from adafactor.kernels import memory_order
from adafactor.kernels.eager.blocks import BLOCK_DEVICE, ROUNDED
from adafactor.planning.models import Shape

FLOAT, SHORT = torch.float32, torch.bfloat16
ADAMW_VARIANTS = ("fused", "foreach", "loop")
TORCH_STEP = 4  # bytes: torch's optimizers count steps in a float32 tensor
BITS_BLOCK, BITS_LEAST = 256, 4096  # elements that share a scale; elements from which a state takes 8 bits
# bytes for each element of the block that eager PyTorch works on: room to compute in and for a converted copy, random
# numbers on their way, what rounding took away
BLOCK_BYTES = {
    (FLOAT, "nearest"): 4,
    (SHORT, "nearest"): 8,
    (SHORT, "stochastic"): 32,
    (SHORT, "kahan"): 19,
}


class Shard(NamedTuple):
    """The shape of a parameter, and that of the part which is on one device."""

    whole: Shape
    part: Shape


class StateBytes(NamedTuple):
    """The bytes that one parameter's state takes from step to step."""

    statistics: int
    momentum: int = 0
    rounding: int = 0


@dataclass(frozen=True)
class Situation:
    """Where and how training runs."""

    device: str = "cpu"  # our compiled step is for the CPU; everywhere else ours is eager PyTorch in blocks
    adamw: str = "fused"
    batch: int = 0  # sequences on each device; 0: activations are not counted
    tokens: int = 0  # of each sequence
    checkpointing: bool = False
    lora: int = 0  # the rank; 0: all weights are trained


@dataclass(frozen=True)
class Setting:
    """An optimizer with the precision that it trains in."""

    key: str
    optimizer: Optimizer
    dtype: torch.dtype  # of the weights and their gradients
    master: bool = False  # a float32 copy of the weights, which is what the optimizer steps
    momentum: bool = False  # of ours, as the next two; AdamW has it anyway
    rounding: str = "nearest"
    in_backward: bool = False  # a gradient is freed as soon as its parameter has stepped

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [self.optimizer.name, "mixed precision" if self.master else str(self.dtype).removeprefix("torch.")]
        words += [self.rounding] * (self.rounding != "nearest")
        return ", ".join(words + ["momentum"] * self.momentum + ["in backward"] * self.in_backward)

    @property
    def stepped_dtype(self) -> torch.dtype:
        """The dtype of the tensors that the optimizer is given."""
        return FLOAT if self.master else self.dtype

    @property
    def unsharded(self) -> str:
        """Why it cannot step sharded parameters; empty if it can."""
        in_backward = "sharded parameters step together, not inside backward"
        return in_backward if self.in_backward else self.optimizer.unsharded

    @property
    def keywords(self) -> str | None:
        """The keywords of our optimizer, as they are written; None for the others."""
        if self.optimizer is not ADAFACTOR:
            return None
        rounding = "" if self.rounding == "nearest" else f', rounding="{self.rounding}"'
        return rounding + (", beta1=0.9" if self.momentum else "")


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer needs beside weights and gradients, in bytes."""

    name: str
    state: Callable[[Setting, Shard], StateBytes]  # of one parameter
    temporary: Callable[[Setting, Sequence[Shard], Situation], int]  # the most beyond all else at one time in a step
    shared: Callable[[Sequence[Shard]], int] = lambda shards: 0  # what the states of all parameters have in common
    unsharded: str = ""  # why it cannot step sharded parameters


def _adamw_state(setting: Setting, shard: Shard) -> StateBytes:
    """Both averages are in the parameter's dtype."""
    size = prod(shard.part) * setting.stepped_dtype.itemsize
    return StateBytes(size + TORCH_STEP, size)


def _adamw_temporary(setting: Setting, shards: Sequence[Shard], situation: Situation) -> int:
    """Fused: nothing. foreach: √v of all parameters. Loop: √v and √v/√(1 − β₂ᵗ), and the latter of the one before.

    With a master copy one parameter steps at a time, and has its gradient in float32 besides.
    """
    sizes = [prod(shard.part) * setting.stepped_dtype.itemsize for shard in shards]
    if setting.master:
        return {"fused": 1, "foreach": 2, "loop": 3}[situation.adamw] * max(sizes)
    if situation.adamw == "loop":
        return _in_turn(sizes, 2)
    return sum(sizes) if situation.adamw == "foreach" else 0


def _adamw_8bit_state(setting: Setting, shard: Shard) -> StateBytes:
    """A byte for each average and a float32 for each block of them; small tensors stay in float32 (bitsandbytes)."""
    count = prod(shard.part)
    size = count + 4 * -(-count // BITS_BLOCK) if count >= BITS_LEAST else 4 * count
    return StateBytes(size, size)


def _adamw_8bit_shared(shards: Sequence[Shard]) -> int:
    """What the 256 values of a byte stand for, in float32, for each of the averages."""
    return 2 * 256 * FLOAT.itemsize if any(prod(shard.part) >= BITS_LEAST for shard in shards) else 0


def _torch_state(setting: Setting, shard: Shard) -> StateBytes:
    """Factors over the last two axes, in the gradient's dtype."""
    return StateBytes(_last_two(shard.part) * setting.dtype.itemsize + TORCH_STEP)


def _torch_temporary(setting: Setting, shards: Sequence[Shard], situation: Situation) -> int:
    """V̂, which becomes the update, and the last parameter's; for vectors also G²."""
    most = update = squared = 0
    for _, part in shards:
        size = prod(part) * setting.dtype.itemsize
        most = max(most, update + squared + size)
        if len(part) < 2:
            most, squared = max(most, update + 2 * size), size
        update = size
    return most


def _transformers_state(setting: Setting, shard: Shard) -> StateBytes:
    """Float32 factors over the last two axes, and RMS(X) as a tensor."""
    return StateBytes(_last_two(shard.part) * FLOAT.itemsize + FLOAT.itemsize)


def _transformers_temporary(setting: Setting, shards: Sequence[Shard], situation: Situation) -> int:
    """G² and G² + ε₁, the last update; for 16 bits also G and X, all in float32."""
    return _in_turn([prod(part) * FLOAT.itemsize for _, part in shards], 2 if setting.dtype == FLOAT else 4)


def _in_turn(sizes: Sequence[int], copies: int) -> int:
    """The peak of a loop that makes so many copies of a tensor while its variable still holds one of the last's."""
    before = [0, *sizes[:-1]]
    return max(copies * size + last for size, last in zip(sizes, before, strict=True))


def _last_two(shape: Shape) -> int:
    """The number of elements of factors over the last two axes."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(drop(shape, len(shape) - 2))


def _our_state(setting: Setting, shard: Shard) -> StateBytes:
    count = prod(shard.part)
    return StateBytes(
        _our_statistics(shard) * FLOAT.itemsize + STEP_DTYPE.itemsize,
        count * FLOAT.itemsize if setting.momentum else 0,
        count * setting.dtype.itemsize if setting.rounding == "kahan" else 0,
    )


def _our_temporary(setting: Setting, shards: Sequence[Shard], situation: Situation) -> int:
    if situation.device == "cpu":  # parameters step one after the other, but sharded ones all at once
        return (sum if any(whole != part for whole, part in shards) else max)(map(compiled_vectors, shards))
    element = BLOCK_BYTES[setting.dtype, setting.rounding]
    if setting.momentum and setting.rounding == "nearest":
        element += FLOAT.itemsize  # the momentum where a step is taken, and zeros where it is not
    longest = BLOCK_DEVICE if setting.rounding == "nearest" else BLOCK_DEVICE // ROUNDED
    block = max(min(prod(part), longest) for _, part in shards) * element
    return block + 3 * 8 * sum(map(_our_statistics, shards))  # means of all, packed, and averages, in double


def _our_statistics(shard: Shard) -> int:
    """The elements on one device: the whole shape decides what is factored, a sharded axis is so in both factors."""
    factoring = find_factoring(shard.whole, "outer")
    if isinstance(factoring, Factored):
        return prod(drop(shard.part, factoring.col_axis)) + prod(drop(shard.part, factoring.row_axis))
    return prod(shard.part)


def compiled_vectors(shard: Shard) -> int:
    """The bytes that the compiled step reserves for a contiguous parameter (`MemoryOrder.lengths`)."""
    factoring, part = find_factoring(shard.whole, "outer"), shard.part
    strides = tuple(prod(part[axis + 1 :]) for axis in range(len(part)))
    if isinstance(factoring, Factored):
        order = memory_order.factored_order(part, strides, strides, factoring.row_axis, factoring.col_axis)
    else:
        order = memory_order.flat_order(part, strides, strides)
    assert isinstance(order, memory_order.MemoryOrder)  # there is a way through every contiguous tensor
    return 8 * order.scratch


RAISES = "it raises on sharded matrices"
ADAMW = Optimizer("AdamW", _adamw_state, _adamw_temporary)
ADAMW_8BIT = Optimizer("AdamW 8-bit", _adamw_8bit_state, lambda setting, shards, situation: 0, _adamw_8bit_shared)
TORCH = Optimizer("torch.optim.Adafactor", _torch_state, _torch_temporary, unsharded=RAISES)
TRANSFORMERS = Optimizer("transformers' Adafactor", _transformers_state, _transformers_temporary, unsharded=RAISES)
ADAFACTOR = Optimizer("adafactor", _our_state, _our_temporary)

SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("adamw-float32", ADAMW, FLOAT),
        Setting("adamw-mixed", ADAMW, SHORT, master=True),
        Setting("adamw-bfloat16", ADAMW, SHORT),
        Setting("adamw-8bit", ADAMW_8BIT, FLOAT),
        Setting("adamw-8bit-bfloat16", ADAMW_8BIT, SHORT),
        Setting("torch-float32", TORCH, FLOAT),
        Setting("torch-bfloat16", TORCH, SHORT),
        Setting("transformers-float32", TRANSFORMERS, FLOAT),
        Setting("transformers-bfloat16", TRANSFORMERS, SHORT),
        Setting("adafactor-float32", ADAFACTOR, FLOAT),
        Setting("adafactor-float32-momentum", ADAFACTOR, FLOAT, momentum=True),
        Setting("adafactor-bfloat16", ADAFACTOR, SHORT),
        Setting("adafactor-stochastic", ADAFACTOR, SHORT, rounding="stochastic"),
        Setting("adafactor-stochastic-momentum", ADAFACTOR, SHORT, rounding="stochastic", momentum=True),
        Setting("adafactor-kahan", ADAFACTOR, SHORT, rounding="kahan"),
        Setting("adafactor-backward", ADAFACTOR, SHORT, rounding="stochastic", in_backward=True),
    )
}
