"""The backend in eager PyTorch, for any tensor on any device: `adafactor/algorithm.py` is what it runs.

`executor.py` is what surrounds the algorithm. `blocks.py` divides large tensors so that extra memory stays bounded, and
puts small ones end to end. Sums are taken in an order that does not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from adafactor.core import sums
from adafactor.core.contract import EXACT_TYPES, Parameter
from adafactor.core.factoring import Factored
from adafactor.kernels.eager.executor import Executor

SMALL = 2**14  # elements of a tensor whose V̂ is packed on a device; larger ones take their memory in blocks


def why_not(parameter: Parameter) -> str | None:
    """Nothing is in the way: any tensor will do."""
    return None


def prepare(parameters: list[Parameter]) -> list[Executor]:
    """Let each parameter of a CPU step alone, so that it stays in the cache; those of a device go side by side."""
    alike: dict[Any, list[Parameter]] = {}
    for number, parameter in enumerate(parameters):
        alike.setdefault(_batch_of(parameter) or number, []).append(parameter)
    return [Executor(members) for members in alike.values()]


def _batch_of(p: Parameter) -> tuple[Any, ...] | None:
    """What parameters must share to step side by side; None for one that steps alone."""
    statistics = [p.state[key] for key in p.factoring.statistics]
    can_pack = all(type(t) in EXACT_TYPES and t.is_contiguous() for t in statistics)
    is_large = not isinstance(p.factoring, Factored) and p.x.numel() > SMALL
    if sums.on_host(p.x) or p.overlaps or p.shard is not None or is_large or not can_pack or not p.x.numel():
        return None
    return p.x.device, p.group, p.x.dtype, p.gradient.dtype, p.in_lockstep, p.factoring.estimator
