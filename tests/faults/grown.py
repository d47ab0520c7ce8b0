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


def parameters() -> list[Parameter]:
    """A matrix, a vector and a small convolution."""
    return [Parameter(torch.randn(20, 30)), Parameter(torch.randn(40)), Parameter(torch.randn(8, 4, 3, 3))]


def step(params: list[Parameter], optimizer: Adafactor) -> None:
    """With gradients in memory of their own, as backward gives them."""
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def steps(backend: str, times: int) -> int:
    """Over so many steps of one optimizer, with momentum in one of its groups."""
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "beta1": 0.9}]
    optimizer = Adafactor(groups, backend=backend)
    return growth(lambda i: step(params, optimizer), times)


def optimizers(backend: str, times: int) -> int:
    """Over so many optimizers: made, stepped twice and dropped."""

    def one(i: int) -> None:
        params = parameters()
        optimizer = Adafactor(params, backend=backend, beta1=0.9 * (i % 2))
        step(params, optimizer)
        step(params, optimizer)

    return growth(one, times)


def growth(one: Callable[[int], None], times: int) -> int:
    """What doing it so often adds, once a tenth of that has been done: memory that is used again is no growth."""
    for i in range(times // 10):
        one(i)
    before = resident()
    for i in range(times):
        one(i)
    return resident() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = sys.argv[1]
    kinds = {"steps": steps, "optimizers": optimizers}
    orders = (word.split("=") for word in sys.argv[2:])
    print(json.dumps({word: kinds[word](backend, int(times)) for word, times in orders}))
