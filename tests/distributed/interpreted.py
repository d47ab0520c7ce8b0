"""Sharded parameters in Triton's interpreter, against the same steps on one process. Needs TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from tests import interpreter
from tests.distributed import faults, placements

CASES = [
    ((7, 12), (Shard(0),)),
    ((12, 7), (Shard(1),)),
    ((5, 32), (Replicate(),)),
    ((9,), (Shard(0),)),
    ((5, 6, 7), (Shard(1),)),
    ((3, 8, 4), (Shard(0),)),
]
BLOCKS = [  # of an int8 momentum
    ((140, 128), (Shard(0),)),
    ((16, 256), (Shard(1),)),
    ((3, 12, 130), (Shard(1),)),
    ((29, 16, 3, 3), (Shard(0),)),
    ((30, 16, 3, 3), (Shard(1),)),
]
ROUNDED: dict[str, dict[str, Any]] = {
    "int8 momentum": {"beta1": 0.9, "momentum_dtype": "int8", "weight_decay": 0.1, "weight_decay_by": "alpha"},
    "bfloat16 momentum": {"beta1": 0.9, "momentum_of": "direction", "momentum_dtype": "bfloat16"},
    "int8 momentum of gradients": {"beta1": 0.9, "momentum_of": "gradient", "momentum_dtype": "int8"},
}
KEYWORDS = ["Algorithm 6", "gradient momentum", "row P", "row B", "row mean", "column mean"]


def checks() -> Iterator[tuple[str, Any]]:
    """The errors of each, by keywords."""
    interpreter.make_quick()
    placements.STEPS = 2
    names = list(KEYWORDS[:2]) if os.environ.get("FAST") == "1" else KEYWORDS
    mesh = placements.meshes()["2"]
    for name in names:
        keywords = {**placements.KEYWORDS[name], "backend": "triton"}
        yield name, placements.check(mesh, torch.float32, keywords, CASES)
    for name in list(faults.KINDS)[: 2 if os.environ.get("FAST") == "1" else None]:
        yield f"lost {name}", placements.everywhere(faults.lost_between_reductions(mesh, "triton", name))
    for name in list(ROUNDED)[: 1 if os.environ.get("FAST") == "1" else None]:
        cases = BLOCKS if ROUNDED[name]["momentum_dtype"] == "int8" else CASES
        yield name, placements.check(mesh, torch.float32, {**ROUNDED[name], "backend": "triton"}, cases)
