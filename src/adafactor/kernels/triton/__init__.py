"""The backend in Triton, for tensors on a GPU: ordinary kernels, one parameter after the other.

| launch | what it does |
|---|---|
| `first_pass` | reads G: R, and column sums of G² and of G²/R |
| `columns` | C, and ΣU² by columns |
| `conclude` | one program: is the step taken; clipping, α, t |
| `last_pass` | reads G and X, writes X and the state; ΣX² for the next step |

An unfactored tensor has `full_sums` in place of the first two, or `small_step` alone. t and all that follows from it
stay on the device, so the host never waits and a step can be captured in a graph. There are no atomics, and no program
waits for another. `proof.py` compares the first steps with eager PyTorch.

With TRITON_INTERPRET=1 it steps tensors on a CPU, slowly, for whoever wants to check or debug it.
"""

from __future__ import annotations

import torch
from triton import knobs

from adafactor.core import momentum
from adafactor.core.contract import Executor as AnyExecutor
from adafactor.core.contract import Parameter, why_not_plain
from adafactor.kernels import eager
from adafactor.kernels.triton.executor import Executor
from adafactor.kernels.triton.layout import Refused, layout_of
from adafactor.kernels.triton.proof import known

INTERPRETED = knobs.runtime.interpret  # decided when the kernels are imported
DEVICES = ("cuda", "xpu")  # ROCm's are called cuda, too
STORED = (torch.float32, torch.bfloat16, torch.float16)


def why_not(parameter: Parameter) -> str | None:
    """What is in the way of stepping this parameter; None if nothing is."""
    x, form, s, state = parameter.x, parameter.gradient, parameter.settings, parameter.state
    if x.device.type not in DEVICES and not (INTERPRETED and x.is_cpu):
        return f"it is on {x.device}"
    if reason := why_not_plain(parameter):
        return reason
    if x.dtype not in STORED or form.dtype not in STORED:
        return f"there is no kernel for a {x.dtype} parameter with a {form.dtype} gradient"
    if s.beta1 and s.momentum_of == "gradient":
        return "there is no kernel for a momentum of gradients"
    if parameter.rounding == "stochastic" and x.dtype == torch.float16:
        return "there is no kernel that rounds float16 at random"
    for like_x in (state.get("full"), momentum.buffer(state), state.get("compensation")):
        if like_x is not None and like_x.stride() != x.stride() and x.numel() > 1:
            return "its state has another order in memory"
    try:
        layout_of(parameter)
    except Refused as reason:
        return str(reason)
    return None


def prepare(parameters: list[Parameter]) -> list[AnyExecutor]:
    """Make an executor of all parameters of a group on a device; in eager PyTorch, once a step was wrong."""
    if known().is_wrong:
        return list(eager.prepare(parameters))
    alike: dict[object, list[Parameter]] = {}
    for p in parameters:
        alike.setdefault((p.x.device, p.group, p.in_lockstep, p.shard is not None), []).append(p)
    return [Executor(members) for members in alike.values()]
