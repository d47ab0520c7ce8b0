"""The bytes that training a model takes in each setting, part by part, from shapes alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch

from adafactor.core.factoring import STEP_DTYPE, Factored, find_factoring, summed
from adafactor.core.momentum import blocks_of, scale_shape
from adafactor.core.settings import Settings
from adafactor.core.sums import CHUNK_DEVICE, DRAWING
from adafactor.planning.models import Model, Shape, Weight

FLOAT, SHORT = torch.float32, torch.bfloat16
TORCH_STEP = 4  # bytes: torch's optimizers count steps in a float32 tensor
BITS_BLOCK, BITS_LEAST = 256, 4096  # elements that share a scale; elements from which a state takes 8 bits
PRETRAINED = "relative=False, lr=1e-5, lr_decay=None"
ADAPTERS = "relative=False, lr=1e-3, lr_decay=None"  # LoRA's B starts at zero: relative steps would hardly move it


@dataclass(frozen=True)
class Bytes:
    """The parts of a plan, in bytes. Activations are an estimate, and only there when a batch is given."""

    weights: int = 0  # and buffers
    gradients: int = 0
    optimizer: int = 0  # its state, and float32 copies of the weights where it steps those
    temporary: int = 0  # the most that a step, or the sum of a tied parameter's gradients, holds for a moment
    activations: int = 0

    @property
    def total(self) -> int:
        """All parts together: the peak of a training step."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Situation:
    """Where and how training runs."""

    device: str = "cpu"  # our compiled step is for the CPU; everywhere else ours is eager PyTorch in blocks
    batch: int = 0  # sequences on each device; 0: activations are not counted
    tokens: int = 0  # of each sequence
    checkpointing: bool = False
    lora: int = 0  # the rank; 0: all weights are trained
    shards: int = 1  # devices that share the model


@dataclass(frozen=True)
class Line:
    """The memory that one setting takes on a device, the fullest if several share the model."""

    key: str
    label: str
    bytes: Bytes | None  # None: the optimizer cannot step sharded parameters
    write: tuple[str, ...] = ()  # the lines of code for one of our settings

    def left(self, budget: int) -> int:
        """What remains of a device's memory; below zero if it is not enough."""
        return -1 if self.bytes is None else budget - self.bytes.total


@dataclass(frozen=True)
class Setting:
    """An optimizer with the precision that it trains in."""

    key: str
    optimizer: str
    dtype: torch.dtype  # of the weights and their gradients
    rounding: str = "nearest"
    momentum: str | None = None  # its format, of ours; AdamW has one anyway
    in_backward: bool = False  # a gradient is freed as soon as its parameter has stepped
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
        if self.momentum in ("bfloat16", "int8"):
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
        given = "".join(f", {name}={json.dumps(value)}" for name, value in self.keywords.items())
        if situation.lora:
            yield f"optimizer = Adafactor(model.named_parameters(){given}, {ADAPTERS})"
        else:
            yield f"optimizer = Adafactor(model.named_parameters(){given})  # to train from scratch"
            yield "# or, for pretrained weights, a small step of absolute size:"
            yield f"optimizer = Adafactor(model.named_parameters(){given}, {PRETRAINED})"
        if self.in_backward:
            yield "step_in_backward(model, optimizer)"


TORCH, TRANSFORMERS, OURS = "torch.optim.Adafactor", "transformers' Adafactor", "adafactor"
SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("adamw-float32", "AdamW", FLOAT),
        Setting("adamw-mixed", "AdamW", SHORT, master=True),
        Setting("adamw-bfloat16", "AdamW", SHORT),
        Setting("adamw-backward", "AdamW", SHORT, in_backward=True),
        Setting("adamw-8bit", "AdamW 8-bit", FLOAT),
        Setting("adamw-8bit-bfloat16", "AdamW 8-bit", SHORT),
        Setting("torch-float32", TORCH, FLOAT),
        Setting("torch-bfloat16", TORCH, SHORT),
        Setting("transformers-float32", TRANSFORMERS, FLOAT),
        Setting("transformers-bfloat16", TRANSFORMERS, SHORT),
        Setting("adafactor-float32", OURS, FLOAT),
        Setting("adafactor-float32-momentum", OURS, FLOAT, "nearest", "float32"),
        Setting("adafactor-float32-momentum-bfloat16", OURS, FLOAT, "nearest", "bfloat16"),
        Setting("adafactor-float32-momentum-int8", OURS, FLOAT, "nearest", "int8"),
        Setting("adafactor-bfloat16", OURS, SHORT),
        Setting("adafactor-stochastic", OURS, SHORT, "stochastic"),
        Setting("adafactor-stochastic-momentum", OURS, SHORT, "stochastic", "float32"),
        Setting("adafactor-stochastic-momentum-bfloat16", OURS, SHORT, "stochastic", "bfloat16"),
        Setting("adafactor-stochastic-momentum-int8", OURS, SHORT, "stochastic", "int8"),
        Setting("adafactor-kahan", OURS, SHORT, "kahan"),
        Setting("adafactor-backward", OURS, SHORT, "stochastic", in_backward=True),
    )
}
COMMON = (
    *("adamw-float32", "adamw-bfloat16", "adamw-8bit-bfloat16", "adamw-backward"),
    *("adafactor-float32", "adafactor-stochastic", "adafactor-stochastic-momentum-int8", "adafactor-backward"),
)


