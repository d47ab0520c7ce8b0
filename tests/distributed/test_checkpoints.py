"""Checkpoints move between shardings and numbers of ranks, in every format of the momentum."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from adafactor import Adafactor
from adafactor.core import dtensor
from tests.distributed.nets import (
    assert_near,
    both,
    by_columns,
    copied,
    even,
    fsdp,
    made,
    tensor_parallel,
    train,
    wide,
)
from tests.distributed.rig import assert_unchanged, held, line, part, square, whole
from tests.ranks import on_ranks

FORMATS = pytest.mark.parametrize("momentum", ["float32", "bfloat16", "int8"])
SHARDINGS: dict[str, Any] = {
    "plain": lambda: lambda model: model,
    "FSDP2": lambda: fsdp(line()),
    "by columns": lambda: fsdp(line(), shard_placement_fn=by_columns),
    "TP": lambda: tensor_parallel(line()),
    "HSDP": lambda: fsdp(square()),
    "FSDP2 × TP": lambda: both(square()),
}


def start(
    how: str, momentum: str = "float32", dtype: torch.dtype = torch.float64, **keywords: Any
) -> tuple[nn.Module, Adafactor]:
    """A model under some sharding, large enough for int8 where that is asked for, and its optimizer."""
    model = SHARDINGS[how]()(made(even if momentum == "float32" else wide, dtype))
    return model, Adafactor(model.named_parameters(), beta1=0.9, lr=0.05, momentum_dtype=momentum, **keywords)


def save(model: nn.Module, optimizer: Adafactor, folder: Path) -> None:
    """Every rank its part."""
    weights, state = get_state_dict(model, optimizer)
    save_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=str(folder))


def load(model: nn.Module, optimizer: Adafactor, folder: Path) -> None:
    """Every rank the part that it has now."""
    weights, state = get_state_dict(model, optimizer)
    load_checkpoint({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def spoil(model: nn.Module) -> None:
    """Other weights, so that a load that does nothing is seen."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)


def link(how: str, momentum: str, step: int, before: Path | None, after: Path) -> list[Tensor]:
    """Load, take a step, save."""
    model, optimizer = start(how, momentum)
    if before is not None:
        spoil(model)
        load(model, optimizer, before)
    end = train(model, optimizer, range(step, step + 1))
    save(model, optimizer, after)
    kept = {v.dtype for state in optimizer.state.values() for k, v in state.items() if k in ("row", "col", "full")}
    assert kept == {torch.float64}
    return end


CHAIN = [(2, "FSDP2"), (4, "FSDP2"), (1, "plain"), (2, "TP"), (4, "FSDP2 × TP"), (2, "by columns"), (4, "HSDP")]


@FORMATS
def test_a_run_moves_over_2_4_and_1_ranks_and_every_sharding(momentum: str, tmp_path: Path) -> None:
    """In float64, where no sum in another order moves a rounded momentum across a threshold."""
    model, optimizer = start("plain", momentum)
    _, starts = copied(model)
    before = None
    for step, (size, how) in enumerate(CHAIN):
        after = tmp_path / str(step)
        ends = on_ranks(size, link, how, momentum, step, before, after)
        assert_near(ends[-1], train(model, optimizer, range(step, step + 1)), starts, 1e-11)
        before = after


def test_a_momentum_of_another_format_is_not_loaded_and_nothing_changes(tmp_path: Path) -> None:
    """Torch's loader knows nothing of formats; it misses the key."""

    def check() -> None:
        model, first = start("FSDP2", "int8")
        second = Adafactor(model.named_parameters(), beta1=0.9, momentum_dtype="bfloat16")
        save(model, first, tmp_path)
        before = [part(t) for t in held(second)]
        with pytest.raises((CheckpointException, RuntimeError), match="Missing key"):
            load(model, second, tmp_path)
        assert_unchanged(held(second), before)

    on_ranks(2, check)


OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "without frozen ones": {"ignore_frozen_params": True},
    "of slices": {"per_slice": True},
}


def assert_restored(momentum: str, broadcast: bool = False, per_slice: bool = False, **options: Any) -> None:
    """A state that went through torch's functions with these options continues on the same bits."""
    model, optimizer = start("FSDP2", momentum, torch.float32, per_slice=per_slice)
    train(model, optimizer, range(2))
    into = StateDictOptions(**options)
    weights = copy.deepcopy(get_model_state_dict(model, options=into))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=into))
    if broadcast and dist.get_rank() > 0:
        weights, state = {}, {}
    other, resumed = start("FSDP2", momentum, torch.float32, per_slice=per_slice)
    spoil(other)
    out = StateDictOptions(**options, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, weights, options=out)
    set_optimizer_state_dict(other, resumed, state, options=out)
    ends = [train(m, o, range(2, 4)) for m, o in ((model, optimizer), (other, resumed))]
    assert all(map(torch.equal, *ends))


@FORMATS
@pytest.mark.parametrize("options", OPTIONS)
def test_a_state_continues_on_the_same_bits_through_every_option_of_torch(options: str, momentum: str) -> None:
    """But `flatten_optimizer_state_dict` with `full_state_dict`, which torch cannot set for AdamW either."""
    on_ranks(2, lambda: assert_restored(momentum, **OPTIONS[options]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_slice", [False, True])
def test_a_checkpoint_of_one_device_continues_sharded_and_comes_back(per_slice: bool, dtype: torch.dtype) -> None:
    def check() -> None:
        model, optimizer = start("plain", dtype=dtype, per_slice=per_slice)
        train(model, optimizer, range(2))
        sharded, resumed = start("FSDP2", dtype=dtype, per_slice=per_slice)
        spoil(sharded)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        set_model_state_dict(sharded, model.state_dict(), options=options)
        resumed.load_state_dict(optimizer.state_dict())
        ours, theirs = resumed.state_dict()["state"], optimizer.state_dict()["state"]
        assert {key: sorted(values) for key, values in ours.items()} == {k: sorted(v) for k, v in theirs.items()}
        for values in resumed.state.values():
            assert all(dtensor.is_sharded(value) for key, value in values.items() if key != "step")
            assert all(value.dtype == torch.float32 for key, value in values.items() if key in ("row", "col", "full"))
        back, again = start("plain", dtype=dtype, per_slice=per_slice)
        again.load_state_dict(resumed.state_dict())
        for p, q in zip(sharded.parameters(), back.parameters(), strict=True):
            for key, value in resumed.state[p].items():
                assert torch.equal(again.state[q][key], whole(value)), key

    on_ranks(2, check)
