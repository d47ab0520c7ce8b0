"""Under torchrun: rank 1 leaves before its step, or never takes it; rank 0 prints what its own step raises."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from adafactor import Adafactor

SECONDS = 5


def main() -> None:
    """`python -m tests.distributed.silence dies|sleeps`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    p = distribute_tensor(torch.ones(6, 5), init_device_mesh("cpu", (2,)), [Shard(0)])
    p.requires_grad_()
    optimizer = Adafactor([p], backend="eager")
    p.grad = torch.ones_like(p).detach()
    optimizer.step()
    if dist.get_rank() == 1:
        time.sleep(0 if sys.argv[1] == "dies" else 4 * SECONDS)
        os._exit(0)  # a status that does not make torchrun end the others
    time.sleep(1)
    began, before = time.monotonic(), p.detach().to_local().clone()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    except Exception as error:
        same = torch.equal(before, p.detach().to_local())  # type: ignore[attr-defined]
        print(
            f"RAISED {type(error).__name__} after {time.monotonic() - began:.0f} s, unchanged {same}: {error}",
            flush=True,
        )
    os._exit(0)


if __name__ == "__main__":
    main()
