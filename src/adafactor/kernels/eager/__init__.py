"""The backend in eager PyTorch, for any tensor on any device: `adafactor/algorithm.py` is what it runs."""

from __future__ import annotations

from typing import Any

from adafactor.core import sums
from adafactor.core.contract import Parameter
from adafactor.core.factoring import statistics_dtype
from adafactor.kernels.eager.executor import Executor


def why_not(parameter: Parameter) -> str | None:
    """Nothing is in the way: any tensor will do."""
    return None


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Let each parameter of a CPU step alone, so that it stays in the cache; those of a device go side by side."""
    alike: dict[Any, list[Parameter]] = {}
    for number, p in enumerate(parameters):
        group = p.x.device, p.group, statistics_dtype(p.x.dtype), p.in_lockstep, p.shard is None
        alike.setdefault(number if sums.on_host(p.x) else group, []).append(p)
    return [Executor(members) for members in alike.values()]
