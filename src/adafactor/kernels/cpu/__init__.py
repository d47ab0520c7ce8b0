"""The backend in C++, for tensors on a CPU: no tensor-sized temporary, and all tensors in one call.

`layout.py` finds how a tensor is walked, `executor.py` describes tensors to the library in `src/`, which `library.py`
loads; `threads.py` has the threads that run it.
"""

from __future__ import annotations

from adafactor.core.contract import Parameter, why_not_plain
from adafactor.kernels.cpu.executor import Executor
from adafactor.kernels.cpu.layout import Layout, find_layout


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    if not parameter.x.is_cpu:
        return f"it is on {parameter.x.device}"
    if reason := why_not_plain(parameter):
        return reason
    layout = find_layout(parameter)
    return None if isinstance(layout, Layout) else layout


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Make an executor of all parameters; those that go phase by phase have others of their own."""
    alike: dict[tuple[bool, bool], list[Parameter]] = {}
    for p in parameters:
        alike.setdefault((p.in_lockstep, p.shard is not None), []).append(p)
    return [Executor(members) for members in alike.values()]
