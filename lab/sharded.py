"""A run on several processes: `torchrun -m lab run …` shards the model with FSDP2 and shares out every batch.

The loss and the gradients are those of the whole batch, so the run is that of one process up to rounding. Checkpoints
and weights are whole, and written by the first process only: a run may continue on another number of processes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.batches import Batch


class Processes:
    """The processes that torchrun started, seen from one of them; alone, it changes nothing."""

    def __init__(self) -> None:
        """Meet the others, if there are any."""
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.leader = self.rank == 0
        if self.size > 1 and not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group()

    def shard(self, model: nn.Module) -> None:
        """Leave each process its part of every parameter."""
        if self.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            device = next(model.parameters()).device.type
            fully_shard(model, mesh=init_device_mesh(device, (self.size,)))

    def seed(self, seed: int, step: int) -> None:
        """Give each process dropout of its own: a function of seed, step and process, so that a run can continue."""
        if self.size > 1:
            torch.manual_seed(hash((seed, step, self.rank)) % 2**63)

    def share(self, batch: Batch) -> tuple[Batch, float]:
        """This process's sentences, and the weight of their mean loss in that of the batch.

        FSDP2 takes the mean of the gradients over processes, so the weights have a mean of 1.
        """
        if self.size == 1:
            return batch, 1.0
        rows = torch.arange(self.rank, len(batch.source), self.size)
        empty = len(rows) == 0
        rows = torch.tensor([0]) if empty else rows  # every process has to take part
        mine = batch.rows(rows)
        return mine, 0.0 if empty else self.size * mine.targets / batch.targets

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over the processes."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums / self.size]

    def whole(self, state: Any) -> Any:
        """A state dict with every sharded tensor put together; all processes call it."""
        if isinstance(state, dict):
            return {key: self.whole(value) for key, value in state.items()}
        if isinstance(state, list):
            return [self.whole(value) for value in state]
        return state.full_tensor() if isinstance(state, Tensor) and hasattr(state, "full_tensor") else state

    def load(self, model: nn.Module, weights: dict[str, Any]) -> None:
        """Load whole weights into the model as it is."""
        if self.size == 1:
            model.load_state_dict(weights)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))

    def leave(self) -> None:
        """End this process, if there are others.

        Not by Python's own end: a thread of gloo's may still hold tensors of a collective, and one that wants Python to
        let go of them when it is gone aborts the process (torch 2.13; seen in one run of ten).
        """
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()
