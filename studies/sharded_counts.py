"""Launches and host time of a sharded step of Llama 7B's 291 tensors, without a GPU: numbers of docs/gpu-verified.md.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m studies.sharded_counts

Counted: the Triton backend prepares shards of the true sizes, in memory that nobody touches. A stand-in takes its
launches, and every other operation that a device would have to launch is noted as it comes. Timed: steps of the same
number of tensors, a 64th as long along each axis, so that hardly anything but Python is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from adafactor import Adafactor
from adafactor.check.timing import note_launches
from adafactor.core import sums
from adafactor.planning.models import Shape
from studies.gpu_counts import MODELS, Model, Operations, fused_adamw, on_a_cpu

LLAMA, STEPS, SMALLER = MODELS["llama"], 30, 64


def main() -> None:
    """Have the first rank print what both found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lines = [*counted(mesh), *timed(mesh)]
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.barrier()
    os._exit(0)  # the ordinary end may abort: a thread of gloo that still has a tensor wants Python, which is gone


def counted(mesh: DeviceMesh) -> Iterator[str]:
    """What a device would have to launch in a step, and how long the host takes to say so."""
    with as_on_a_device(), on_a_cpu():
        params = shards(mesh, LLAMA.shapes, LLAMA.dtype, torch.empty)
        optimizer = Adafactor(params, backend="triton")
        for _ in range(3):
            with note_launches() as launches:
                optimizer.step()
        with note_launches(), Operations() as operations:
            optimizer.step()
        with note_launches():
            host = least_time(optimizer.step)
    parts = Model("a rank's part", tuple(tuple(p.to_local().shape) for p in params), LLAMA.dtype)
    yield f"| Llama 7B in bfloat16, {len(params)} tensors on {mesh.size()} ranks | launches in a step |"
    yield "|---|---|"
    yield f"| our kernels, counted | {len(launches)} |"
    yield f"| torch's operations beside them, counted; two of them are the collectives | {operations.count:,} |"
    yield f"| fused AdamW, computed | {fused_adamw(parts)} |"
    yield ""
    yield f"the host's own thread, which executes torch's operations here: {1e3 * host:.1f} ms"


def timed(mesh: DeviceMesh) -> Iterator[str]:
    """The least time of a rank's own thread in a step of small tensors, waits left out."""
    shapes = [tuple(-(-n // SMALLER) for n in shape) for shape in LLAMA.shapes]
    for name, optimizer in (
        ("adafactor", Adafactor(shards(mesh, shapes, torch.float32, torch.rand))),
        ("AdamW, fused", AdamW(shards(mesh, shapes, torch.float32, torch.rand), fused=True)),
    ):
        yield f"{name}, float32 on a CPU, {len(shapes)} small tensors: {1e3 * least_time(optimizer.step):.1f} ms"


def least_time(step: Callable[[], object]) -> float:
    """Seconds of this thread's own work."""
    times = []
    for _ in range(STEPS):
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
    return min(times)


def shards(mesh: DeviceMesh, shapes: Sequence[Shape], dtype: torch.dtype, make: Callable[..., Tensor]) -> list[DTensor]:
    """Parameters with gradients, cut along their first axis."""
    params = list[DTensor]()
    for first, *others in shapes:
        size = -(-first // mesh.size())
        x, g = (make(size, *others, dtype=dtype) for _ in range(2))
        params.append(DTensor.from_local(x, mesh, [Shard(0)], run_check=False))
        params[-1].requires_grad_()
        params[-1].grad = DTensor.from_local(g, mesh, [Shard(0)], run_check=False)
    return params


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Let no scalar be read by the host, and a step be taken by its backend although a dispatch mode looks on."""
    before, sums.on_host = sums.on_host, lambda t: False
    try:
        yield
    finally:
        sums.on_host = before


if __name__ == "__main__":
    main()