def line_of(model: Model, setting: Setting, situation: Situation) -> Line:
    """Count the bytes of one setting, on the first of the devices that share the model."""
    if situation.shards > 1 and setting.optimizer in (TORCH, TRANSFORMERS):
        return Line(setting.key, setting.label, None)
    model = model.shard(situation.shards)
    state, temporary = OPTIMIZERS[setting.optimizer](setting, model.trained, situation)
    gradients, sums = _gradients(model, setting)
    dtypes = [setting.dtype if w.dtype.is_floating_point else w.dtype for w in model.weights]
    weights = sum(dtype.itemsize * w.part_count for dtype, w in zip(dtypes, model.weights, strict=True))
    activations = 0
    if positions := situation.batch * situation.tokens:
        activations = model.activations(positions, setting.dtype.itemsize, situation.checkpointing)
    counted = Bytes(
        weights + model.buffers,  # FSDP2 has a copy of the buffers on every device
        gradients,
        state,
        max(temporary, sums),
        activations,
    )
    code = setting.code(situation) if setting.optimizer == OURS else ()
    return Line(setting.key, setting.label, counted, tuple(code))


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

Needs = tuple[int, int]


def _adamw(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Needs:
    """Both averages in the dtype of what is stepped, fused: nothing besides.

    With a master copy one parameter steps at a time, and has its gradient in float32 besides.
    """
    sizes = [w.part_count * (FLOAT if setting.master else setting.dtype).itemsize for w in weights]
    state = 2 * sum(sizes) + TORCH_STEP * len(sizes)
    return (state + sum(sizes), max(sizes)) if setting.master else (state, 0)


def _adamw_8bit(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Needs:
    """A byte for each average and a float32 for each block of them; small tensors stay in float32 (bitsandbytes).

    All tensors share what the 256 values of a byte stand for, in float32, for each of the averages.
    """
    counts = [w.part_count for w in weights]
    state = sum(n + 4 * -(-n // BITS_BLOCK) if n >= BITS_LEAST else 4 * n for n in counts)
    return 2 * state + (2 * 256 * FLOAT.itemsize if max(counts) >= BITS_LEAST else 0), 0


def _torch(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Needs:
    """Factors over the last two axes, in the gradient's dtype; V̂, which becomes the update, and the last one."""
    itemsize = setting.dtype.itemsize
    temporary = _in_turn([w.part_count * itemsize for w in weights], 1)
    return sum(_last_two(w.part) * itemsize + TORCH_STEP for w in weights), temporary


def _transformers(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Needs:
    """Float32 factors over the last two axes, and RMS(X) as a tensor; G² and G² + ε₁, the last update.

    For 16 bits also G and X, all in float32.
    """
    temporary = _in_turn([w.part_count * FLOAT.itemsize for w in weights], 2 if setting.dtype == FLOAT else 4)
    return FLOAT.itemsize * sum(_last_two(w.part) + 1 for w in weights), temporary


def _in_turn(sizes: Sequence[int], copies: int) -> int:
    """The peak of a loop that makes so many copies of a tensor while its variable still holds one of the last's."""
    return max(copies * size + last for size, last in zip(sizes, [0, *sizes[:-1]], strict=True))


def _last_two(shape: Shape) -> int:
    """The number of elements of factors over the last two axes."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(summed(shape, len(shape) - 2))


def _ours(setting: Setting, weights: Sequence[Weight], situation: Situation) -> Needs:
    """Factors, and sums over rows and columns in double; beside a CPU, the largest chunk that eager PyTorch works on.

    An element of a chunk takes 8 bytes at most, with Kahan's compensation 20; where random numbers are drawn 32, and
    for a momentum in fewer bits 36.
    """
    statistics = sum(map(_our_statistics, weights))
    state = statistics * FLOAT.itemsize + STEP_DTYPE.itemsize * len(weights)
    if setting.momentum:
        state += sum(_our_momentum(setting.momentum, w) for w in weights)
    if setting.rounding == "kahan":
        state += setting.dtype.itemsize * sum(w.part_count for w in weights)
    temporary = 3 * 8 * statistics
    if situation.device != "cpu":
        is_short = setting.momentum in ("bfloat16", "int8")
        draws = is_short or setting.rounding == "stochastic"
        chunk = min(max(w.part_count for w in weights), CHUNK_DEVICE // (DRAWING if draws else 1))
        temporary += chunk * (32 + 4 * is_short if draws else 20 if setting.rounding == "kahan" else 8)
    return state, temporary


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


OPTIMIZERS: dict[str, Callable[[Setting, Sequence[Weight], Situation], Needs]] = {
    "AdamW": _adamw,
    "AdamW 8-bit": _adamw_8bit,
    TORCH: _torch,
    TRANSFORMERS: _transformers,
    OURS: _ours,
}
