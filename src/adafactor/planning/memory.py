"""The bytes that training a model takes in each setting, part by part, from shapes alone.

Temporaries of other optimizers follow their code line by line: what an expression makes while its operands live, and
what a loop's variables still hold from the parameter before. All were measured (studies/plan.py). Ours are those of the
compiled step on a CPU, and of eager PyTorch elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from adafactor.core.factoring import STEP_DTYPE, Factored, find_factoring, summed
from adafactor.core.momentum import blocks_of, scale_shape
from adafactor.core.settings import Settings
from adafactor.core.sums import CHUNK_DEVICE, DRAWING
from adafactor.kernels import memory_order
from adafactor.planning.models import Model, Shape, Weight

FLOAT, SHORT = torch.float32, torch.bfloat16
ADAMW_VARIANTS = ("fused", "foreach", "loop")
TORCH_STEP = 4  # bytes: torch's optimizers count steps in a float32 tensor
BITS_BLOCK, BITS_LEAST = 256, 4096  # elements that share a scale; elements from which a state takes 8 bits
ROUNDED_MOMENTUM = ("bfloat16", "int8")


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
    shards: int = 1  # devices that share the model


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


@dataclass(frozen=True)
class Setting:
    """An optimizer with the precision that it trains in."""

    key: str
    optimizer: str
    dtype: torch.dtype  # of the weights and their gradients
    rounding: str = "nearest"  # this and what follows are of ours, but for the last
    momentum: str | None = None  # its format; AdamW has one anyway
    in_backward: bool = False  # a gradient is freed as soon as its parameter has stepped
    # for each element of the block that eager PyTorch works on: room to compute in and for a converted copy, random
    # numbers on their way, what rounding took away
    block_bytes: int = 0
    master: bool = False  # a float32 copy of the weights, which is what the optimizer steps

    @property
    def label(self) -> str:
        """The setting in words."""
        words = [self.optimizer, "mixed precision" if self.master else str(self.dtype).removeprefix("torch.")]
        if self.rounding != "nearest":
            words.append(self.rounding)
        if self.momentum is not None:
            words.append("momentum" if self.momentum == "float32" else f"{self.momentum} momentum")
        if self.in_backward:
            words.append("in backward")
        return ", ".join(words)

    @property
    def keywords(self) -> dict[str, Any]:
        """What one of ours gives to `Adafactor` beside the parameters."""
        keywords: dict[str, Any] = {}
        if self.rounding != "nearest":
            keywords["rounding"] = self.rounding
        if self.momentum is not None:
            keywords["beta1"] = 0.9
        if self.momentum in ROUNDED_MOMENTUM:
            keywords["momentum_dtype"] = self.momentum
        return keywords

    def code(self, situation: Situation) -> Iterator[str]:
        """Yield the lines to write for one of our settings."""
        if situation.lora:
            config = f'peft.LoraConfig(r={situation.lora}, target_modules="all-linear")'
            yield f"model = peft.get_peft_model(model, {config})"
        if self.dtype == SHORT:
            yield "model.bfloat16()"
        if situation.checkpointing:
            yield "model.gradient_checkpointing_enable()  # of transformers; else torch.utils.checkpoint"
        if situation.shards > 1:
            yield "fully_shard(model)  # of torch.distributed.fsdp; each layer before the whole"
        keywords = "".join(f", {name}={json.dumps(value)}" for name, value in self.keywords.items())
        yield f"optimizer = Adafactor(model.named_parameters(){keywords})"
        if self.in_backward:
            yield "step_in_backward(model, optimizer)"


TORCH, TRANSFORMERS, OURS = "torch.optim.Adafactor", "transformers' Adafactor", "adafactor"
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
        Setting("adafactor-float32", OURS, FLOAT, block_bytes=4),
        Setting("adafactor-float32-momentum", OURS, FLOAT, "nearest", "float32", block_bytes=8),
        Setting("adafactor-float32-momentum-bfloat16", OURS, FLOAT, "nearest", "bfloat16", block_bytes=36),
        Setting("adafactor-float32-momentum-int8", OURS, FLOAT, "nearest", "int8", block_bytes=32),
        Setting("adafactor-bfloat16", OURS, SHORT, block_bytes=8),
        Setting("adafactor-stochastic", OURS, SHORT, "stochastic", block_bytes=32),
        Setting("adafactor-stochastic-momentum", OURS, SHORT, "stochastic", "float32", block_bytes=32),
        Setting("adafactor-stochastic-momentum-bfloat16", OURS, SHORT, "stochastic", "bfloat16", block_bytes=36),
        Setting("adafactor-stochastic-momentum-int8", OURS, SHORT, "stochastic", "int8", block_bytes=36),
        Setting("adafactor-kahan", OURS, SHORT, "kahan", block_bytes=19),
        Setting("adafactor-backward", OURS, SHORT, "stochastic", in_backward=True, block_bytes=32),
    )
}


def line_of(model: Model, setting: Setting, situation: Situation) -> Line:
    """Count the bytes of one setting, on one device and on each of those that share the model."""
    whole = device = _bytes(model, setting, situation)
    if situation.shards > 1:
        if setting.optimizer in (TORCH, TRANSFORMERS):
            return Line(setting.key, setting.label, whole, None, "it raises on sharded matrices")
        device = _bytes(model.shard(situation.shards), setting, situation)
    code = setting.code(situation) if setting.optimizer == OURS else ()
    return Line(setting.key, setting.label, whole, device, write=tuple(code))


def _bytes(model: Model, setting: Setting, situation: Situation) -> Bytes:
    """The bytes on the first of the devices that share the model."""
    own = OPTIMIZERS[setting.optimizer](setting, model.trained, situation)
    gradients, sums = _gradients(model, setting)
    dtypes = [setting.dtype if w.dtype.is_floating_point else w.dtype for w in model.weights]
    activations = 0
    if positions := situation.batch * situation.tokens:
        activations = model.activations(positions, setting.dtype.itemsize, situation.checkpointing)
    return replace(
        own,
        weights=sum(dtype.itemsize * w.part_count for dtype, w in zip(dtypes, model.weights, strict=True)),
        master=FLOAT.itemsize * sum(w.part_count for w in model.trained) if setting.master else 0,
        gradients=gradients,
        temporary=max(own.temporary, sums),
        buffers=model.buffers,  # FSDP2 has a copy of them on every device
        activations=activations,
    )


def _gradients(model: Model, setting: Setting) -> tuple[int, int]:
    """The bytes of all gradients, and what backward needs for a moment beyond them.

    The gradient of a tied parameter comes in parts: the first waits, however many others come in between, and autograd
    adds the next to it in a new tensor. Sharded, the parameters of a wrapped module step together inside backward:
    those of a layer, or what is outside of them.
    """

    def size(w: Weight) -> int:
        return setting.dtype.itemsize * w.part_count

    tied = [size(w) for w in model.trained if w.uses > 1]
    total, sums = sum(map(size, model.trained)), 2 * max(tied, default=0)
    if not setting.in_backward:
        return total, sums
    if any(w.devices > 1 for w in model.trained):
        inside = sum(size(w) for w in model.matrices if w.trainable)
        return max(inside // max(1, model.layers), total - inside), sums
    return sum(tied) + max([sums, *(size(w) for w in model.trained if w.uses == 1)]), 0


# ---- what each optimizer needs beside weights and gradients: its state, and the most beyond all else in a step


def _adamw(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Bytes:
    """Both averages are in the dtype of what is stepped.

    Fused: nothing besides. foreach: √v of all parameters. Loop: √v and √v/√(1 − β₂ᵗ), and the latter of the one before.
    With a master copy one parameter steps at a time, and has its gradient in float32 besides.
    """
    sizes = [w.part_count * (FLOAT if setting.master else setting.dtype).itemsize for w in weights]
    if setting.master:
        temporary = {"fused": 1, "foreach": 2, "loop": 3}[situation.adamw] * max(sizes)
    else:
        temporary = {"fused": 0, "foreach": sum(sizes), "loop": _in_turn(sizes, 2)}[situation.adamw]
    return Bytes(statistics=sum(sizes) + TORCH_STEP * len(sizes), momentum=sum(sizes), temporary=temporary)


def _adamw_8bit(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Bytes:
    """A byte for each average and a float32 for each block of them; small tensors stay in float32 (bitsandbytes).

    All tensors share what the 256 values of a byte stand for, in float32, for each of the averages.
    """
    counts = [w.part_count for w in weights]
    state = sum(n + 4 * -(-n // BITS_BLOCK) if n >= BITS_LEAST else 4 * n for n in counts)
    shared = 2 * 256 * FLOAT.itemsize if max(counts) >= BITS_LEAST else 0
    return Bytes(statistics=state + shared, momentum=state)


def _torch(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Bytes:
    """Factors over the last two axes, in the gradient's dtype; V̂, which becomes the update, and the last parameter's.

    For vectors also G².
    """
    itemsize = setting.dtype.itemsize
    most = update = squared = 0
    for w in weights:
        size = w.part_count * itemsize
        most = max(most, update + squared + size)
        if len(w.shape) < 2:
            most, squared = max(most, update + 2 * size), size
        update = size
    return Bytes(statistics=sum(_last_two(w.part) * itemsize + TORCH_STEP for w in weights), temporary=most)


def _transformers(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Bytes:
    """Float32 factors over the last two axes, and RMS(X) as a tensor; G² and G² + ε₁, the last update.

    For 16 bits also G and X, all in float32.
    """
    temporary = _in_turn([w.part_count * FLOAT.itemsize for w in weights], 2 if setting.dtype == FLOAT else 4)
    return Bytes(statistics=FLOAT.itemsize * sum(_last_two(w.part) + 1 for w in weights), temporary=temporary)


def _in_turn(sizes: Sequence[int], copies: int) -> int:
    """The peak of a loop that makes so many copies of a tensor while its variable still holds one of the last's."""
    return max(copies * size + last for size, last in zip(sizes, [0, *sizes[:-1]], strict=True))


