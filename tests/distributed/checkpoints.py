"""torch.distributed.checkpoint: saved under one sharding, continued under another as if nothing had happened.

`python -m tests.distributed.checkpoints`, under torchrun, is one link of a chain of runs on different numbers of ranks;
with a format in MOMENTUM, that of a momentum in 8 or 16 bits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from adafactor import Adafactor
from tests.distributed.models import WORDS, Net, by_columns, fsdp, tensor_parallel
from tests.distributed.placements import errors, everywhere, whole
from tests.distributed.worker import end

SAVED, LAST = 3, 6
FORMAT = os.environ.get("MOMENTUM", "float32")
KEYWORDS = {"beta1": 0.9, "lr": 0.05}  # momentum is state as large as the parameters


def make(how: str, dtype: torch.dtype, seed: int = 0, momentum: str = FORMAT) -> tuple[nn.Module, Adafactor]:
    """A model under some sharding, and its optimizer; large enough for the format of the momentum."""
    torch.manual_seed(seed)
    model: nn.Module = (Net(even=True) if momentum == "float32" else Net(True, width=256, inner=512)).to(dtype)
    size = dist.get_world_size()
    if how == "FSDP2":
        model = fsdp(init_device_mesh("cpu", (size,)))(model)
    elif how == "by columns":
        model = fsdp(init_device_mesh("cpu", (size,)), shard_placement_fn=by_columns)(model)
    elif how == "TP":
        model = tensor_parallel(init_device_mesh("cpu", (size,)))(model)
    elif how == "HSDP":
        model = fsdp(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "data")))(model)
    elif how == "FSDP2 × TP":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
        model = fsdp(mesh["data"])(tensor_parallel(mesh["model"])(model))
    return model, Adafactor(model.named_parameters(), momentum_dtype=momentum, **KEYWORDS)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: Adafactor, steps: range) -> list[list[Tensor]]:
    """Some steps, each with a batch of its own that all ranks share; the parameters after each."""
    path = []
    for step in steps:
        optimizer.zero_grad()
        ids = torch.randint(WORDS, (8, 4), generator=torch.Generator().manual_seed(step))
        model(ids).mean().backward()
        optimizer.step()
        path.append([whole(p) for p in model.parameters()])
    return path


def save(model: nn.Module, optimizer: Adafactor, folder: str) -> None:
    """Model and optimizer, every rank its part."""
    weights, state = get_state_dict(model, optimizer)
    save_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Adafactor, folder: str) -> None:
    """Model and optimizer, every rank the part that it has now."""
    weights, state = get_state_dict(model, optimizer)
    load_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def uninterrupted(dtype: torch.dtype, momentum: str = FORMAT) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Where one process starts, and how it goes."""
    model, optimizer = make("plain", dtype, momentum=momentum)
    starts = [p.detach().clone() for p in model.parameters()]
    return starts, train(model, optimizer, range(LAST))


def kinds(optimizer: Adafactor) -> set[str]:
    """The dtypes of the statistics."""
    return {str(v.dtype) for state in optimizer.state.values() for key, v in state.items() if key != "step"}


def moved(first: str, second: str, dtype: torch.dtype, momentum: str = FORMAT) -> dict[str, Any]:
    """Save under one sharding, load under another into a model of other weights, go on."""
    folder = everywhere(tempfile.mkdtemp())[0]
    model, optimizer = make(first, dtype, momentum=momentum)
    train(model, optimizer, range(SAVED))
    save(model, optimizer, folder)
    other, resumed = make(second, dtype, seed=1, momentum=momentum)
    load(other, resumed, folder)
    path = train(other, resumed, range(SAVED, LAST))
    starts, reference = uninterrupted(dtype, momentum)
    return {"error": max(errors(path[-1], starts, reference)), "dtypes": sorted(kinds(resumed))}


def from_one_device(dtype: torch.dtype) -> dict[str, Any]:
    """The `state_dict` of plain tensors, loaded by a sharded optimizer; and the keys of both."""
    model, optimizer = make("plain", dtype)
    train(model, optimizer, range(SAVED))
    weights, state = model.state_dict(), optimizer.state_dict()
    sharded, resumed = make("FSDP2", dtype, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(sharded, weights, options=options)
    resumed.load_state_dict(state)
    assert all(isinstance(v, DTensor) for s in resumed.state.values() for k, v in s.items() if k != "step")
    path = train(sharded, resumed, range(SAVED, LAST))
    starts, reference = uninterrupted(dtype)
    ours = {key: sorted(values) for key, values in resumed.state_dict()["state"].items()}
    theirs = {key: sorted(values) for key, values in state["state"].items()}
    back, again = make("plain", dtype, seed=2)
    back.load_state_dict({key: v.full_tensor() for key, v in sharded.state_dict().items()})
    again.load_state_dict(resumed.state_dict())
    return {
        "error": max(errors(path[-1], starts, reference)),
        "same keys": ours == theirs,
        "and back": all(
            torch.equal(again.state[q][key], whole(value))
            for p, q in zip(sharded.parameters(), back.parameters(), strict=True)
            for key, value in resumed.state[p].items()
        ),
    }


def checks() -> Iterator[tuple[str, Any]]:
    """The name of a move, and how far from the uninterrupted run it ends."""
    f32, bf16 = torch.float32, torch.bfloat16
    yield "float32 | one device → FSDP2", from_one_device(f32)
    yield "float32 | FSDP2 → plain", moved("FSDP2", "plain", f32)
    yield "float32 | by columns → FSDP2", moved("by columns", "FSDP2", f32)
    yield "bfloat16 | FSDP2 → by columns", moved("FSDP2", "by columns", bf16)
    if dist.get_world_size() == 2:
        yield "float32 | TP → FSDP2", moved("TP", "FSDP2", f32)
    else:
        yield "float32 | HSDP → FSDP2 × TP", moved("HSDP", "FSDP2 × TP", f32)
        yield "float32 | FSDP2 × TP → FSDP2", moved("FSDP2 × TP", "FSDP2", f32)
        yield "bfloat16 | FSDP2 → HSDP", moved("FSDP2", "HSDP", bf16)


def main() -> None:
    """One link: `HOW FIRST LAST LOAD SAVE` continues to step LAST, and dies there first if DIE is set."""
    how, first, last, before, after = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dtype = (
        torch.float32 if FORMAT == "float32" else torch.float64
    )  # where the momentum's rounding is the same anywhere
    model, optimizer = make(how, dtype, seed=int(first))
    if before != "-":
        load(model, optimizer, before)
    path = train(model, optimizer, range(int(first), int(last)))
    if os.environ.get("DIE") == str(dist.get_rank()):
        os.kill(os.getpid(), 9)  # between two checkpoints
    save(model, optimizer, after)
    starts, reference = uninterrupted(dtype)
    if dist.get_rank() == 0:
        result = max(errors(path[-1], starts, reference[: int(last)]))
        (Path(after) / "error.json").write_text(json.dumps(result))
    dist.barrier()
    end(0)


if __name__ == "__main__":
    main()
