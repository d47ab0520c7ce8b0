"""Drawn at random: shapes, orders of memory, dtypes, settings; Triton beside plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interpreted.guarded import random_steps, train

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def draw(random: np.random.Generator) -> tuple[list[Tensor], torch.dtype, dict[str, Any]]:
    """Some parameters, the dtype of their gradients, and keywords."""
    x = TYPES[random.choice(4, p=[0.5, 0.2, 0.15, 0.15])]
    narrower = [g for g in TYPES if g != torch.float64 or x == torch.float64]
    g = x if random.random() < 0.7 else narrower[random.integers(len(narrower))]
    params = []
    for _ in range(random.integers(1, 4)):
        shape = tuple(int(n) for n in random.choice([1, 2, 3, 7, 16, 33, 64, 130], size=random.integers(0, 4)))
        if np.prod(shape, dtype=int) > 20000:
            shape = shape[:2]
        t = (0.05 * torch.from_numpy(np.asarray(random.normal(size=shape)))).to(x)
        if random.random() < 0.3:
            order = random.permutation(len(shape)).tolist()
            t = t.permute(order).contiguous().permute([order.index(axis) for axis in range(len(shape))])
        params.append(t)
    keywords: dict[str, Any] = {
        "factored": ["outer", "row", "column", False][random.choice(4, p=[0.55, 0.15, 0.15, 0.15])],
        "beta1": float(random.choice([0.0, 0.0, 0.9])),
        "momentum_of": str(random.choice(["update", "gradient"])),
        "beta2": [None, 0.99, 0.5][random.integers(3)],
        "clip": [1.0, None, 0.3][random.integers(3)],
        "relative": bool(random.random() < 0.7),
        "weight_decay": float(random.choice([0.0, 0.1])),
        "maximize": bool(random.random() < 0.2),
        "lr": float(random.choice([1e-2, 0.1])),
        "lr_decay": ["rsqrt", None][random.integers(2)],
        "rounding": str(random.choice(["nearest", "kahan"])),  # stochastic: see test_bits
    }
    return params, g, keywords


def compare(seed: int) -> None:
    """Fail where the two differ by more than rounding explains."""
    random = np.random.default_rng(seed)
    begin, g, keywords = draw(random)
    steps = random_steps(begin, int(random.integers(1, 4)), g, seed=seed)
    ours, mine = train(begin, steps, **keywords)
    theirs, other = train(begin, steps, backend="eager", **keywords)
    for i, (a, b, start) in enumerate(zip(ours, theirs, begin, strict=True)):
        gone = (b.double() - start.double()).abs().max().clamp(min=1e-30)
        units = torch.finfo(a.dtype).eps * b.double().abs().max()  # of the last place
        limit = 2e-6 * gone + (1.01 if a.dtype.itemsize == 2 else 2) * units * len(steps)
        assert (a.double() - b.double()).abs().max() <= limit, (seed, i, a.shape, a.dtype, keywords)
    for p, q in zip(mine.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        for key, value in other.state[q].items():
            if key != "compensation":
                near = 1e-6 * float(value.abs().max())  # differences of large numbers
                torch.testing.assert_close(mine.state[p][key], value, rtol=1e-5, atol=near, msg=f"{seed} {key}")


@pytest.mark.parametrize("seed", range(12))
def test_anything_drawn_at_random_is_stepped_as_plain_torch_does(seed: int) -> None:
    compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_more(seed: int) -> None:
    compare(seed)
