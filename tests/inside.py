"""The only place where tests look into the optimizer and its kernels, or turn a screw that no user has."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch import Tensor

from adafactor import Adafactor, kernels
from adafactor.core import sums

BACKENDS = ("eager", "cpu", "triton")
COMPILED = BACKENDS[1:]  # asked for by name, they may refuse what eager PyTorch can step
HERE = BACKENDS[:2]  # the quick ones: Triton's interpreter takes milliseconds where others take microseconds
AND_AUTO = (*HERE, "auto")


def seconds() -> float:
    """How long what draws its cases goes on: FUZZ_SECONDS, or 20."""
    return float(os.environ.get("FUZZ_SECONDS", "20"))


def let_auto_take_eager(patch: pytest.MonkeyPatch) -> None:
    """Let `backend="auto"` stand for eager PyTorch everywhere."""
    patch.setattr(kernels, "AUTO", {})


def prepared(optimizer: Adafactor) -> object | None:
    """What a step left for the next one: the same object for as long as it is used again."""
    found = optimizer._buckets.of.get(None)
    return None if found is None or not found.executors else found.executors[0]


def forget(optimizer: Adafactor) -> None:
    """Make the next step find out everything anew, as after loading a checkpoint."""
    optimizer._buckets.of.clear()


def job_of(optimizer: Adafactor, p: Tensor) -> Any:
    """The compiled kernel's notes of a parameter, a NumPy record."""
    for work in optimizer._buckets.of[None].executors:
        for i, parameter in enumerate(work.parameters):
            if parameter.p is p:
                return work.jobs[i]  # type: ignore[attr-defined]
    raise KeyError(p.shape)


def carried_squares(optimizer: Adafactor, p: Tensor) -> float:
    """ΣX² as the last compiled step left it to the next; NaN if it must be read."""
    return float(job_of(optimizer, p)["x2_after"])


def cut_into_chunks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let eager PyTorch work on so many elements at a time."""
    patch.setattr(sums, "CHUNK_CPU", size)


def chunk() -> int:
    """The elements that eager PyTorch works on at a time on a CPU."""
    return sums.CHUNK_CPU


def keep_scalars_on_the_device(patch: pytest.MonkeyPatch) -> None:
    """Treat CPU tensors as those of a device, where reading a scalar would make the host wait."""
    patch.setattr(sums, "on_host", lambda t: False)
