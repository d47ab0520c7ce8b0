"""Checkpoints of a momentum in 8 or 16 bits: every kind that torch.distributed has, and one in the wrong format."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import async_save

from adafactor import Adafactor
from tests.distributed.checkpoints import SAVED, load, make, moved, save, train
from tests.distributed.momentum import FORMATS
from tests.distributed.placements import everywhere, whole

CHAIN = ("TP", "FSDP2", "by columns", "plain", "FSDP2")


def state_of(optimizer: Adafactor) -> dict[str, Any]:
    """All tensors of a state by parameter and key, whole."""
    saved = optimizer.state_dict()["state"]
    return {f"{number} {key}": whole(value) for number, state in saved.items() for key, value in state.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same bits in the same dtypes, on every rank."""
    equal = one.keys() == other.keys()
    equal &= all(t.dtype == other[key].dtype and torch.equal(t, other[key]) for key, t in one.items())
    return all(everywhere(equal))


def trained(momentum: str, seed: int = 0) -> tuple[nn.Module, Adafactor]:
    """A model under FSDP2 after some steps."""
    model, optimizer = make("FSDP2", torch.float32, seed, momentum)
    train(model, optimizer, range(SAVED))
    return model, optimizer


def saved_while_it_trains(momentum: str) -> bool:
    """`async_save` keeps the state of the moment when it is called."""
    folder = everywhere(tempfile.mkdtemp())[0]
    model, optimizer = trained(momentum)
    before = state_of(optimizer)
    weights, state = get_state_dict(model, optimizer)
    own = dist.new_group(backend="gloo")  # the thread that writes talks while the training does
    writing = async_save({"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=own)
    train(model, optimizer, range(SAVED, SAVED + 2))
    writing.result()  # type: ignore[union-attr]
    other, resumed = make("FSDP2", torch.float32, 1, momentum)
    load(other, resumed, folder)
    return same(before, state_of(resumed)) and not same(before, state_of(optimizer))


def whole_on_the_cpu(momentum: str) -> bool:
    """One rank has the whole state in plain tensors, and gives each its part."""
    model, optimizer = trained(momentum)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        kinds = {type(v) for values in state["state"].values() for v in values.values()}  # type: ignore[union-attr]
        assert kinds == {torch.Tensor}
    other, resumed = make("FSDP2", torch.float32, 1, momentum)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, resumed, state, options=options)
    return same(state_of(optimizer), state_of(resumed))


def into_another_format(momentum: str, into: str) -> str:
    """What torch's loader says, which knows nothing of formats and would cast the numbers of one to the other's."""
    folder = everywhere(tempfile.mkdtemp())[0]
    model, _ = make("FSDP2", torch.float32, 0, "int8")
    optimizers = {
        name: Adafactor(model.named_parameters(), beta1=0.9, momentum_dtype=name) for name in (momentum, into)
    }
    save(model, optimizers[momentum], folder)
    before = state_of(optimizers[into])
    try:
        load(model, optimizers[into], folder)
    except (CheckpointException, RuntimeError) as error:
        assert same(before, state_of(optimizers[into]))
        return str(error)
    return ""


def checks() -> Iterator[tuple[str, Any]]:
    """Each way to save and load, in each format."""
    warnings.filterwarnings("ignore", ".*stepped by eager PyTorch", RuntimeWarning)
    for momentum in FORMATS:
        for first, second in pairwise(CHAIN):
            result = moved(first, second, torch.float64, momentum)
            yield f"moved | {first} → {second} {momentum}", result
        yield f"asynchronous {momentum}", saved_while_it_trains(momentum)
        yield f"whole on the CPU {momentum}", whole_on_the_cpu(momentum)
    yield "int8 into float32", everywhere(into_another_format("int8", "float32"))
    yield "float32 into int8", everywhere(into_another_format("float32", "int8"))
