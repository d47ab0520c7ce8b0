"""Every way to shard a model trains it as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from adafactor import Adafactor
from tests.distributed.nets import (
    Net,
    assert_near,
    by_columns,
    copied,
    fsdp,
    made,
    micro_batches,
    tensor_parallel,
    train,
)
from tests.distributed.rig import assert_same_everywhere, held, line, square, whole
from tests.ranks import on_ranks

LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5}
MOMENTUM: dict[str, Any] = {"beta1": 0.9, "weight_decay": 0.01}


def cube() -> DeviceMesh:
    """Eight ranks: copies × shards × tensor parallel."""
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "data", "model"))


def both(mesh: DeviceMesh, sequence: bool = False) -> Callable[[nn.Module], nn.Module]:
    """FSDP2 over what is tensor parallel."""
    return lambda model: fsdp(mesh["data"])(tensor_parallel(mesh["model"], sequence)(model))


def three(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    """The same, with copies."""
    return lambda model: fsdp(mesh["copies", "data"])(tensor_parallel(mesh["model"])(model))


WAYS: dict[str, tuple[int, Callable[[], Any], dict[str, Any]]] = {  # ranks, how to shard, and how to train
    "FSDP2": (2, lambda: fsdp(line()), {"parts": 2}),
    "FSDP2 on 4": (4, lambda: fsdp(line()), {"parts": 4}),
    "FSDP2, momentum": (2, lambda: fsdp(line()), {"parts": 2, "keywords": MOMENTUM}),
    "FSDP2, eager": (2, lambda: fsdp(line()), {"parts": 2, "keywords": {"backend": "eager"}}),
    "FSDP2 by columns": (2, lambda: fsdp(line(), shard_placement_fn=by_columns), {"parts": 2, "even": True}),
    "FSDP2, accumulation": (2, lambda: fsdp(line()), {"parts": 2, "micro": 2}),
    "FSDP2, clip_grad_norm_": (2, lambda: fsdp(line()), {"parts": 2, "max_norm": 1e-2}),
    "FSDP2, CPU offload": (2, lambda: fsdp(line(), offload_policy=CPUOffloadPolicy(pin_memory=False)), {"parts": 2}),
    "HSDP 2 × 2": (4, lambda: fsdp(square()), {"parts": 4}),
    "TP": (2, lambda: tensor_parallel(line()), {"even": True}),
    "TP, sequence parallel": (2, lambda: tensor_parallel(line(), sequence=True), {"even": True}),
    "FSDP2 × TP 2 × 2": (4, lambda: both(square()), {"even": True}),
    "FSDP2 × TP 2 × 2, sequence parallel": (4, lambda: both(square(), sequence=True), {"even": True}),
    "HSDP × TP 2 × 2 × 2": (8, lambda: three(cube()), {"even": True}),
}


def assert_trains_as_one_process(
    build: Callable[[], Any],
    dtype: torch.dtype,
    even: bool = False,
    keywords: dict[str, Any] | None = None,
    parts: int = 1,
    **how: Any,
) -> None:
    """Six steps of a model and of a sharded copy; copies of a parameter hold the same bits, reports say the same."""
    plain, starts = copied(made(lambda: Net(even), dtype))
    model = build()(copied(plain)[0])
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    ours = train(model, optimizer, range(6), parts, **how)
    how.pop("micro", None)
    theirs = train(plain, Adafactor(plain.named_parameters(), **(keywords or {})), range(6), **how)
    assert_same_everywhere(*held(optimizer), str(optimizer.report()))
    assert_near(ours, theirs, starts, LIMIT[dtype])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_sharded_model_is_trained_as_by_one_process(way: str, dtype: torch.dtype) -> None:
    size, build, how = WAYS[way]
    on_ranks(size, lambda: assert_trains_as_one_process(build, dtype, **how))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision_steps_as_one_process_with_the_same_gradients(dtype: torch.dtype) -> None:
    def check() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain, starts = copied(made(Net, dtype))
        model = fsdp(line(), mp_policy=policy)(copied(plain)[0])
        optimizers = [Adafactor(m.named_parameters(), lr=0.1) for m in (model, plain)]
        for step in range(4):
            for loss in micro_batches(model, step, 2, 1):
                loss.backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.grad = None if p.grad is None else whole(p.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ours, theirs = ([whole(p) for p in m.parameters()] for m in (model, plain))
        assert_near(ours, theirs, starts, 2e-2 if dtype == torch.bfloat16 else 2e-5)

    on_ranks(2, check)


@pytest.mark.parametrize("momentum", ["bfloat16", "int8"])
@pytest.mark.parametrize("way", ["FSDP2", "TP"])
def test_a_momentum_in_fewer_bits_is_that_of_one_process(momentum: str, way: str) -> None:
    """In float64 no sum in another order moves a number across a threshold."""

    def check() -> None:
        plain, starts = copied(made(lambda: Net(True, width=256, inner=512), torch.float64))
        build = fsdp(line()) if way == "FSDP2" else tensor_parallel(line())
        model = build(copied(plain)[0])
        keywords: dict[str, Any] = {"beta1": 0.9, "momentum_dtype": momentum, "lr": 0.05}
        optimizers = [Adafactor(m.named_parameters(), **keywords) for m in (model, plain)]
        ours, theirs = (train(m, o, range(3)) for m, o in zip((model, plain), optimizers, strict=True))
        assert_same_everywhere(*held(optimizers[0]))
        assert_near(ours, theirs, starts, 1e-12)

    on_ranks(2, check)


def test_data_parallel_steps_as_one_process_does() -> None:
    def check() -> None:
        plain, starts = copied(made(Net, torch.float64))
        model = DistributedDataParallel(copied(plain)[0])
        optimizer = Adafactor(model.named_parameters())
        ours = train(model, optimizer, range(4), parts=2)
        theirs = train(plain, Adafactor(plain.named_parameters()), range(4))
        assert_same_everywhere(*held(optimizer))
        assert_near(ours, theirs, starts, 1e-12)

    on_ranks(2, check)
