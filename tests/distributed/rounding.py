"""Stochastic rounding of a shard: the same bits as of the same elements in the whole, and Kahan's likewise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from adafactor import Adafactor
from tests.distributed.placements import SHAPES, meshes, placed, whole, word
from tests.distributed.split import split


def run(params: list[Tensor], rounding: str, backend: str) -> list[Tensor]:
    """Three steps in which all but the rounding is exact: G = 1 makes U = 1."""
    optimizer = Adafactor(params, lr=2.0**-11, relative=False, lr_decay=None, rounding=rounding, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # eager PyTorch takes over where the loops have no path
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    return [whole(p) for p in params]


def checks() -> Iterator[tuple[str, Any]]:
    """`mesh rounding backend` → the cases whose bits differ."""
    for (name, mesh), rounding, backend in product(meshes().items(), ("stochastic", "kahan"), ("eager", "auto")):
        cases = [(shape, places) for shape in SHAPES for places in placed(mesh, shape)]
        plain = run([torch.ones(s, dtype=torch.bfloat16, requires_grad=True) for s, _ in cases], rounding, backend)
        ones = [torch.ones(shape, dtype=torch.bfloat16) for shape, _ in cases]
        shards = [split(t, mesh, places).requires_grad_() for t, (_, places) in zip(ones, cases, strict=True)]
        ends = run(shards, rounding, backend)
        yield (
            f"{name} {rounding} {backend}",
            [
                f"{shape} {word(places)}"
                for (shape, places), a, b in zip(cases, plain, ends, strict=True)
                if not torch.equal(a, b)
            ],
        )
