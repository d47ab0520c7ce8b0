"""The backend that Numba compiles, for tensors on a CPU: no tensor-sized temporary, and all tensors in one call.

`executor.py` describes tensors to the loops in `native`, in an order that `memory_order.py` has found; `threads.py` has
the threads that run them.
"""

from __future__ import annotations

import torch

from adafactor.core.contract import Parameter, why_not_plain
from adafactor.kernels.cpu.executor import Executor
from adafactor.kernels.memory_order import MemoryOrder, find_memory_order


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    x, form, s = parameter.x, parameter.gradient, parameter.settings
    if s.beta1 and (s.momentum_dtype != "float32" or s.momentum_of == "direction"):
        return f"its momentum is of the {s.momentum_of} in {s.momentum_dtype}"
    if s.weight_decay_by != "rho":
        return f"its weight decay is by {s.weight_decay_by}"
    if not x.is_cpu or form.meta[2].type != "cpu":
        return f"it is on {x.device}"
    if parameter.overlaps:
        return "its memory is also another parameter's, so the two must be stepped one after the other"
    for t in (x, *parameter.state.values()):
        if isinstance(t, torch.Tensor) and (reason := why_not_plain(t)):
            return f"it is, or its state is, {reason}"
    if form.type is not torch.Tensor and form.type is not torch.nn.Parameter:
        return f"its gradient is a {form.type.__name__}, a subclass of Tensor"
    if form.is_negative or form.is_zero:
        return "its gradient is a view with the negative bit set, or a zero tensor without memory"
    order = find_memory_order(parameter)
    return None if isinstance(order, MemoryOrder) else order


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Make an executor of all parameters of the same dtypes; those that go phase by phase have one of their own."""
    alike: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Parameter]] = {}
    for p in parameters:
        key = p.x.dtype, p.gradient.dtype, p.in_lockstep, p.shard is not None
        alike.setdefault(key, []).append(p)
    return [Executor(members, (x, g)) for (x, g, *_), members in alike.items()]
