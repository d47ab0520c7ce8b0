"""The memory plan: what training a model takes in each setting, part by part, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from adafactor.planning import sizes
from adafactor.planning.models import Model, find
from adafactor.planning.optimizers import ADAMW, SETTINGS, Setting, Situation
from adafactor.planning.shapes import Shape


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
        return sum(getattr(self, part.name) for part in fields(self))


PARTS = tuple(part.name for part in fields(Bytes))


@dataclass(frozen=True)
class Line:
    """What one setting takes."""

    key: str
    label: str
    whole: Bytes  # on one device
    device: Bytes | None  # on the fullest of them; None if the optimizer cannot step sharded parameters
    note: str = ""

    def left(self, budget: int) -> int | None:
        """What remains of a device's memory; below zero if it is not enough, None if it cannot be sharded."""
        return None if self.device is None else budget - self.device.total


@dataclass(frozen=True)
class Plan:
    """The memory plan of a model. `str()` is a table with a chart and advice below it, `plot(path)` draws it.

    `lines` has one entry per setting; `fitting` are those that the budget covers; `advice` says what to write. Where
    nothing fits, `alternative` is a plan with checkpointing, a smaller batch or more devices in which something does.
    """

    model: str
    parameters: int
    trained: int
    tensors: int
    lines: tuple[Line, ...]
    shards: int
    situation: Situation
    budget: int | None = None
    alternative: Plan | None = None

    @property
    def fitting(self) -> tuple[Line, ...]:
        """The settings that fit the budget; all if there is none."""
        budget = self.budget
        return tuple(x for x in self.lines if budget is None or (x.left(budget) or 0) > 0)

    def line(self, key: str) -> Line:
        """That of one setting."""
        return next(line for line in self.lines if line.key == _known(key).key)

    @property
    def advice(self) -> str:
        """What fits, and the lines to write for it; else what is missing, and what would help."""
        from adafactor.planning import show

        return show.advice(self)

    def as_dict(self) -> dict[str, Any]:
        """All of it as `--json` prints it: numbers are bytes."""
        from adafactor.planning import show

        return show.as_dict(self)

    def __str__(self) -> str:
        """The table, the chart, what is not in them, and advice, as wide as the terminal."""
        from adafactor.planning import show

        return show.text(self)

    def chart(self, width: int = 60) -> str:
        """A bar for each setting, in text."""
        from adafactor.planning import show

        return show.chart(self, width)

    def plot(self, path: str | Path) -> None:
        """The chart as a picture; matplotlib draws it."""
        from adafactor.planning import show

        show.plot(self, Path(path))


def plan(
    model: torch.nn.Module | str | Path,
    *,
    settings: Iterable[str] | None = None,
    shards: int = 1,
    budget: int | str | None = None,
    device: str | None = None,
    adamw: str = "fused",
    batch: int | None = None,
    tokens: int | None = None,
    checkpointing: bool = False,
    lora: int | None = None,
) -> Plan:
    """The memory that training a model takes, before there is any: weights, gradients, state and temporaries.

    Floating-point parameters are taken in the dtype that each setting names, other ones as they are. Tied parameters
    count once; frozen ones have no gradient and no state. Activations count if `batch` and `tokens` are given.

    Args:
        model: a torch.nn.Module, on the meta device if you like; the name of a preset (`"gpt2-xl"`, `"llama-7b"`, …);
            `"module:function"`, which returns a module; or the path of a transformers `config.json`.
        settings: which settings, by the keys of `adafactor.planning.SETTINGS`; all if not given.
        shards: the number of devices among which FSDP2 cuts every parameter, along its first axis.
        budget: the memory of a device: `"24GiB"` or `"24G"`, `"24GB"`, or a number of bytes.
        device: where the step runs, `"cpu"` or e.g. `"cuda"`: our step has other temporaries there. If not given,
            the accelerator that torch finds, else the CPU.
        adamw: which of torch's AdamWs: `"fused"` needs no temporary, `"foreach"` (torch's default on CUDA) one copy of
            all parameters, `"loop"` (its default on a CPU) two of the largest.
        batch: how many sequences a device takes at once; with `tokens`, an estimate of the activations is added.
        tokens: how many tokens a sequence has.
        checkpointing: whether activations are computed again in backward, layer by layer.
        lora: the rank of LoRA's matrices beside every matrix of the layers; all other weights are frozen.

    Returns:
        The plan: `print` it, ask its `lines`, its `advice` or `as_dict()`, or `plot` it.

    Examples:
        >>> bill = plan("gpt2")
        >>> bill.line("adamw-float32").whole.statistics
        497759824
        >>> bill.line("adafactor-float32").whole.statistics
        1287060
    """
    for name, number in {"shards": shards, "batch": batch, "tokens": tokens, "lora": lora}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    if (batch is None) != (tokens is None) or (checkpointing and batch is None):
        raise ValueError(f"batch={batch!r}, tokens={tokens!r}: activations need both to be estimated")
    if adamw not in ADAMW:
        raise ValueError(f"adamw={adamw!r} must be one of {', '.join(map(repr, ADAMW))}")
    chosen = list(SETTINGS.values()) if settings is None else [_known(key) for key in settings]
    situation = Situation(_device(device), adamw, batch or 0, tokens or 0, checkpointing, lora or 0)
    limit = None if budget is None else sizes.parse(budget)
    found = find(model)
    bill = _plan(found, chosen, situation, shards, limit)
    if bill.fitting:
        return bill
    return replace(bill, alternative=_alternative(found, chosen, situation, shards, limit))


