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
from adafactor.core.report import StepMetrics
from adafactor.core.settings import Settings
from adafactor.kernels import eager

STEPS = 2  # of each variant: the first of a training has no R and no momentum to average with
LARGEST = 2**24  # elements of a parameter that is copied
TOLERANCE = 1e-4  # of the distance travelled: what rounding leaves, far below any mistake
COMPARED = ("step", "row", "col", "full", "momentum_scale")  # of the state, beside the momentum itself


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
        self.parameter, self._before = parameter, parameter.x.clone()
        state = {key: value.clone() for key, value in parameter.state.items()}
        self._copy = replace(parameter, x=parameter.x.clone(), state=state, metrics=StepMetrics())
        (executor,) = eager.prepare([self._copy])
        executor.begin([g.clone()], settings, None)
        executor.step()
        executor.end()

    def compare(self, trial: Trial) -> str | None:
        """Say what is wrong with the step that Triton has taken; then the parameter is given the right one."""
        ours, theirs = self.parameter, self._copy
        travelled = (theirs.x.float() - self._before.float()).abs().max()
        a, b = ours.state, theirs.state
        problems = [_differ(key, a[key].float(), b[key].float(), 2 * TOLERANCE) for key in COMPARED if key in a]
        eps = torch.finfo(theirs.x.dtype).eps if theirs.x.dtype.itemsize < 4 else 0.0
        if ours.rounding == "kahan":  # what rounding has taken away is there, too
            x, right = (p.x.float() + p.state["compensation"].float() for p in (ours, theirs))
            problems.append(_differ("X", x, right, 1.01 * eps**2, TOLERANCE * travelled))
        else:
            problems.append(_differ("X", ours.x.float(), theirs.x.float(), 1.01 * eps, TOLERANCE * travelled))
        if (key := momentum.key_in(a)) is not None and ours.settings.beta1:
            m, expected, dtype = a[key].float(), b[key].float(), a[key].dtype
            unit, least = (
                (0.0, 1.01) if dtype == torch.int8 else (torch.finfo(dtype).eps, TOLERANCE * expected.abs().max())
            )
            problems.append(_differ("the momentum", m, expected, 1.01 * unit, least))
        found = [problem for problem in problems if problem]
        trial.steps += bool(travelled > 0)
        trial.is_wrong = bool(found)
        if not found:
            return None
        ours.x.copy_(theirs.x)
        for key, value in a.items():
            value.copy_(b[key])
        return f"{ours.name} ({tuple(ours.x.shape)}, {ours.x.dtype}, {ours.settings}): {'; '.join(found)}"


def _differ(what: str, a: Tensor, b: Tensor, share: float, least: float | Tensor = 0.0) -> str | None:
    """Say where two tensors differ by more than a share of each number, and something more."""
    beyond = ~((a - b).abs() <= share * b.abs() + least) & ~(a.isnan() & b.isnan())
    if not bool(beyond.any()):
        return None
    return f"{what} differs in {int(beyond.sum())} of {b.numel()} elements, by up to {float((a - b).abs().max()):.3g}"
