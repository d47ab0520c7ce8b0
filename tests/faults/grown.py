"""A program that measures by how many kB its memory grows over many steps or optimizers."""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from adafactor import Adafactor


def resident() -> int:
    """In kB, after what is garbage has gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def made(backend: str) -> Callable[[], None]:
    """A step of a new optimizer for a matrix, a vector and a small convolution, with momentum in one of its groups.

    The gradients are in memory of their own, as backward gives them.
    """
    params = [Parameter(torch.randn(shape)) for shape in ((20, 30), (40,), (8, 4, 3, 3))]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "beta1": 0.9}]
    optimizer = Adafactor(groups, backend=backend)

    def step() -> None:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

    return step


def optimizers(backend: str) -> Callable[[], None]:
    """One optimizer after the other: made, stepped twice and dropped."""

    def one() -> None:
        step = made(backend)
        step()
        step()

    return one


def growth(one: Callable[[], None], times: int) -> int:
    """What doing it so often adds, once a tenth of that has been done: memory that is used again is no growth."""
    for _ in range(times // 10):
        one()
    before = resident()
    for _ in range(times):
        one()
    return resident() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = sys.argv[1]
    kinds = {"steps": made, "optimizers": optimizers}
    orders = (word.split("=") for word in sys.argv[2:])
    print(json.dumps({what: growth(kinds[what](backend), int(times)) for what, times in orders}))
