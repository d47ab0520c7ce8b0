"""From arguments to plans: `adafactor.plan` and the command `adafactor plan`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from adafactor.planning.communication import MODELS, Link, traffic_of, traffic_table
from adafactor.planning.memory import ADAMW_VARIANTS, SETTINGS, Situation, line_of
from adafactor.planning.models import PRESETS, Model, find
from adafactor.planning.show import Plan, parse_size, print_plan


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
    keys = list(SETTINGS if settings is None else settings)
    if unknown := [key for key in keys if key not in SETTINGS]:
        raise ValueError(f"unknown setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
    situation = Situation(_device(device), adamw, batch or 0, tokens or 0, checkpointing, lora or 0, shards)
    limit = None if budget is None else parse_size(budget)
    description = _describe(model, lora)
    result = _plan(description, keys, situation, limit)
    return result if result.fitting else replace(result, alternative=_alternative(result, description))


def _describe(model: torch.nn.Module | str | Path, lora: int | None) -> Model:
    """Describe a model as it is trained."""
    return find(model).with_lora(lora) if lora else find(model)


def _plan(model: Model, keys: Iterable[str], situation: Situation, budget: int | None) -> Plan:
    lines = tuple(line_of(model, SETTINGS[key], situation) for key in keys)
    trained = sum(w.count for w in model.trained)
    return Plan(model.name, model.parameters, trained, len(model.weights), lines, situation, budget)


def _alternative(plan: Plan, model: Model) -> Plan | None:
    """The first plan in which something fits: with checkpointing, smaller batches, then more and more devices."""
    how, keys = plan.situation, [line.key for line in plan.lines]
    batches = [replace(how, batch=how.batch >> power) for power in range(max(1, how.batch.bit_length()))]
    devices = [replace(how, shards=how.shards << power) for power in range(1, 11)]
    for changed in batches + devices:
        ways = [changed]
        if how.batch and model.layers and not how.checkpointing:
            ways.append(replace(changed, checkpointing=True))
        for way in ways:
            if (other := _plan(model, keys, way, plan.budget)).fitting:
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


# of `plan`: the options of the same names are passed on
OPTIONS = ("settings", "budget", "device", "adamw", "batch", "tokens", "checkpointing", "lora")
KNOWN = f"{', '.join(PRESETS)}; module:function; or a transformers config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("models", nargs="*", help=KNOWN)
    add("--budget", metavar="SIZE", help="memory of a device, such as 24GiB (or 24G) or 24GB: what fits?")
    shards = "how many devices share the model; also shows what a step sends between them"
    add("--shards", nargs="+", type=int, metavar="N", help=shards)
    links = "bytes a second that each rank sends, such as 50GB: with --latency, how long that takes"
    add("--bandwidth", metavar="SIZE", help=links)
    add("--latency", type=float, metavar="MICROSECONDS", help="what a message between two ranks takes besides")
    add("--batch", type=int, metavar="N", help="sequences on each device: adds an estimate of the activations")
    add("--tokens", type=int, metavar="N", help="tokens of each sequence, with --batch")
    add("--checkpointing", action="store_true", help="activations are computed again in backward, layer by layer")
    add("--lora", type=int, metavar="RANK", help="train LoRA's matrices of this rank, and freeze all else")
    add("--settings", nargs="+", metavar="KEY", help=f"show only these: {', '.join(SETTINGS)}")
    where = "where the step runs, such as cpu or cuda (default: the accelerator that torch finds, or the CPU)"
    add("--device", help=where)
    which = "which of torch's AdamWs to count (default: %(default)s)"
    add("--adamw", choices=ADAMW_VARIANTS, default="fused", help=which)
    add("--plot", type=Path, metavar="FILE", help="draw the plan of one model into this picture")
    add("--json", action="store_true", help="print all as JSON, in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print a plan for every model and number of devices, then the traffic; without a model only the traffic.

    The status is 1 where nothing fits the budget in one of the plans.
    """
    shards = arguments.shards or [1]
    if not arguments.models and not arguments.shards:
        raise ValueError(f"name a model: {KNOWN}")
    if min(shards) < 1:
        raise ValueError(f"--shards {min(shards)} must be at least 1")
    if arguments.plot and (len(arguments.models), len(shards)) != (1, 1):
        raise ValueError(f"--plot {arguments.plot} draws one model with one number of devices")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"--plot {arguments.plot} needs matplotlib (pip install matplotlib)")
    if (arguments.bandwidth is None) != (arguments.latency is None) or (arguments.bandwidth and not arguments.shards):
        raise ValueError("--shards, --bandwidth and --latency: times need all three")
    if arguments.latency is not None and not 0 <= arguments.latency < math.inf:
        raise ValueError(f"--latency {arguments.latency:g} must be a number of microseconds, 0 or more")
    link = None if arguments.bandwidth is None else Link(parse_size(arguments.bandwidth), arguments.latency / 1e6)
    options = {name: getattr(arguments, name) for name in OPTIONS}
    plans = [plan(model, shards=count, **options) for model in arguments.models for count in shards]
    sharded = [_describe(name, arguments.lora) for name in arguments.models or MODELS] if arguments.shards else []
    traffic = [traffic_of(model, count, link) for model in sharded for count in shards]
    if arguments.json:
        record = {"plans": [item.as_dict() for item in plans], "traffic": [asdict(item) for item in traffic]}
        print(json.dumps(record, indent=2))
    else:
        for item in plans:
            print_plan(item)
            print()
        if traffic:
            links = f", on links of {arguments.bandwidth}/s and {arguments.latency:g} microseconds" if link else ""
            print(f"Computed, not measured: what each rank sends in a step, with FSDP2 and bfloat16 gradients{links}\n")
            print(traffic_table(traffic))
    if arguments.plot:
        plans[0].plot(arguments.plot)
    return 0 if all(item.fitting for item in plans) else 1
