"""Under torchrun: FSDP2 with steps inside backward, a checkpoint after each, and a rank that is killed in one of them.

`python -m tests.distributed.killed FOLDER` trains to the end and prints a line on each rank, then trains again and
loses the last rank in the third step: between the two reductions of a block whose gradient has just been reduced.
With CHECKPOINT in place of FOLDER, a folder that has a number of steps as its name, it goes on to the end from there.
"""

from __future__ import annotations

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
from tests.distributed.rig import everywhere, held, line, part, whole
from tests.distributed.test_checkpoints import load, save

STEPS, FAILS, SECONDS = 4, 2, 8  # the number of the step that fails, from 0; until a collective times out
REDUCTION = 4  # of a backward: gradients come to `blocks.2` first, and this is the second one of `blocks.1`


def lose_this_rank() -> None:
    """All-reduce from now on, except for the one that is not joined."""
    all_reduce, sent = dist.all_reduce, 0

    def reduce(*args: Any, **keywords: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == REDUCTION:
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(*args, **keywords)

    dist.all_reduce = reduce


def survive(model: nn.Module, optimizer: Adafactor, loss: Tensor) -> None:
    """Take the step that fails: what has stepped has done so as a whole, all else is as it was."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}  # after a failure some are gathered
    own = {name: {"weight": p, **optimizer.state[p]} for name, p in params.items()}
    before = {name: {key: part(value).numpy().tobytes() for key, value in of.items()} for name, of in own.items()}
    with pytest.raises(RuntimeError, match="Connection closed|Connection reset|Timed out"):
        loss.backward()
    for name, of in own.items():
        changed = {key for key, value in of.items() if part(value).numpy().tobytes() != before[name][key]}
        assert (changed >= {"step", "weight"}) == (name.startswith("blocks.2.") and "unused" not in name), name
        assert not changed or "step" in changed, name
    with pytest.raises(RuntimeError):  # what is left cannot be taken for a step of the whole
        optimizer.step()


def started() -> tuple[nn.Module, Adafactor]:
    """A model that steps inside backward, with momentum."""
    model = fsdp(line())(made(Deep))
    optimizer = Adafactor(model.named_parameters(), beta1=0.9)
    step_in_backward(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Adafactor, steps: range, folder: Path | None = None) -> None:
    """Some steps, with a checkpoint after each if there is a folder for them."""
    for step in steps:
        model(batch(step, dist.get_rank())).mean().backward()
        optimizer.step()
        if folder is not None:
            save(model, optimizer, folder / str(step + 1))
    if steps[-1] == STEPS - 1:
        bits = hash(tuple(whole(t).double().sum().item() for t in held(optimizer)))
        print(f"RESULT {dist.get_rank()} {bits}\n", end="", flush=True)


def main() -> None:
    """To the end from a checkpoint; or from the start, and then once more to the failure."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that one is gone
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    model, optimizer = started()
    if folder.name.isdecimal():
        load(model, optimizer, folder)
        train(model, optimizer, range(int(folder.name), STEPS))
    else:
        train(model, optimizer, range(STEPS))
        model, optimizer = started()
        train(model, optimizer, range(FAILS), folder)
        loss = model(batch(FAILS, dist.get_rank())).mean()
        everywhere(None)  # all are here
        if dist.get_rank() == dist.get_world_size() - 1:
            lose_this_rank()
        survive(model, optimizer, loss)
        print("SURVIVED\n", end="", flush=True)
        os._exit(0)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
