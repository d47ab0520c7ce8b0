"""Under torchrun: FSDP2 with steps inside backward, a checkpoint after each, and a rank that fails in one of them.

`python -m tests.distributed.killed FOLDER LOAD [FAILURE PLACE]` prints a line of JSON on each rank that is left.
FAILURE is `killed` (SIGKILL) or `stopped` (SIGSTOP: the others wait until their collective times out). PLACE is where
the last rank fails in its third backward: in a `hook` of a block whose gradient has just been reduced, or `between`
the two reductions of that block's step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from adafactor import Adafactor, step_in_backward
from adafactor.core.dtensor import local
from tests.distributed.checkpoints import load, save
from tests.distributed.faults import is_last, raised
from tests.distributed.in_backward import Deep, loss, wrap
from tests.distributed.placements import everywhere, fingerprint

STEPS, FAILS, SECONDS = 4, 2, 8  # the number of the step that fails, from 0; until a collective times out
BLOCK = "blocks.1.layers.up.weight"  # gradients come to `blocks.2` first, then to `blocks.1`
REDUCTION = 4  # of a backward: the second one of `blocks.1`


class Failure:
    """Ends this rank in the third step, where it was told to."""

    def __init__(self, model: nn.Module, kind: str, place: str):
        """Put hooks where it may happen; they come before those of `step_in_backward`."""
        self.number, self.sent = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind], 0
        self.is_on = False
        if place == "hook":
            model.get_parameter(BLOCK).register_post_accumulate_grad_hook(self.fail)
        else:
            self.all_reduce, dist.all_reduce = dist.all_reduce, self.reduce

    def fail(self, *_: Any) -> None:
        """Do it, if it is time."""
        if self.is_on:
            os.kill(os.getpid(), self.number)

    def reduce(self, *args: Any, **keywords: Any) -> Any:
        """All-reduce, except for the one that is not joined."""
        self.sent += self.is_on
        if self.sent == REDUCTION:
            self.fail()
        return self.all_reduce(*args, **keywords)


def survive(model: nn.Module, optimizer: Adafactor) -> dict[str, Any]:
    """Take the step that fails; tell what it raised, what has changed, and what another attempt raises."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}  # after a failure some are gathered
    before = snapshot(params, optimizer)
    told = raised(loss(model, FAILS).backward)
    after = snapshot(params, optimizer)
    changed = {name: [key for key in after[name] if after[name][key] != before[name][key]] for name in params}
    changed = {name: keys for name, keys in changed.items() if keys}
    return {"raised": told, "changed": changed, "again": raised(optimizer.step)}


def snapshot(params: Mapping[str, Tensor], optimizer: Adafactor) -> dict[str, dict[str, str]]:
    """Of each parameter on this rank, the bits of its part, and of those of its state."""
    held = {name: {"weight": p.detach(), **optimizer.state[p]} for name, p in params.items()}
    return {name: {key: fingerprint([local(t)]) for key, t in own.items()} for name, own in held.items()}


def tell(word: str, value: dict[str, Any]) -> None:
    """Print a line at once: other ranks print into the same pipe."""
    print(f"{word} {json.dumps(value)}\n", end="", flush=True)


def main() -> None:
    """Train from a checkpoint, if one is given, to the end, or to the failure."""
    folder, before, *failure = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that one is gone
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    pids = everywhere(os.getpid())
    torch.manual_seed(0)
    model = wrap(init_device_mesh("cpu", (dist.get_world_size(),)))(Deep())
    fate = Failure(model, *failure) if failure and is_last() else None
    optimizer = Adafactor(model.named_parameters(), beta1=0.9)
    step_in_backward(model, optimizer)
    if before != "-":
        load(model, optimizer, before)
    losses = []
    for step in range(0 if before == "-" else int(Path(before).name), STEPS):
        if fate is not None:
            fate.is_on = step == FAILS
        if failure and step == FAILS:
            tell("SURVIVOR", survive(model, optimizer))
            if dist.get_rank() == 0:
                os.kill(pids[-1], signal.SIGKILL)  # one that is only stopped
            os._exit(0)
        error = loss(model, step)
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(error.item())
        save(model, optimizer, str(Path(folder) / str(step + 1)))
    bits = fingerprint([p.detach() for p in model.parameters()])
    tell("RESULT", {"losses": losses, "bits": bits})
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
