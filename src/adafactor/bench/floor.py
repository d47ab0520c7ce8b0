"""The bytes that any Adafactor step must move, whatever it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from adafactor.core.factoring import find_factoring


def floor_bytes(shapes: Sequence[tuple[int, ...]], itemsize: int, momentum: bool, cache: int | None) -> int:
    """Bytes between memory and processor in one step; divided by the bandwidth of a copy, the least time.

    Once: G is read, X is read and written, statistics (and momentum) are read and written in float32. The size of a
    step depends on a sum over all of U, so a tensor is walked twice: G is read once more, and so are statistics that
    are kept whole. The second walk can find at most one cache full of what the first one read; where the size of the
    cache is unknown, all of it. RMS(X) is taken as known from the last step.
    """
    total = 0
    for shape in shapes:
        tensor, numel = find_factoring(shape, "outer"), prod(shape)
        kept = 4 * sum(prod(s) for s in tensor.statistics.values())
        once = 3 * itemsize * numel + 2 * kept + (8 * numel if momentum else 0)
        again = itemsize * numel + (kept if tensor.estimator == "full" else 0)
        total += once + (0 if cache is None else max(0, again - cache))
    return total
