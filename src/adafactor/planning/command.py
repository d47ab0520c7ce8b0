"""From arguments to a plan: `adafactor.plan` and the command `adafactor plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from adafactor.planning.memory import SETTINGS, Situation, line_of
from adafactor.planning.models import PRESETS, find
from adafactor.planning.show import Plan, parse_size


def plan(
    model: torch.nn.Module | str | Path,
    *,
    budget: int | str | None = None,
    everything: bool = False,
    shards: int = 1,
    device: str | None = None,
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
            or the path of a transformers `config.json`.
        budget: the memory of a device: `"24GiB"` or `"24G"`, `"24GB"`, or a number of bytes.
        everything: whether the table shows all settings, not only the eight most common.
        shards: the number of devices among which FSDP2 cuts every parameter, along its first axis.
        device: where the step runs, `"cpu"` or e.g. `"cuda"`: our step has other temporaries there. If not given,
            the accelerator that torch finds, else the CPU.
        batch: how many sequences a device takes at once; with `tokens`, an estimate of the activations is added.
        tokens: how many tokens a sequence has.
        checkpointing: whether activations are computed again in backward, layer by layer.
        lora: the rank of LoRA's matrices beside every matrix of the layers; all other weights are frozen.

    Returns:
        The plan: `print` it, or ask its `lines` and its `advice`.

    Examples:
        >>> gpt2 = plan("gpt2")
        >>> gpt2.line("adamw-float32").bytes.optimizer
        995519056
        >>> gpt2.line("adafactor-float32").bytes.optimizer
        1287060
    """
    for name, number in {"shards": shards, "batch": batch, "tokens": tokens, "lora": lora}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    if (batch is None) != (tokens is None) or (checkpointing and batch is None):
        raise ValueError(f"batch={batch!r}, tokens={tokens!r}: activations need both to be estimated")
    situation = Situation(_device(device), batch or 0, tokens or 0, checkpointing, lora or 0, shards)
    limit = None if budget is None else parse_size(budget)
    found = find(model).with_lora(lora) if lora else find(model)
    lines = tuple(line_of(found, setting, situation) for setting in SETTINGS.values())
    trained = sum(w.count for w in found.trained)
    return Plan(found.name, found.parameters, trained, len(found.weights), lines, situation, limit, everything)


def _device(device: str | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if accelerator is None else accelerator.type
    try:
        return torch.device(device).type
    except RuntimeError as wrong:
        raise ValueError(f"device={device!r} must be a device that torch knows, such as 'cpu' or 'cuda'") from wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("model", help=f"{', '.join(PRESETS)}; or the path of a transformers config.json")
    add("--budget", metavar="SIZE", help="memory of a device, such as 24GiB (or 24G) or 24GB: what fits?")
    add("--all", action="store_true", dest="everything", help="show all settings, not only the eight most common")
    add("--batch", type=int, metavar="N", help="sequences on each device: adds an estimate of the activations")
    add("--tokens", type=int, metavar="N", help="tokens of each sequence, with --batch")
    add("--checkpointing", action="store_true", help="activations are computed again in backward, layer by layer")
    add("--lora", type=int, metavar="RANK", help="train LoRA's matrices of this rank, and freeze all else")
    add("--shards", type=int, default=1, metavar="N", help="how many devices share the model (FSDP2)")
    add("--device", help="where the step runs: cpu, cuda, ... (default: the accelerator that torch finds, or the CPU)")


def run(arguments: argparse.Namespace) -> int:
    """Print a plan; the status is 1 where nothing fits the budget."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "model")}
    result = plan(arguments.model, **options)
    print(result)
    return 0 if result.fitting else 1
