"""The backend that Numba compiles, for tensors on a CPU: no tensor-sized temporary, and all tensors in one call.

`executor.py` describes tensors to the loops in `native`, in an order that `memory_order.py` has found, or in that of
`blocks.py`; `threads.py` has the threads that run them.
"""

from __future__ import annotations

import torch

from adafactor.core.contract import Parameter, why_not_plain
from adafactor.kernels.cpu.executor import Executor
from adafactor.kernels.memory_order import MemoryOrder, find_memory_order


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    if not parameter.x.is_cpu:
        return f"it is on {parameter.x.device}"
    if reason := why_not_plain(parameter):
        return reason
    order = find_memory_order(parameter)
    return None if isinstance(order, MemoryOrder) else order


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Make an executor of all parameters of the same dtypes; those that go phase by phase have one of their own."""
    alike: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Parameter]] = {}
    for p in parameters:
        key = p.x.dtype, p.gradient.dtype, p.in_lockstep, p.shard is not None
        alike.setdefault(key, []).append(p)
    return [Executor(members, (x, g)) for (x, g, *_), members in alike.items()]
