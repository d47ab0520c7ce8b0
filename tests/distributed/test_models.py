"""Every way to shard a model trains it as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from adafactor import Adafactor
from tests.distributed.nets import (
    Build,
    Net,
    assert_near,
    both,
    by_columns,
    copied,
    even,
    fsdp,
    made,
    micro_batches,
    tensor_parallel,
    train,
    wide,
)
from tests.distributed.rig import assert_same_everywhere, held, line, square, whole
from tests.ranks import on_ranks

MOMENTUM: dict[str, Any] = {"beta1": 0.9, "weight_decay": 0.01}
INT8, BF16 = ({"beta1": 0.9, "lr": 0.05, "momentum_dtype": name} for name in ("int8", "bfloat16"))
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def cube() -> Build:
    """Eight ranks: copies × shards × tensor parallel."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "data", "model"))
    return lambda model: fsdp(mesh["copies", "data"])(tensor_parallel(mesh["model"])(model))


WAYS: dict[str, tuple[int, Callable[[], Any], dict[str, Any]]] = {  # ranks, how to shard, and how to train
    "FSDP2": (2, lambda: fsdp(line()), {"parts": 2}),
    "FSDP2 on 4": (4, lambda: fsdp(line()), {"parts": 4}),
    "FSDP2, momentum": (2, lambda: fsdp(line()), {"parts": 2, "keywords": MOMENTUM}),
    "FSDP2, bfloat16 momentum": (2, lambda: fsdp(line()), {"net": wide, "keywords": BF16}),
    "FSDP2, int8 momentum": (2, lambda: fsdp(line()), {"net": wide, "keywords": INT8}),
    "FSDP2 by columns": (2, lambda: fsdp(line(), shard_placement_fn=by_columns), {"parts": 2, "net": even}),
    "FSDP2, accumulation": (2, lambda: fsdp(line()), {"parts": 2, "micro": 2}),
    "FSDP2, clip_grad_norm_": (2, lambda: fsdp(line()), {"parts": 2, "max_norm": 1e-2}),
    "FSDP2, CPU offload": (2, lambda: fsdp(line(), offload_policy=OFFLOAD), {"parts": 2}),
    "HSDP 2 × 2": (4, lambda: fsdp(square()), {"parts": 4}),
    "DDP": (2, lambda: DistributedDataParallel, {"parts": 2}),
    "TP": (2, lambda: tensor_parallel(line()), {"net": even}),
    "TP, bfloat16 momentum": (2, lambda: tensor_parallel(line()), {"net": wide, "keywords": BF16}),
    "TP, int8 momentum": (2, lambda: tensor_parallel(line()), {"net": wide, "keywords": INT8}),
    "TP, sequence parallel": (2, lambda: tensor_parallel(line(), sequence=True), {"net": even}),
    "FSDP2 × TP 2 × 2": (4, lambda: both(square()), {"net": even}),
    "FSDP2 × TP 2 × 2, sequence parallel": (4, lambda: both(square(), sequence=True), {"net": even}),
    "HSDP × TP 2 × 2 × 2": (8, cube, {"net": even}),
}


def assert_trains_as_one_process(
    build: Callable[[], Any],
    net: Callable[[], nn.Module] = Net,
    keywords: dict[str, Any] | None = None,
    parts: int = 1,
    **how: Any,
) -> None:
    """Six steps of a model and of a sharded copy; copies of a parameter hold the same bits, reports say the same.

    In float64, where no sum in another order moves a number across a threshold of an int8 momentum.
    """
    plain, starts = copied(made(net, torch.float64))
    model = build()(copied(plain)[0])
    optimizer = Adafactor(model.named_parameters(), **(keywords or {}))
    ours = train(model, optimizer, range(6), parts, **how)
    how.pop("micro", None)
    theirs = train(plain, Adafactor(plain.named_parameters(), **(keywords or {})), range(6), **how)
    assert_same_everywhere(*held(optimizer), str(optimizer.report()))
    assert_near(ours, theirs, starts, 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_is_trained_as_by_one_process(way: str) -> None:
    size, build, how = WAYS[way]
    on_ranks(size, lambda: assert_trains_as_one_process(build, **how))


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
