"""The command `adafactor plan`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path

from adafactor.planning.communication import MODELS, Link, traffic_of, traffic_table
from adafactor.planning.memory import ADAMW_VARIANTS, SETTINGS, plan
from adafactor.planning.models import PRESETS
from adafactor.planning.show import parse_size, print_plan

# of `adafactor.plan`: the options of the same names are passed on
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
    sharded = arguments.models or MODELS if arguments.shards else ()
    traffic = [traffic_of(model, count, link) for model in sharded for count in shards]
    if arguments.json:
        record = {"plans": [item.as_dict() for item in plans], "traffic": [asdict(item) for item in traffic]}
        print(json.dumps(record, indent=2))
    else:
        for item in plans:
            print_plan(item)
            print()
        if traffic:
            print("Computed, not measured: what each rank sends in a step, with FSDP2 and bfloat16 gradients\n")
            print(traffic_table(traffic))
    if arguments.plot:
        plans[0].plot(arguments.plot)
    return 0 if all(item.fitting for item in plans) else 1
