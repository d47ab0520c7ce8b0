"""Under torchrun: FSDP2 with steps inside backward, a checkpoint after each, and a rank that is lost in one of them.

`python -m tests.distributed.killed FOLDER LOAD [SIGNAL PLACE]` prints a line of JSON on each rank that is left. SIGNAL
is SIGKILL or SIGSTOP (the others then wait until their collective times out). PLACE is where the last rank gets it in
its third step: in a `hook` of a block whose gradient has just been reduced, or `between` the reductions of that block.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from adafactor import Adafactor, step_in_backward
from tests.distributed.nets import Deep, batch, fsdp, made
from tests.distributed.rig import everywhere, line, part, whole
from tests.distributed.test_checkpoints import load, save

STEPS, FAILS, SECONDS = 4, 2, 8  # the number of the step that fails, from 0; until a collective times out
BLOCK = "blocks.1.layers.up.weight"  # gradients come to `blocks.2` first, then to `blocks.1`
REDUCTION = 4  # of a backward: the second one of `blocks.1`


class Loss:
    """Ends this rank in the third step, where it was told to."""

    def __init__(self, model: nn.Module, name: str, place: str):
        """Put hooks where it may happen; they come before those of `step_in_backward`."""
        self.number, self.sent, self.is_on = signal.Signals[name], 0, False
        if place == "hook":
            model.get_parameter(BLOCK).register_post_accumulate_grad_hook(self.happen)
        else:
            self.all_reduce, dist.all_reduce = dist.all_reduce, self.reduce

    def happen(self, *_: Any) -> None:
        """Do it, if it is time."""
        if self.is_on:
            os.kill(os.getpid(), self.number)

    def reduce(self, *args: Any, **keywords: Any) -> Any:
        """All-reduce, except for the one that is not joined."""
        self.sent += self.is_on
        if self.sent == REDUCTION:
            self.happen()
        return self.all_reduce(*args, **keywords)


def survive(model: nn.Module, optimizer: Adafactor, loss: Tensor) -> None:
    """Take the step that fails: what has stepped has done so as a whole, all else is as it was."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}  # after a failure some are gathered
    held = {name: {"weight": p, **optimizer.state[p]} for name, p in params.items()}
    before = {name: {key: part(value).numpy().tobytes() for key, value in own.items()} for name, own in held.items()}
    with pytest.raises(RuntimeError, match="Connection closed|Connection reset|Timed out"):
        loss.backward()
    for name, own in held.items():
        changed = {key for key, value in own.items() if part(value).numpy().tobytes() != before[name][key]}
        assert (changed >= {"step", "weight"}) == (name.startswith("blocks.2.") and "unused" not in name), name
        assert not changed or "step" in changed, name
    with pytest.raises(RuntimeError):  # what is left cannot be taken for a step of the whole
        optimizer.step()


def main() -> None:
    """Train from a checkpoint, if one is given, to the end, or to the failure."""
    folder, before, *fate = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that one is gone
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    pids = everywhere(os.getpid())
    model = fsdp(line())(made(Deep))
    lost = Loss(model, *fate) if fate and dist.get_rank() == dist.get_world_size() - 1 else None
    optimizer = Adafactor(model.named_parameters(), beta1=0.9)
    step_in_backward(model, optimizer)
    if before != "-":
        load(model, optimizer, Path(before))
    losses = []
    for step in range(0 if before == "-" else int(Path(before).name), STEPS):
        loss = model(batch(step, dist.get_rank())).mean()
        if fate and step == FAILS:
            if lost is not None:
                lost.is_on = True
            survive(model, optimizer, loss)
            print("SURVIVED\n", end="", flush=True)
            if dist.get_rank() == 0:
                os.kill(pids[-1], signal.SIGKILL)  # one that is only stopped
            os._exit(0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        save(model, optimizer, Path(folder) / str(step + 1))
    bits = hash(tuple(whole(p).double().sum().item() for p in model.parameters()))
    print("RESULT " + json.dumps([dist.get_rank(), losses[-1], bits]) + "\n", end="", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
