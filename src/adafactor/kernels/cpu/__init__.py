"""The backend that Numba compiles, for tensors on a CPU: no tensor-sized temporary, and all tensors in one call.

`executor.py` describes tensors to the loops in `native`, in an order that `memory_order.py` has found; `threads.py` has
the threads that run them.
"""

from __future__ import annotations

from math import prod

import torch

from adafactor.core.contract import Parameter, why_not_plain
from adafactor.core.momentum import blocks_of
from adafactor.kernels.cpu.executor import Executor
from adafactor.kernels.memory_order import WIDTH, MemoryOrder, find_memory_order, has_rounded_momentum, numbering

LONGEST_STEP = 2**32 // WIDTH  # from one element's number to the next: a stretch of a line spans 32 bits at most


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    x, form, s = parameter.x, parameter.gradient, parameter.settings
    if not x.is_cpu or form.meta[2].type != "cpu":
        return f"it is on {x.device}"
    if reason := why_not_plain(parameter):
        return reason
    order = find_memory_order(parameter)
    if not isinstance(order, MemoryOrder):
        return order
    if has_rounded_momentum(parameter) and s.momentum_of == "gradient":
        return f"its momentum of the gradient is kept in {s.momentum_dtype}, of which there would have to be two passes"
    if "momentum_int8" in parameter.state and not _has_blocks_in_lines(parameter, order):
        return "the blocks of its int8 momentum are not side by side in memory"
    numbers = numbering(order, tuple(x.shape), parameter.shape, parameter.offset)
    if has_rounded_momentum(parameter) and numbers and numbers[4 if order.factored else 2] >= LONGEST_STEP:
        return "its neighbours in memory are too far apart in the tensor for the random numbers of its momentum"
    return None


def _has_blocks_in_lines(parameter: Parameter, order: MemoryOrder) -> bool:
    """Does each block of an int8 momentum lie within a line, the first one at its beginning?"""
    blocks = blocks_of(parameter.factoring, parameter.settings)
    if blocks is None or not (parameter.x.is_contiguous() and parameter.state["momentum_scale"].is_contiguous()):
        return False
    return not order.factored or prod(order.sizes[3:]) == prod(parameter.x.shape[blocks.axis :])


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Make an executor of all parameters of the same dtypes; those that go phase by phase have one of their own."""
    alike: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Parameter]] = {}
    for p in parameters:
        key = p.x.dtype, p.gradient.dtype, p.in_lockstep, p.shard is not None
        alike.setdefault(key, []).append(p)
    return [Executor(members, (x, g)) for (x, g, *_), members in alike.items()]
