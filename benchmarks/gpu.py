"""The bytes that a step in Triton moves, counted without a GPU from how tensors are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adafactor.kernels.triton.executor import Executor


def moved(works: Sequence[Executor]) -> dict[str, int]:
    """Bytes that each launch reads and writes in a step, whatever the cache holds, from how tensors are cut.

    Tables and scalars are left out: they are a few bytes for thousands of elements.
    """
    from adafactor.kernels.triton import fields as f
    from adafactor.kernels.triton.cut import checked

    moved_bytes: dict[str, int] = defaultdict(int)
    for work in works:
        kind, stat = work.kind, work.stat.itemsize
        pieces = work.table.tensors[:, f.PIECES.value].tolist()
        for parameter, cut_into in zip(work.parameters, pieces, strict=True):
            x, g, count = kind.x.itemsize, kind.g.itemsize, parameter.x.numel()
            how = work.table.cuts[parameter]
            first = g + (stat if kind.momentum == 2 else 0)  # an element
            last = g + 2 * x + (2 * stat if kind.momentum else 0) + (2 * x if kind.rounding == 2 else 0)
            moved_bytes["measure"] += x * count
            if parameter.settings.relative:
                moved_bytes["check"] += x * count * min(len(checked(cut_into)) + 1, cut_into) // cut_into
            if "full" in parameter.state:
                moved_bytes["first walk"] += (first + stat) * count
                moved_bytes["last walk"] += (last + 2 * stat) * count
                continue
            rows, columns, stack = _matrices(work, parameter)
            partial = 2 * how.units(rows) * columns * stack * stat  # column sums of G² and of G²/R
            twice = how.is_long and not (kind.aligned and columns <= 2 * kind.held)
            moved_bytes["first walk"] += (2 if twice else 1) * first * count + partial + 2 * rows * stack * stat
            moved_bytes["fold"] += partial + 2 * columns * stack * stat
            moved_bytes["last walk"] += last * count + 2 * (rows + columns) * stack * stat
    return dict(moved_bytes)


def _matrices(work: Executor, parameter: Any) -> tuple[int, int, int]:
    """Rows, columns, and the number of matrices of a stack."""
    from adafactor.kernels.triton.table import factored_axes

    p, q = factored_axes(parameter)
    rows, columns = parameter.x.shape[p], parameter.x.shape[q]
    return rows, columns, parameter.x.numel() // (rows * columns)
