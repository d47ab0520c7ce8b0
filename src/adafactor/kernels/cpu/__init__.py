"""The backend that Numba compiles, for tensors on a CPU: no tensor-sized temporary, and all tensors in one call.

`work.py` describes tensors to the loops in `native`, in an order that `memory_order.py` has found, and `threads.py` has
the threads that run them.
"""

from __future__ import annotations

import torch

from adafactor.core.bucket import Parameter, why_not_plain
from adafactor.kernels.cpu.executor import Executor
from adafactor.kernels.memory_order import MemoryOrder, find_memory_order


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    x, form = parameter.x, parameter.gradient
    assert form is not None
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
    """Make a work of all parameters of the same dtypes; those that go walk by walk have one of their own."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Parameter]] = {}
    for parameter in parameters:
        sharded, raises = parameter.shard is not None, parameter.settings.on_nonfinite == "raise"
        assert parameter.gradient is not None
        kinds.setdefault((parameter.x.dtype, parameter.gradient.dtype, sharded, raises), []).append(parameter)
    return [Executor(members, (x, g), sharded, raises) for (x, g, sharded, raises), members in kinds.items()]
