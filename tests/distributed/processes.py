"""What threads cannot show, under torchrun on two ranks: `python -m tests.distributed.processes FOLDER`."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from adafactor import Adafactor, step_in_backward
from tests.distributed.nets import Net, assert_near, copied, fsdp, made, train
from tests.distributed.rig import assert_same_everywhere, line
from tests.distributed.test_checkpoints import assert_restored, spoil, start
from tests.distributed.test_in_backward import assert_same_inside
from tests.distributed.test_models import assert_trains_as_one_process


def saved_meanwhile(folder: Path) -> None:
    """A checkpoint that `async_save` writes while training goes on is that of the moment it was asked for."""
    model, optimizer = start("FSDP2", "int8", torch.float32)
    train(model, optimizer, range(2))
    apart = dist.new_group(backend="gloo")  # its collectives come from another thread, and not into ours
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    future: Any = async_save(state, checkpoint_id=str(folder), process_group=apart)
    end = train(model, optimizer, range(2, 4))
    future.result()
    other, resumed = start("FSDP2", "int8", torch.float32)
    spoil(other)
    loaded: dict[str, Any] = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, resumed),
    }
    load(loaded, checkpoint_id=str(folder))
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    assert all(map(torch.equal, end, train(other, resumed, range(2, 4))))


def redundant() -> None:
    """DDP with ZeroRedundancyOptimizer, which has each parameter stepped by one rank, is one process."""
    plain, starts = copied(made(Net, torch.float64))
    model = DistributedDataParallel(copied(plain)[0])
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Adafactor, lr=0.05)
    ours = train(model, optimizer, range(4), parts=2)
    assert_near(ours, train(plain, Adafactor(plain.parameters(), lr=0.05), range(4)), starts, 1e-12)
    assert_same_everywhere(*ours)


def in_a_pipeline() -> None:
    """A stage on every rank: inside backward, FSDP2's stages cannot step, since the schedule scales gradients later."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module, mesh = nn.Linear(6, 6), init_device_mesh("cpu", (size, 1), mesh_dim_names=("stage", "data"))
    fully_shard(module, mesh=mesh["data"])
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = Adafactor(module.named_parameters())
    step_in_backward(module, optimizer)
    x = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match=r"came outside of any backward\(\), as a pipeline's schedule"):
        schedule.step(*([x] if rank == 0 else []), target=x if rank == size - 1 else None)


def main() -> None:
    """All of it; a rank that fails ends its process, and torchrun ends the others."""
    warnings.filterwarnings("error", module="adafactor")  # torch itself gives some
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert_trains_as_one_process(lambda: fsdp(line()), parts=2)
    assert_same_inside(lambda: fsdp(line()))
    for momentum in ("float32", "int8"):
        for offload in (False, True):
            assert_restored(momentum, broadcast=True, full_state_dict=True, cpu_offload=offload)
    saved_meanwhile(Path(sys.argv[1]))
    redundant()
    in_a_pipeline()
    dist.barrier()
    os._exit(0)  # not through the ordinary end: a thread of gloo may still hold tensors when Python is gone


if __name__ == "__main__":
    main()
