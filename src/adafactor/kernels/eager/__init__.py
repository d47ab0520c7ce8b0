"""The backend in plain torch, for any tensor on any device.

| file | what is in it |
|---|---|
| `algorithm` | Algorithms 4 and 5: one function for each line, and the walks that apply them block by block |
| `scalars` | rates, which steps are taken, step sizes, figures; on a device for many parameters at once |
| `vectors` | many small vectors on a device, laid end to end |
| `blocks` | how a tensor is cut so that extra memory stays bounded |

Sums are taken in an order that does not depend on the number of threads (`adafactor.core.sums`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adafactor.core import sums
from adafactor.core.bucket import Parameter
from adafactor.core.settings import Settings
from adafactor.core.step import Update
from adafactor.kernels.eager import algorithm
from adafactor.kernels.eager.scalars import Batch
from adafactor.kernels.eager.vectors import Factors, Vectors, find_factors, find_vectors


def why_not(parameter: Parameter) -> str | None:
    """Nothing is in the way: any tensor will do."""
    return None


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """On a CPU a work for each parameter, which stays in the cache from walk to walk; elsewhere one for a device."""
    executors: list[Executor] = []
    devices: dict[tuple[torch.device, bool], list[Parameter]] = {}
    for parameter in parameters:
        together = parameter.shard is not None or parameter.settings.on_nonfinite == "raise"
        if sums.on_host(parameter.x) or parameter.overlaps:
            executors.append(Executor([parameter], together))
        else:
            devices.setdefault((parameter.x.device, together), []).append(parameter)
    return executors + [Executor(members, together) for (_, together), members in devices.items()]


class Executor:
    """Parameters that plain torch steps side by side."""

    at_once = False
    scaling: tuple[Tensor, Tensor] | None = None  # it wants unscaled gradients

    def __init__(self, parameters: list[Parameter], together: bool):
        """Nothing is prepared before it is known which of them have a gradient."""
        self.parameters, self.together = parameters, together
        self.updates: list[Update] = []
        self._present: list[int] = []
        self._batches: list[Batch] = []
        self._vectors: list[Vectors] = []
        self._factors: list[Factors] = []

    def begin(self, grads: list[Tensor | None], settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take the gradients and compute the rates of this step."""
        self.updates = [Update(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]
        present = [i for i, g in enumerate(grads) if g is not None]
        if present != self._present:
            self._arrange(present)
        for batch in self._batches:
            members = [self.updates[i] for i in batch.places]
            batch.begin(members, settings[members[0].parameter.group])
        by_parameter = {u.parameter: u for u in self.updates}
        for vectors in self._vectors:
            vectors.begin([by_parameter[p] for p in vectors.parameters])
        for factors in self._factors:
            factors.begin([by_parameter[p] for p in factors.parameters])

    def moments(self) -> None:
        """First walk."""
        for vectors in self._vectors:
            vectors.moments()
        for u in self._walked():
            algorithm.moments(u)
        for factors in self._factors:
            factors.moments()
        for u in self._walked():
            if not u.is_laid:
                algorithm.means(u)

    def admit(self) -> None:
        """Decide which steps are taken."""
        for batch in self._batches:
            batch.admit()

    def factors(self) -> None:
        """R, C and 1/√V̂ of the steps that are taken."""
        self.updates = [u for batch in self._batches for u in batch.taken]
        for laid in self._factors:
            laid.factors()
        for u in self._factored():
            if not u.is_laid:
                algorithm.factors(u)

    def energy(self) -> None:
        """Second walk."""
        for vectors in self._vectors:
            vectors.energy()
        for u in self._walked():
            algorithm.energy(u)

    def conclude(self) -> None:
        """The length of each step."""
        for batch in self._batches:
            batch.conclude()

    def apply_(self) -> None:
        """Third walk."""
        for vectors in self._vectors:
            vectors.apply_()
        for u in self._walked():
            algorithm.apply_(u)
        for batch in self._batches:
            batch.advance()

    def step(self) -> None:
        """Never called: `step.walk` leads from part to part."""
        raise NotImplementedError

    def end(self) -> list[Parameter]:
        """Let go of the gradients."""
        self.updates = []
        for vectors in self._vectors:
            vectors.end()
        for factors in self._factors:
            factors.end()
        return [parameter for batch in self._batches for parameter in batch.end()]

    def flush(self) -> None:
        """Hand the figures to the traces."""
        for batch in self._batches:
            batch.flush()

    def _arrange(self, present: list[int]) -> None:
        """Put together what has the same settings; lay small vectors on a device end to end."""
        self.flush()
        self._present, members = present, [self.parameters[i] for i in present]
        groups: dict[int, list[int]] = {}
        for place, parameter in enumerate(members):
            groups.setdefault(parameter.group, []).append(place)
        self._batches = [Batch(places, [members[i] for i in places]) for places in groups.values()]
        self._vectors = [found for batch in self._batches for found in find_vectors(batch, self.updates)]
        self._factors = [found for batch in self._batches for found in find_factors(batch, self.updates)]

    def _walked(self) -> list[Update]:
        """What is walked block by block: not small vectors, and not an empty shard."""
        return [u for u in self._factored() if u.parameter.x.numel()]

    def _factored(self) -> list[Update]:
        laid = {id(parameter) for vectors in self._vectors for parameter in vectors.parameters}
        return [u for u in self.updates if id(u.parameter) not in laid]
