"""The bytes that training a model takes in each setting, part by part, from shapes alone.

Temporaries of other optimizers follow their code line by line: what an expression makes while its operands live, and
what a loop's variables still hold from the parameter before. All were measured (studies/plan.py). Ours are those of the
compiled step on a CPU, and of eager PyTorch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import NamedTuple

import torch

from adafactor.core.factoring import STEP_DTYPE, Factored, drop, find_factoring
from adafactor.core.momentum import blocks_of, scale_shape
from adafactor.core.settings import Settings
from adafactor.kernels import memory_order
from adafactor.kernels.eager.blocks import BLOCK_DEVICE, ROUNDED
from adafactor.planning.models import Model, Shape, Weight

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
# the same where the momentum is rounded, by the rounding of the weights and the momentum's format
MOMENTUM_BYTES = {("nearest", "bfloat16"): 36, ("nearest", "int8"): 32, ("stochastic", "bfloat16"): 36}
MOMENTUM_BYTES |= {("stochastic", "int8"): 36}


@dataclass(frozen=True)
class Bytes:
    """The parts of a plan, in bytes. Activations are an estimate, and only there when a batch is given."""

    weights: int = 0
    master: int = 0  # float32 copies of 16-bit weights, which the optimizer steps
    gradients: int = 0
    statistics: int = 0  # of the gradients' squares, and the counts of steps
    momentum: int = 0
    rounding: int = 0  # Kahan's compensation
    temporary: int = 0  # the most that a step, or the sum of a tied parameter's gradients, holds for a moment
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All parts together: the peak of a training step."""
        return self.sum(PARTS)

    def sum(self, parts: tuple[str, ...]) -> int:
        """Add up some parts."""
        return sum(getattr(self, part) for part in parts)


PARTS = tuple(part.name for part in fields(Bytes))


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
class Line:
    """The memory that one setting takes."""

    key: str
    label: str
    whole: Bytes  # on one device
    device: Bytes | None  # on the fullest of them; None if the optimizer cannot step sharded parameters
    note: str = ""
    write: tuple[str, ...] = ()  # the lines of code for one of our settings

    def left(self, budget: int) -> int | None:
        """What remains of a device's memory; below zero if it is not enough, None if it cannot be sharded."""
        return None if self.device is None else budget - self.device.total


class Shard(NamedTuple):
    """The shape of a parameter, and that of the part which is on one device."""

    whole: Shape
    part: Shape


@dataclass(frozen=True)
class Setting:
    """An optimizer with the precision that it trains in."""

    key: str
    optimizer: str
    dtype: torch.dtype  # of the weights and their gradients
    master: bool = False  # a float32 copy of the weights, which is what the optimizer steps
    momentum: str | None = None  # its format; of ours, as the next two; AdamW has it anyway
    rounding: str = "nearest"
    in_backward: bool = False  # a gradient is freed as soon as its parameter has stepped

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [self.optimizer, "mixed precision" if self.master else str(self.dtype).removeprefix("torch.")]
        words += [self.rounding] * (self.rounding != "nearest")
        formats = {None: [], "float32": ["momentum"]}
        words += formats.get(self.momentum, [f"{self.momentum} momentum"])
        return ", ".join(words + ["in backward"] * self.in_backward)

    @property
    def unsharded(self) -> str:
        """Why it cannot step sharded parameters; empty if it can."""
        return "it raises on sharded matrices" if self.optimizer in (TORCH, TRANSFORMERS) else ""

    def code(self, situation: Situation, shards: int) -> tuple[str, ...]:
        """Return the lines to write for one of our settings; none for another optimizer's."""
        if self.optimizer != OURS:
            return ()
        rounding = "" if self.rounding == "nearest" else f', rounding="{self.rounding}"'
        momentum = ", beta1=0.9" if self.momentum else ""
        momentum += f', momentum_dtype="{self.momentum}"' if self.momentum in ("bfloat16", "int8") else ""
        lora = f'peft.get_peft_model(model, peft.LoraConfig(r={situation.lora}, target_modules="all-linear"))'
        lines = {
            f"model = {lora}": situation.lora > 0,
            "model.bfloat16()": self.dtype == SHORT,
            "model.gradient_checkpointing_enable()  # of transformers; else torch.utils.checkpoint": (
                situation.checkpointing
            ),
            "fully_shard(model)  # of torch.distributed.fsdp; each layer before the whole": shards > 1,
            f"optimizer = Adafactor(model.named_parameters(){rounding}{momentum})": True,
            "step_in_backward(model, optimizer)": self.in_backward,
        }
        return tuple(line for line, is_needed in lines.items() if is_needed)


def line_of(model: Model, setting: Setting, situation: Situation, shards: int) -> Line:
    """Count the bytes of one setting, on one device and on each of so many."""
    device = None if shards > 1 and setting.unsharded else _bytes(model, setting, situation, shards)
    whole = _bytes(model, setting, situation, 1) if shards > 1 or device is None else device
    note = setting.unsharded if device is None else ""
    return Line(setting.key, setting.label, whole, device, note, setting.code(situation, shards))