def _plan(model: Model, settings: Sequence[Setting], situation: Situation, shards: int, budget: int | None) -> Plan:
    activations = {
        dtype: model.activations(situation.batch * situation.tokens, dtype.itemsize, situation.checkpointing)
        for dtype in {setting.dtype for setting in settings}
        if situation.batch
    }
    model = model.with_lora(situation.lora) if situation.lora else model
    return Plan(
        model.name,
        model.parameters,
        sum(w.count for w in model.trained),
        len(model.weights),
        tuple(_line(model, setting, situation, shards, activations.get(setting.dtype, 0)) for setting in settings),
        shards,
        situation,
        budget,
    )


def _alternative(
    model: Model, settings: Sequence[Setting], situation: Situation, shards: int, budget: int | None
) -> Plan | None:
    """The first plan in which something fits: with checkpointing, smaller batches, then more and more devices."""
    batches = [situation.batch >> power for power in range(situation.batch.bit_length())] or [0]
    can_checkpoint = situation.batch and model.layers and not situation.checkpointing
    ways = [situation.checkpointing, True] if can_checkpoint else [situation.checkpointing]
    tries = [(shards, batch) for batch in batches] + [(shards * 2**power, batches[0]) for power in range(1, 11)]
    for count, batch in tries:
        for checkpointing in ways:
            changed = replace(situation, batch=batch, checkpointing=checkpointing)
            other = _plan(model, settings, changed, count, budget)
            if other.fitting:
                return other
    return None


def _known(key: str) -> Setting:
    if key not in SETTINGS:
        raise ValueError(f"unknown setting {key!r}; there are {', '.join(SETTINGS)}")
    return SETTINGS[key]


def _device(device: str | None) -> str:
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None else found.type
    try:
        return torch.device(device).type
    except RuntimeError as wrong:
        raise ValueError(f"device={device!r} must be a device that torch knows, such as 'cpu' or 'cuda'") from wrong


def _line(model: Model, setting: Setting, situation: Situation, shards: int, activations: int) -> Line:
    whole = replace(_bytes(model, setting, situation, 1), activations=activations)
    if shards == 1:
        return Line(setting.key, setting.label, whole, whole)
    if setting.unsharded:
        return Line(setting.key, setting.label, whole, None, setting.unsharded)
    device = replace(_bytes(model, setting, situation, shards), activations=activations)
    return Line(setting.key, setting.label, whole, device)


def _bytes(model: Model, setting: Setting, situation: Situation, shards: int) -> Bytes:
    """On the first device, which has the largest part of every parameter."""
    cuts = [(w.shape, cut(w.shape, shards)) for w in model.trained]
    kept = [setting.keeps(one) for one in cuts]
    gradients, summed = _gradients(model, setting, shards)
    bill = Bytes(
        weights=sum(
            (setting.dtype if w.dtype.is_floating_point else w.dtype).itemsize * _count(w.shape, shards)
            for w in model.weights
        ),
        gradients=gradients,
        statistics=sum(k.statistics for k in kept) + setting.shares(cuts),
        momentum=sum(k.momentum for k in kept),
        rounding=sum(k.rounding for k in kept),
        temporary=max(setting.holds(cuts, situation), summed),
        buffers=model.buffers,  # FSDP2 has a copy of them on every device
    )
    if not setting.master:
        return bill
    return replace(bill, master=torch.float32.itemsize * sum(_count(w.shape, shards) for w in model.trained))


def _gradients(model: Model, setting: Setting, shards: int) -> tuple[int, int]:
    """What all gradients take, and what backward holds for a moment beyond them.

    The gradient of a tied parameter comes in parts: the first waits, however many others come in between, and autograd
    adds the next to it in a new tensor.
    """
    sizes = [(setting.dtype.itemsize * _count(w.shape, shards), w.uses > 1) for w in model.trained]
    tied = [size for size, is_tied in sizes if is_tied]
    summed = 2 * max(tied, default=0)
    if not setting.in_backward:
        return sum(size for size, _ in sizes), summed
    return sum(tied) + max([summed, *(size for size, is_tied in sizes if not is_tied)]), 0


def cut(shape: Shape, shards: int) -> Shape:
    """The largest part when FSDP2 cuts a parameter along its first axis."""
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape


def _count(shape: Shape, shards: int) -> int:
    return prod(cut(shape, shards))
