"""Benchmark a sharded step: ours and fused AdamW on the same shards, and how much of ours is collectives.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m benchmarks.sharded --suite gpt2

Every parameter is cut along its first axis, as FSDP2 does, over all ranks. Each contender steps its own copy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

from adafactor import Adafactor
from benchmarks import machine, suites
from benchmarks.suites import Suite

CONTENDERS: dict[str, Callable[[list[DTensor]], Optimizer]] = {
    "AdamW, fused": lambda params: AdamW(params, fused=True),
    "adafactor": lambda params: Adafactor(params),
}


def main() -> None:
    """Measure, and have the first rank print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", default="gpt2", help=f"one of {', '.join(suites.SUITES)} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed (default: %(default)s)")
    arguments = parser.parse_args()
    suite = suites.find(arguments.suite)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    load = machine.load_average()
    rows = measure(suite, mesh, arguments.rounds)
    if dist.get_rank() == 0:
        ranks, threads = mesh.size(), torch.get_num_threads()
        print(f"{suite.title}, {len(suite.shapes)} tensors, {ranks} ranks of {threads} threads, gloo, load {load}")
        print(f"{'':14} {'ms':>8} {'× AdamW':>8} {'collectives, ms':>16} {'share':>6}")
        base = rows["AdamW, fused"][0]
        for name, (step, sent) in rows.items():
            print(f"{name:14} {1e3 * step:8.2f} {step / base:8.2f} {1e3 * sent:16.2f} {sent / step:6.0%}", flush=True)
    dist.barrier()
    os._exit(0)  # the ordinary end may abort: a thread of gloo that still has a tensor wants Python, which is gone


def measure(suite: Suite, mesh: DeviceMesh, rounds: int) -> dict[str, tuple[float, float]]:
    """The median seconds of a step, and of the collectives in it, on this rank; contenders take turns."""
    optimizers = {name: make(shards(suite, mesh)) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    sent: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(-2, rounds):  # two to make the state and to compile
        for name, optimizer in optimizers.items():
            dist.barrier()
            with timed_collectives() as spent:
                began = time.perf_counter()
                optimizer.step()
                taken = time.perf_counter() - began
            if number >= 0:
                seconds[name].append(taken)
                sent[name].append(sum(spent))
    return {name: (statistics.median(seconds[name]), statistics.median(sent[name])) for name in optimizers}


def shards(suite: Suite, mesh: DeviceMesh) -> list[DTensor]:
    """Parameters with gradients, the same on every rank before they are cut."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in suite.shapes:
        x, g = torch.randn(2, *shape, generator=generator).mul_(0.02)
        params.append(cut(x, mesh))
        params[-1].requires_grad_()
        params[-1].grad = cut(g, mesh)
    return params


def cut(t: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's part, in memory of its own."""
    part = distribute_tensor(t, mesh, [Shard(0)])
    return part.clone().detach()  # type: ignore[return-value]


@contextmanager
def timed_collectives() -> Iterator[list[float]]:
    """Note how long every all-reduce takes, waits for other ranks among it."""
    original, spent = dist.all_reduce, list[float]()

    def timed(*args: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **keywords)
        spent.append(time.perf_counter() - began)
        return result

    dist.all_reduce = timed
    try:
        yield spent
    finally:
        dist.all_reduce = original


if __name__ == "__main__":
    main()
