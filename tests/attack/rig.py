"""A model, its optimizer, and beside them what both should be: the oracle's step, and a newborn optimizer's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.core.momentum import BUFFERS
from tests import inside, reference
from tests.exact import assert_same
from tests.reference import Expected, Outcome, Values

REPAIRED = 1e-5  # of a step after a change of X that nothing announced
EXPECTED_WARNINGS = ".*its gradient is not finite"


@dataclass
class Tally:
    """What the next report should say of a parameter."""

    steps: int = 0
    skipped: int = 0
    last: Outcome | None = None


class Rig:
    """Steps, and compares after each."""

    def __init__(self, backend: str):
        """Without parameters; `grow` brings them."""
        self.backend = backend
        self.model = nn.Module()
        self.optimizer: Any = None
        self.kept: dict[str, Values] = {}  # the state that the last step left
        self.tallies: dict[str, Tally] = {}
        self.unannounced: set[str] = set()  # whose values were changed since the last step through `.data`

    @property
    def params(self) -> dict[str, Parameter]:
        """By name."""
        return dict(self.model.named_parameters())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def structure(self) -> tuple[tuple[str, ...], ...]:
        """The names in each group."""
        names = {id(p): name for name, p in self.params.items()}
        return tuple(tuple(names[id(p)] for p in group["params"]) for group in self.groups)

    def grow(self, values: list[Tensor], **keywords: Any) -> None:
        """A group of new parameters."""
        made = []
        for value in values:
            name = f"p{len(self.params)}"
            self.model.register_parameter(name, Parameter(value))
            self.tallies[name] = Tally()
            made.append(name)
        group = {"params": [self.params[name] for name in made], **keywords}
        if self.optimizer is None:
            self.optimizer = Adafactor([group], backend=self.backend)
        else:
            self.optimizer.add_param_group(group)

    def group_of(self, name: str) -> dict[str, Any]:
        """The group that a parameter is in now."""
        return next(group for names, group in zip(self.structure, self.groups, strict=True) if name in names)

    def start_tallies_anew(self) -> None:
        """As the optimizer does when it is copied or loaded."""
        self.tallies = {name: Tally() for name in self.params}

    def newborn(self) -> tuple[dict[str, Parameter], Any]:
        """Clones of the parameters with the same gradients, and an optimizer made for them from the state dict."""
        clones = {name: Parameter(p.detach().clone(), p.requires_grad) for name, p in self.params.items()}
        for name, p in self.params.items():
            clones[name].grad = p.grad
        groups = [
            {**group, "params": [clones[name] for name in names]}
            for names, group in zip(self.structure, self.groups, strict=True)
        ]
        optimizer = Adafactor(groups, backend=self.backend)
        optimizer.load_state_dict(self.optimizer.state_dict())
        return clones, optimizer

    def step(self, act: Callable[[], object] | None = None) -> None:
        """One step with the gradients that are there, by `optimizer.step()` or another act, and all comparisons."""
        for name, values in self.kept.items():
            now = reference.values(self.optimizer.state[self.params[name]])
            equal = [np.array_equal(now[key], value, equal_nan=True) for key, value in values.items()]
            assert all(equal), f"the state of {name} is not what the last step left"
        expected, parts = Expected(self.optimizer), list(reference.parts(self.optimizer))
        bad = [part.is_bad for part in parts]
        clones, newborn = self.newborn()

        outcome, twin_outcome = attempt(act or self.optimizer.step), attempt(newborn.step)
        if outcome == "cannot":  # the order of memory; nothing may have changed
            assert self.backend in inside.COMPILED, "only a compiled backend may refuse an order of memory"
            expected.outcomes = [
                Outcome(reference.exact(part.x), reference.values(part.state), taken=False) for part in parts
            ]
        else:
            assert outcome == ("refused" if expected.is_refused else "stepped")
        assert not (problem := expected.problem()), problem
        names = [name for group in self.structure for name in group]
        for name, should, is_bad in zip(names, expected.outcomes, bad, strict=True):
            if twin_outcome == outcome != "cannot":
                self._compare_with_newborn(name, clones[name], newborn.state[clones[name]], should)
            self.kept[name] = reference.values(self.optimizer.state[self.params[name]])
            tally = self.tallies[name]
            if should.taken:
                tally.steps, tally.last = tally.steps + 1, should
            tally.skipped += is_bad and outcome == "stepped" and not should.taken
        self.unannounced.clear()

    def _compare_with_newborn(self, name: str, clone: Tensor, state: dict[str, Tensor], expected: Outcome) -> None:
        p, ours = self.params[name], self.optimizer.state[self.params[name]]
        assert set(ours) == set(state), f"{name}: {set(ours)} in the state, {set(state)} in a newborn's"
        # state that lies in another order than X since X was turned may go another way to the same result
        turned = any(key in ours and ours[key].stride() != p.stride() for key in ("full", *BUFFERS))
        pairs = [("X", p, clone), *((key, ours[key], state[key]) for key in ours)]
        loose = expected.taken and (turned or name in self.unannounced)
        for key, a, b in pairs:
            a, b = a.detach(), b.detach()
            if not loose:
                assert_same(a, b, f"{key} of {name}, beside that of a newborn optimizer")
            elif expected.finite:
                limit = REPAIRED * expected.length if key == "X" else REPAIRED * float(b.abs().max())
                limit += 4 * torch.finfo(p.dtype).eps * float(b.abs().max())
                assert float((a - b).abs().max()) <= limit, f"{key} of {name} is not that of a newborn optimizer"

    def report(self) -> None:
        """Ask for it, and compare it with what was counted."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", EXPECTED_WARNINGS, RuntimeWarning)
            records = self.optimizer.report()
        for name, record in zip([name for names in self.structure for name in names], records, strict=True):
            tally = self.tallies[name]
            assert (record.steps, record.skipped) == (tally.steps, tally.skipped), f"{name}: steps and skipped"
            if tally.last is None:
                assert np.isnan(record.rms_update), f"{name} has a figure without a step"
            elif np.isfinite(tally.last.rms_update) and tally.last.finite:
                np.testing.assert_allclose(record.rms_update, tally.last.rms_update, 1e-4, err_msg=f"RMS(U) of {name}")
                np.testing.assert_allclose(record.step_size, tally.last.step_size, 1e-4, err_msg=f"α of {name}")


def attempt(act: Callable[[], object]) -> str:
    """What came of a step: "stepped", "refused" (a gradient not finite) or "cannot" (an order of memory)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPECTED_WARNINGS, RuntimeWarning)
        try:
            act()
        except FloatingPointError:
            return "refused"
        except ValueError as problem:
            if "cannot step" not in str(problem):
                raise
            return "cannot"
    return "stepped"
