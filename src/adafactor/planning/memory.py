"""`adafactor.plan`: the memory that training a model takes in each setting, part by part, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from adafactor.planning.models import Model, Shape, find
from adafactor.planning.optimizers import ADAMW_VARIANTS, SETTINGS, Setting, Shard, Situation
from adafactor.planning.show import Bytes, Line, Plan, find_setting, parse_size


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
    """Compute the memory that training a model takes, before there is any: weights, gradients, state and temporaries.

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
        >>> gpt2 = plan("gpt2")
        >>> gpt2.line("adamw-float32").whole.statistics
        497759824
        >>> gpt2.line("adafactor-float32").whole.statistics
        1287060
    """
    for name, number in {"shards": shards, "batch": batch, "tokens": tokens, "lora": lora}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    if (batch is None) != (tokens is None) or (checkpointing and batch is None):
        raise ValueError(f"batch={batch!r}, tokens={tokens!r}: activations need both to be estimated")
    if adamw not in ADAMW_VARIANTS:
        raise ValueError(f"adamw={adamw!r} must be one of {', '.join(map(repr, ADAMW_VARIANTS))}")
    chosen = list(SETTINGS.values()) if settings is None else [find_setting(key) for key in settings]
    situation = Situation(_device(device), adamw, batch or 0, tokens or 0, checkpointing, lora or 0)
    limit = None if budget is None else parse_size(budget)
    description = find(model)
    result = _plan(description, chosen, situation, shards, limit)
    if result.fitting:
        return result
    return replace(result, alternative=_alternative(description, chosen, situation, shards, limit))


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


def _device(device: str | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if accelerator is None else accelerator.type
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


def _bytes(model: Model, setting: Setting, situation: Situation, count: int) -> Bytes:
    """The bytes on the first of so many devices, which has the largest part of every parameter."""
    shards = [Shard(w.shape, _part(w.shape, count)) for w in model.trained]
    states = [setting.optimizer.state(setting, shard) for shard in shards]
    gradients, sums = _gradients(model, setting, count)
    return Bytes(
        weights=sum(
            (setting.dtype if w.dtype.is_floating_point else w.dtype).itemsize * prod(_part(w.shape, count))
            for w in model.weights
        ),
        master=torch.float32.itemsize * sum(prod(shard.part) for shard in shards) if setting.master else 0,
        gradients=gradients,
        statistics=sum(state.statistics for state in states) + setting.optimizer.shared(shards),
        momentum=sum(state.momentum for state in states),
        rounding=sum(state.rounding for state in states),
        temporary=max(setting.optimizer.temporary(setting, shards, situation), sums),
        buffers=model.buffers,  # FSDP2 has a copy of them on every device
    )


def _gradients(model: Model, setting: Setting, count: int) -> tuple[int, int]:
    """The bytes of all gradients, and what backward needs for a moment beyond them.

    The gradient of a tied parameter comes in parts: the first waits, however many others come in between, and autograd
    adds the next to it in a new tensor.
    """
    sizes = [(setting.dtype.itemsize * prod(_part(w.shape, count)), w.uses > 1) for w in model.trained]
    tied = [size for size, is_tied in sizes if is_tied]
    sums = 2 * max(tied, default=0)
    if not setting.in_backward:
        return sum(size for size, _ in sizes), sums
    return sum(tied) + max([sums, *(size for size, is_tied in sizes if not is_tied)]), 0


def _part(shape: Shape, count: int) -> Shape:
    """The largest part when FSDP2 shards a parameter along its first axis."""
    return (-(-shape[0] // count), *shape[1:]) if shape else shape
