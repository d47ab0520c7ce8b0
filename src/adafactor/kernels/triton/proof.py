"""Are the first steps right? A parameter of each kind takes them twice, in Triton and in eager PyTorch.

These are the user's own tensors, so it compiles nothing else, needs no file, and checks the very code that will be
used. Parameters of a kind have the same shape, dtypes, order in memory, alignment and settings. In these steps the host
waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from adafactor.core import momentum
from adafactor.core.contract import Executor, Parameter
from adafactor.core.report import StepMetrics
from adafactor.core.settings import Settings
from adafactor.kernels import eager
from adafactor.kernels.triton.launch import ALIGNMENT
from adafactor.kernels.triton.plan import Plan

STEPS = 2  # of each kind: the first of a training has no R and no momentum to average with
TRIES = 20  # steps of an optimizer until it gives up to prove those whose gradients are zero or not finite
LARGEST = 2**24  # elements of a parameter that is copied
STATE = ("step", "row", "col", "full", *momentum.BUFFERS, "momentum_scale", "compensation")  # users may put more there
TOLERANCE = 1e-4  # what rounding leaves is far below, and any mistake above


@dataclass
class Known:
    """What the steps of this process have shown."""

    right: Counter[object] = field(default_factory=Counter)  # steps of each kind that were right
    is_wrong: bool = False  # one was not


@cache
def known() -> Known:
    """Return the one record of this process."""
    return Known()


def kind_of(p: Parameter) -> object:
    """Describe all that decides which compiled code steps a parameter, and more."""
    parts = [p.x, *(p.state[key] for key in STATE if key in p.state)]  # of slices, their parts of the stack's
    places = tuple(t.data_ptr() % ALIGNMENT for t in parts)
    return p.x.device, p.x.dtype, p.x.stride(), places, p.gradient, p.factoring, p.settings.without_rates


def prove(plan: Plan, g: Tensor, settings: Sequence[Settings]) -> str | None:
    """Step a parameter, and a copy of it in eager PyTorch; say what differs, and then take over the copy's step."""
    ours = plan.parameter
    state = {key: ours.state[key].clone() for key in STATE if key in ours.state}
    copy = replace(ours, x=ours.x.clone(), state=state, metrics=StepMetrics())
    step_in_eager(eager.prepare([copy]), {copy: g}, settings)
    before = ours.x.clone()
    if ours.measures_x:  # somebody may have written to X behind torch's back
        plan.measure()
    plan.step(g)
    travelled = (copy.x.float() - before.float()).abs().max()
    if not bool(travelled.isfinite()):  # what is not finite was let through: there is nothing to compare
        return None
    pairs = zip(_numbers(ours), _numbers(copy), strict=True)
    problems = [problem for (key, a, unit), (_, b, _) in pairs if (problem := _differ(key, a, b, unit, travelled))]
    if not problems:
        known().right[kind_of(ours)] += bool(travelled > 0)
        return None
    known().is_wrong = True
    ours.x.copy_(copy.x)
    for key, value in state.items():
        ours.state[key].copy_(value)
    return f"{ours.name} ({tuple(ours.x.shape)}, {ours.x.dtype}, {ours.settings}): {'; '.join(problems)}"


def step_in_eager(
    executors: Iterable[Executor], grads: Mapping[Parameter, Tensor], settings: Sequence[Settings]
) -> None:
    """Take a step of the parameters that have a gradient."""
    for executor in executors:
        executor.begin([grads.get(p) for p in executor.parameters], settings, None)
        executor.step()
        executor.end()


def _numbers(p: Parameter) -> Iterator[tuple[str, Tensor, float]]:
    """The name of X and of each tensor of the state, its numbers, and the unit that rounding them may cost."""
    parts = {"X": p.x} | {key: p.state[key] for key in STATE[:-1] if key in p.state}
    for key, t in parts.items():
        if key == "X" and p.rounding == "kahan":  # what rounding has taken away is in the compensation
            yield key, t.float() + p.state["compensation"].float(), torch.finfo(t.dtype).eps ** 2
        else:
            yield key, t.float(), torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0


def _differ(key: str, a: Tensor, b: Tensor, unit: float, travelled: Tensor) -> str | None:
    """Say where our numbers differ from the right ones."""
    if key == "step":  # a share of many steps would be more than one
        allowed = torch.zeros_like(b)
    elif key == "X":
        allowed = 1.01 * unit * b.abs() + TOLERANCE * travelled
    else:  # an element of int8 may be the next integer
        allowed = (2 * TOLERANCE + 1.01 * unit) * b.abs() + (TOLERANCE / 10 * b.abs().max() if unit else 1.01)
    beyond = ~((a - b).abs() <= allowed) & ~(a.isnan() & b.isnan())
    if not bool(beyond.any()):
        return None
    return f"{key} differs in {int(beyond.sum())} of {b.numel()} elements, by up to {float((a - b).abs().max()):.3g}"
