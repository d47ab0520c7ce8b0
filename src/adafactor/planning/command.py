"""`adafactor plan`: from the command line to the tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from adafactor.planning.bill import plan
from adafactor.planning.models import PRESETS
from adafactor.planning.optimizers import ADAMW, SETTINGS
from adafactor.planning.sharded import TRAFFIC, traffic_table
from adafactor.planning.show import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("models", nargs="*", help=f"{', '.join(PRESETS)}; module:function; or a transformers config.json")
    add("--budget", metavar="SIZE", help="memory of a device, such as 24GiB or 24GB: which settings fit?")
    add(
        "--shards",
        nargs="+",
        type=int,
        metavar="N",
        help="how many devices share the model; also shows what a step sends between them",
    )
    add("--settings", nargs="+", metavar="KEY", help=f"show only these: {', '.join(SETTINGS)}")
    add(
        "--device",
        help="where the step runs, such as cpu or cuda (default: the accelerator that torch finds, or the CPU)",
    )
    add("--adamw", choices=ADAMW, default="fused", help="which of torch's AdamWs to count (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the plan of one model into this picture")


def run(arguments: argparse.Namespace) -> int:
    """Print a plan for every model and number of devices, then the traffic; without a model only the traffic."""
    shards = arguments.shards or [1]
    if not arguments.models and not arguments.shards:
        raise ValueError(f"name a model: {', '.join(PRESETS)}; module:function; or a transformers config.json")
    if min(shards) < 1:
        raise ValueError(f"--shards {min(shards)} must be at least 1")
    if arguments.plot and (len(arguments.models), len(shards)) != (1, 1):
        raise ValueError(f"--plot {arguments.plot} draws one model with one number of devices")
    for model in arguments.models:
        for count in shards:
            bill = plan(
                model,
                settings=arguments.settings,
                shards=count,
                budget=arguments.budget,
                device=arguments.device,
                adamw=arguments.adamw,
            )
            show(bill)
            print()
            if arguments.plot:
                bill.plot(arguments.plot)
    if arguments.shards:
        print("What each rank sends in a step, with FSDP2 and bfloat16 gradients:\n")
        print(traffic_table(arguments.models or TRAFFIC, shards))
    return 0
