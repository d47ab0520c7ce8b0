"""Checkpoints of a momentum in 8 or 16 bits: every kind that torch.distributed has, and one in the wrong format."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from adafactor import Adafactor
from tests.distributed.checkpoints import load, make, moved, save
from tests.distributed.matrix import OPTIONS, restored, saved_meanwhile
from tests.distributed.momentum import FORMATS
from tests.distributed.placements import everywhere, fingerprint

CHAIN = ("TP", "FSDP2", "by columns", "plain", "FSDP2")


def into_another_format(momentum: str, into: str) -> dict[str, Any]:
    """What torch's loader says, which knows nothing of formats and would cast the numbers of one to the other's."""
    folder = everywhere(tempfile.mkdtemp())[0]
    model, first = make("FSDP2", torch.float32, momentum=momentum)
    second = Adafactor(model.named_parameters(), beta1=0.9, momentum_dtype=into)
    save(model, first, folder)
    state = [value for values in second.state.values() for value in values.values()]
    before, message = fingerprint(state), ""
    try:
        load(model, second, folder)
    except (CheckpointException, RuntimeError) as error:
        message = str(error)
    return {"message": message, "unchanged": fingerprint(state) == before}


def checks() -> Iterator[tuple[str, Any]]:
    """Each way to save and load, in each format."""
    warnings.filterwarnings("ignore", ".*stepped by eager PyTorch", RuntimeWarning)
    for momentum in FORMATS:
        for first, second in pairwise(CHAIN):
            yield f"moved | {first} → {second} {momentum}", moved(first, second, torch.float64, momentum)
        for name, options in OPTIONS.items():
            yield f"kept | {name} {momentum}", everywhere(restored(momentum, **options))
        yield f"kept | async_save {momentum}", everywhere(saved_meanwhile(momentum))
    yield "int8 into bfloat16", everywhere(into_another_format("int8", "bfloat16"))
    yield "bfloat16 into int8", everywhere(into_another_format("bfloat16", "int8"))