def _bytes(model: Model, setting: Setting, situation: Situation, count: int) -> Bytes:
    """The bytes on the first of so many devices, which has the largest part of every parameter."""
    shards = [Shard(w.shape, _part(w.shape, count)) for w in model.trained]
    own = OPTIMIZERS[setting.optimizer](setting, shards, situation)
    gradients, sums = _gradients(model, setting, count)
    activations = 0
    if positions := situation.batch * situation.tokens:
        activations = model.activations(positions, setting.dtype.itemsize, situation.checkpointing)
    return replace(
        own,
        weights=sum(
            (setting.dtype if w.dtype.is_floating_point else w.dtype).itemsize * prod(_part(w.shape, count))
            for w in model.weights
        ),
        master=FLOAT.itemsize * sum(prod(part) for _, part in shards) if setting.master else 0,
        gradients=gradients,
        temporary=max(own.temporary, sums),
        buffers=model.buffers,  # FSDP2 has a copy of them on every device
        activations=activations,
    )


def _gradients(model: Model, setting: Setting, count: int) -> tuple[int, int]:
    """The bytes of all gradients, and what backward needs for a moment beyond them.

    The gradient of a tied parameter comes in parts: the first waits, however many others come in between, and autograd
    adds the next to it in a new tensor. Sharded, the parameters of a wrapped module step together inside backward:
    those of a layer, or what is outside of them.
    """

    def size(w: Weight) -> int:
        return setting.dtype.itemsize * prod(_part(w.shape, count))

    tied = [size(w) for w in model.trained if w.uses > 1]
    total, sums = sum(map(size, model.trained)), 2 * max(tied, default=0)
    if not setting.in_backward:
        return total, sums
    if count > 1:
        inside = sum(size(w) for w in model.matrices if w.trainable)
        return max(inside // max(1, model.layers), total - inside), sums
    return sum(tied) + max([sums, *(size(w) for w in model.trained if w.uses == 1)]), 0


def _part(shape: Shape, count: int) -> Shape:
    """The largest part when FSDP2 shards a parameter along its first axis."""
    return (-(-shape[0] // count), *shape[1:]) if shape else shape


# ---- what each optimizer needs beside weights and gradients: its state, and the most beyond all else in a step


def _adamw(setting: Setting, shards: Sequence[Shard], situation: Situation) -> Bytes:
    """Both averages are in the dtype of what is stepped.

    Fused: nothing besides. foreach: √v of all parameters. Loop: √v and √v/√(1 − β₂ᵗ), and the latter of the one before.
    With a master copy one parameter steps at a time, and has its gradient in float32 besides.
    """
    sizes = [prod(part) * (FLOAT if setting.master else setting.dtype).itemsize for _, part in shards]
    if setting.master:
        temporary = {"fused": 1, "foreach": 2, "loop": 3}[situation.adamw] * max(sizes)
    else:
        temporary = {"fused": 0, "foreach": sum(sizes), "loop": _in_turn(sizes, 2)}[situation.adamw]
    return Bytes(statistics=sum(sizes) + TORCH_STEP * len(sizes), momentum=sum(sizes), temporary=temporary)


def _adamw_8bit(setting: Setting, shards: Sequence[Shard], situation: Situation) -> Bytes:
    """A byte for each average and a float32 for each block of them; small tensors stay in float32 (bitsandbytes).

    All tensors share what the 256 values of a byte stand for, in float32, for each of the averages.
    """
    counts = [prod(part) for _, part in shards]
    state = sum(n + 4 * -(-n // BITS_BLOCK) if n >= BITS_LEAST else 4 * n for n in counts)
    shared = 2 * 256 * FLOAT.itemsize if max(counts) >= BITS_LEAST else 0
    return Bytes(statistics=state + shared, momentum=state)


def _torch(setting: Setting, shards: Sequence[Shard], situation: Situation) -> Bytes:
    """Factors over the last two axes, in the gradient's dtype; V̂, which becomes the update, and the last parameter's.

    For vectors also G².
    """
    itemsize = setting.dtype.itemsize
    most = update = squared = 0
    for _, part in shards:
        size = prod(part) * itemsize
        most = max(most, update + squared + size)
        if len(part) < 2:
            most, squared = max(most, update + 2 * size), size
        update = size
    return Bytes(statistics=sum(_last_two(part) * itemsize + TORCH_STEP for _, part in shards), temporary=most)


def _transformers(setting: Setting, shards: Sequence[Shard], situation: Situation) -> Bytes:
    """Float32 factors over the last two axes, and RMS(X) as a tensor; G² and G² + ε₁, the last update.

    For 16 bits also G and X, all in float32.
    """
    temporary = _in_turn([prod(part) * FLOAT.itemsize for _, part in shards], 2 if setting.dtype == FLOAT else 4)
    return Bytes(statistics=FLOAT.itemsize * sum(_last_two(part) + 1 for _, part in shards), temporary=temporary)


def _in_turn(sizes: Sequence[int], copies: int) -> int:
    """The peak of a loop that makes so many copies of a tensor while its variable still holds one of the last's."""
    return max(copies * size + last for size, last in zip(sizes, [0, *sizes[:-1]], strict=True))


def _last_two(shape: Shape) -> int:
    """The number of elements of factors over the last two axes."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(drop(shape, len(shape) - 2))


def _ours(setting: Setting, shards: Sequence[Shard], situation: Situation) -> Bytes:
    """The vectors of the compiled step on a CPU; elsewhere a block, and means of all, packed and in double."""
    count = sum(prod(part) for _, part in shards)
    statistics = sum(map(_our_statistics, shards))
    if situation.device == "cpu":  # parameters step one after the other, but sharded ones all at once
        temporary = (sum if any(whole != part for whole, part in shards) else max)(map(compiled_vectors, shards))
    else:
        element, longest = BLOCK_BYTES[setting.dtype, setting.rounding], BLOCK_DEVICE // ROUNDED
        if setting.momentum in ("bfloat16", "int8"):
            element = MOMENTUM_BYTES[setting.rounding, setting.momentum]
        elif setting.rounding == "nearest":
            longest = BLOCK_DEVICE
            element += FLOAT.itemsize * bool(setting.momentum)  # where a step is taken, and zeros where it is not
        largest = max(prod(part) for _, part in shards)
        block = max(min(largest, BLOCK_DEVICE) * FLOAT.itemsize, min(largest, longest) * element)  # sums; the last pass
        temporary = block + 3 * 8 * statistics
    return Bytes(
        statistics=statistics * FLOAT.itemsize + STEP_DTYPE.itemsize * len(shards),
        momentum=sum(_our_momentum(setting.momentum, shard) for shard in shards) if setting.momentum else 0,
        rounding=count * setting.dtype.itemsize if setting.rounding == "kahan" else 0,
        temporary=temporary,
    )


def _our_statistics(shard: Shard) -> int:
    """The elements on one device: the whole shape decides what is factored, a sharded axis is so in both factors."""
    factoring = find_factoring(shard.whole, "outer")
    if isinstance(factoring, Factored):
        return prod(drop(shard.part, factoring.col_axis)) + prod(drop(shard.part, factoring.row_axis))
    return prod(shard.part)


def _our_momentum(format: str, shard: Shard) -> int:
    """The bytes on one device; the whole shape decides whether int8 is used, and the blocks."""
    count = prod(shard.part)
    if format == "bfloat16":
        return count * SHORT.itemsize
    blocks = blocks_of(find_factoring(shard.whole, "outer"), Settings(momentum_dtype=format))
    if blocks is None:
        return count * FLOAT.itemsize
    return count + FLOAT.itemsize * prod(scale_shape(shard.part, blocks))


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


TORCH, TRANSFORMERS, OURS = "torch.optim.Adafactor", "transformers' Adafactor", "adafactor"
OPTIMIZERS: dict[str, Callable[[Setting, Sequence[Shard], Situation], Bytes]] = {
    "AdamW": _adamw,
    "AdamW 8-bit": _adamw_8bit,
    TORCH: _torch,
    TRANSFORMERS: _transformers,
    OURS: _ours,
}
SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("adamw-float32", "AdamW", FLOAT),
        Setting("adamw-mixed", "AdamW", SHORT, master=True),
        Setting("adamw-bfloat16", "AdamW", SHORT),
        Setting("adamw-8bit", "AdamW 8-bit", FLOAT),
        Setting("adamw-8bit-bfloat16", "AdamW 8-bit", SHORT),
        Setting("torch-float32", TORCH, FLOAT),
        Setting("torch-bfloat16", TORCH, SHORT),
        Setting("transformers-float32", TRANSFORMERS, FLOAT),
        Setting("transformers-bfloat16", TRANSFORMERS, SHORT),
        Setting("adafactor-float32", OURS, FLOAT),
        Setting("adafactor-float32-momentum", OURS, FLOAT, momentum="float32"),
        Setting("adafactor-float32-momentum-bfloat16", OURS, FLOAT, momentum="bfloat16"),
        Setting("adafactor-float32-momentum-int8", OURS, FLOAT, momentum="int8"),
        Setting("adafactor-bfloat16", OURS, SHORT),
        Setting("adafactor-stochastic", OURS, SHORT, rounding="stochastic"),
        Setting("adafactor-stochastic-momentum", OURS, SHORT, momentum="float32", rounding="stochastic"),
        Setting("adafactor-stochastic-momentum-bfloat16", OURS, SHORT, momentum="bfloat16", rounding="stochastic"),
        Setting("adafactor-stochastic-momentum-int8", OURS, SHORT, momentum="int8", rounding="stochastic"),
        Setting("adafactor-kahan", OURS, SHORT, rounding="kahan"),
        Setting("adafactor-backward", OURS, SHORT, rounding="stochastic", in_backward=True),
    )
}
