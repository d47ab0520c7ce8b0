"""Are the first steps right? A parameter of each compiled variant takes them twice, in Triton and in eager PyTorch.

These are the user's own tensors, so it compiles nothing else, needs no file, and checks the very code that will be
used, whatever the shapes. It takes a copy of a few small parameters, and the host waits once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adafactor.core import momentum
from adafactor.core.contract import Parameter
from adafactor.core.record import StepMetrics
from adafactor.core.settings import Settings
from adafactor.kernels import eager

STEPS = 2  # of each variant: the first of a training has no R and no momentum to average with
LARGEST = 2**24  # elements of a parameter that is copied
TOLERANCE = 1e-4  # of the distance travelled: what rounding leaves, far below any mistake
COMPARED = ("step", "row", "col", "full")  # of the state, beside the momentum


@dataclass
class Trial:
    """What this process knows of a variant."""

    steps: int = 0  # that were right
    is_wrong: bool = False


@cache
def trial_of(variant: Any) -> Trial:
    """Return the one trial of a variant in this process."""
    return Trial()


def candidates(parameters: Sequence[Parameter], trials: Sequence[Trial], present: Sequence[int]) -> list[int]:
    """Choose the smallest parameter of each variant that is not proven yet, among those with a gradient."""
    smallest: dict[int, int] = {}
    for i in present:
        size, known = parameters[i].x.numel(), smallest.get(id(trials[i]))
        if trials[i].steps < STEPS and size <= LARGEST and (known is None or size < parameters[known].x.numel()):
            smallest[id(trials[i])] = i
    return list(smallest.values())


class Twin:
    """A copy of a parameter that has taken the next step in eager PyTorch."""

    def __init__(self, parameter: Parameter, g: Tensor, settings: Sequence[Settings]):
        """Take the step with the copy, before the parameter itself takes it."""
        self.parameter, self._before = parameter, parameter.x.double()
        state = {key: value.clone() for key, value in parameter.state.items()}
        self._copy = replace(parameter, x=parameter.x.clone(), state=state, metrics=StepMetrics())
        (executor,) = eager.prepare([self._copy])
        executor.begin([g.clone()], settings, None)
        executor.step()
        executor.end()

    def compare(self, trial: Trial) -> str | None:
        """Say what is wrong with the step that Triton has taken; then the parameter is given the right one."""
        ours, theirs = self.parameter, self._copy
        travelled = (theirs.x.double() - self._before).abs().max()
        problems = [_differ("X", _values(ours), _values(theirs), travelled, _grain(theirs))]
        a, b = momentum.buffer(ours.state), momentum.buffer(theirs.state)
        if a is not None and b is not None and ours.settings.beta1:
            (a, unit), (b, _) = _decode(ours, a), _decode(theirs, b)
            problems.append(_differ("the momentum", a, b, b.abs().max(), unit))
        for key in COMPARED:
            if key in ours.state:
                a, b = ours.state[key].double(), theirs.state[key].double()
                problems.append(_differ(key, a, b, torch.zeros_like(b), 2 * TOLERANCE * b.abs()))
        found = [problem for problem in problems if problem]
        trial.steps += bool(travelled > 0)
        trial.is_wrong = bool(found)
        if not found:
            return None
        ours.x.copy_(theirs.x)
        for key, value in ours.state.items():
            value.copy_(theirs.state[key])
        return f"{ours.name} ({tuple(ours.x.shape)}, {ours.x.dtype}, {ours.settings}): {'; '.join(found)}"


def _values(p: Parameter) -> Tensor:
    """X in double, with what rounding has taken away."""
    return p.x.double() + p.state["compensation"].double() if p.rounding == "kahan" else p.x.double()


def _grain(p: Parameter) -> Tensor:
    """One unit in the last place of X's format; two results that are rounded may be that far apart."""
    eps = torch.finfo(p.x.dtype).eps
    return 1.01 * p.x.double().abs() * (eps**2 if p.rounding == "kahan" else eps)


def _decode(p: Parameter, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """The momentum in double, and one unit of its format."""
    if buffer.dtype != torch.int8:
        return buffer.double(), 1.01 * buffer.double().abs() * torch.finfo(buffer.dtype).eps
    blocks = momentum.blocks_of(p.factoring, p.settings)
    assert blocks is not None
    units = momentum.spread(p.state["momentum_scale"], blocks, buffer).double()
    return buffer.double() * units, 1.01 * units


def _differ(what: str, a: Tensor, b: Tensor, size: Tensor, grain: Tensor) -> str | None:
    beyond = ~((a - b).abs() <= TOLERANCE * size + grain) & ~(a.isnan() & b.isnan())
    if not bool(beyond.any()):
        return None
    return f"{what} differs in {int(beyond.sum())} of {b.numel()} elements, by up to {float((a - b).abs().max()):.3g}"
