"""The bytes that a step in Triton moves, counted without a GPU from how tensors are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adafactor.kernels.triton.executor import Executor


def moved(executors: Sequence[Executor]) -> dict[str, int]:
    """Bytes that each launch reads and writes in a step, whatever the cache holds, from how tensors are cut.

    Tables and scalars are left out: they are a few bytes for thousands of elements.
    """
    from adafactor.core.momentum import BUFFERS
    from adafactor.kernels.triton import fields as f
    from adafactor.kernels.triton.layout import matrix_shape
    from adafactor.kernels.triton.sizes import checked

    moved_bytes: dict[str, int] = defaultdict(int)
    for executor in executors:
        kind, stat = executor.kind, executor.kind.stat.itemsize
        tiles = executor.table.tensors[:, f.TILES].tolist()
        for parameter, own in zip(executor.parameters, tiles, strict=True):
            x, g, count = kind.x.itemsize, kind.g.itemsize, parameter.x.numel()
            shape = matrix_shape(parameter)
            first, last = g, g + 2 * x + (2 * x if kind.KAHAN else 0)  # an element
            average = sum(parameter.state[key].nbytes for key in (*BUFFERS, "momentum_scale") if key in parameter.state)
            moved_bytes["first pass"] += average if kind.OF_GRADIENT else 0
            moved_bytes["last pass"] += 2 * average if kind.momentum else 0
            moved_bytes["measure"] += x * count
            if parameter.settings.relative:
                moved_bytes["begin step"] += x * count * min(len(checked(own)) + 1, own) // own
            if shape is None:
                moved_bytes["first pass"] += (first + stat) * count
                moved_bytes["last pass"] += (last + 2 * stat) * count
                continue
            rows, columns = shape
            stack, units = count // (rows * columns), -(-rows // executor.table.unit_rows(parameter))
            partial = 2 * units * columns * stack * stat  # column sums of G² and of G²/R
            moved_bytes["first pass"] += first * count + partial + 3 * rows * stack * stat
            moved_bytes["fold"] += partial + 3 * columns * stack * stat
            moved_bytes["last pass"] += last * count + 3 * (rows + columns) * stack * stat
    return dict(moved_bytes)