def _last_two(shape: Shape) -> int:
    """The number of elements of factors over the last two axes."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(summed(shape, len(shape) - 2))


def _ours(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Bytes:
    """The vectors of the compiled step on a CPU; elsewhere a block, and means of all, packed and in double."""
    statistics = sum(map(_our_statistics, weights))
    if situation.device == "cpu":  # parameters step one after the other, but sharded ones all at once
        temporary = (sum if any(w.part != w.shape for w in weights) else max)(map(compiled_vectors, weights))
    else:
        is_rounded = setting.rounding != "nearest" or setting.momentum in ROUNDED_MOMENTUM
        largest = max(w.part_count for w in weights)
        sums = FLOAT.itemsize * min(largest, CHUNK_DEVICE)
        last_pass = setting.block_bytes * min(largest, CHUNK_DEVICE // (DRAWING if is_rounded else 1))
        temporary = max(sums, last_pass) + 3 * 8 * statistics
    return Bytes(
        statistics=statistics * FLOAT.itemsize + STEP_DTYPE.itemsize * len(weights),
        momentum=sum(_our_momentum(setting.momentum, w) for w in weights) if setting.momentum else 0,
        rounding=setting.dtype.itemsize * sum(w.part_count for w in weights) if setting.rounding == "kahan" else 0,
        temporary=temporary,
    )


def _our_statistics(weight: Weight) -> int:
    """The elements on one device: the whole shape decides what is factored, a sharded axis is so in both factors."""
    factoring = find_factoring(weight.shape, "outer")
    if isinstance(factoring, Factored):
        return sum(prod(summed(weight.part, factoring.summed_axis(key))) for key in factoring.statistics)
    return weight.part_count


def _our_momentum(format: str, weight: Weight) -> int:
    """The bytes on one device; the whole shape decides whether int8 is used, and the blocks."""
    count = weight.part_count
    if format == "bfloat16":
        return count * SHORT.itemsize
    blocks = blocks_of(find_factoring(weight.shape, "outer"), Settings(momentum_dtype=format))
    if blocks is None:
        return count * FLOAT.itemsize
    return count + FLOAT.itemsize * prod(scale_shape(weight.part, blocks))


def compiled_vectors(weight: Weight) -> int:
    """The bytes that the compiled step reserves for a contiguous parameter (`MemoryOrder.lengths`)."""
    factoring, part = find_factoring(weight.shape, "outer"), weight.part
    strides = tuple(prod(part[axis + 1 :]) for axis in range(len(part)))
    if isinstance(factoring, Factored):
        order = memory_order.factored_order(part, strides, strides, factoring.row_axis, factoring.col_axis)
    else:
        order = memory_order.flat_order(part, strides, strides)
    assert isinstance(order, memory_order.MemoryOrder)  # there is a way through every contiguous tensor
    return 8 * order.scratch


OPTIMIZERS: dict[str, Callable[[Setting, Sequence[Weight], Situation], Bytes]] = {
    "AdamW": _adamw,
    "AdamW 8-bit": _adamw_8bit,
    TORCH: _torch,
    TRANSFORMERS: _transformers,
    OURS: _ours,
}
