"""What a sharded step sends, from shapes and placements alone: no cluster is needed to ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from adafactor.core.factoring import Factoring, find_factoring
from adafactor.distributed.reductions import Cut

NUMBER = 8  # bytes: sums travel in double, on every device that has it


@dataclass(frozen=True)
class Traffic:
    """The all-reduces of one step, of the first rank, which has the largest part of everything."""

    collectives: int
    per_dimension: tuple[int, ...]  # bytes handed to all-reduce along each mesh dimension

    @property
    def bytes(self) -> int:
        """In all. A ring of N ranks sends each of them 2·(N − 1)/N times."""
        return sum(self.per_dimension)


def traffic(parameters: Iterable[tuple[Factoring, tuple[int | None, ...]]], mesh: tuple[int, ...]) -> Traffic:
    """The traffic of one step.

    Args:
        parameters: for each its factoring and, for each mesh dimension, the axis that it cuts or None for copies; one
            that is on the first dimensions only has an entry for each of these.
        mesh: how many ranks there are along each dimension.
    """
    cuts = [
        Cut(shapes, tuple(a if n > 1 else None for a, n in zip(axes, mesh, strict=False)))
        for shapes, axes in parameters
    ]
    numbers = [0] * len(mesh)
    for cut in cuts:
        shapes = {**cut.shapes(_largest_part(cut, mesh)), "scalars": (2,)}  # ΣU², ΣX²
        for name, over in cut.partial().items():
            for k in over:
                numbers[k] += prod(shapes[name])
    busy = [k for k, n in enumerate(numbers) if n]
    for k in busy:
        numbers[k] += 2 * sum(len(cut.axes) > k for cut in cuts)  # is the gradient there, is it finite?
    return Traffic(2 * len(busy), tuple(NUMBER * n for n in numbers))


def fully_sharded(shapes: Iterable[tuple[int, ...]], ranks: int) -> Traffic:
    """The traffic of FSDP2 with Algorithm 6: every parameter cut along its first axis."""
    return traffic([(find_factoring(shape, "outer"), (0,)) for shape in shapes], (ranks,))


def _largest_part(cut: Cut, mesh: tuple[int, ...]) -> tuple[int, ...]:
    part = list(cut.factoring.shape)
    for axis, ranks in zip(cut.axes, mesh, strict=False):
        if axis is not None:
            part[axis] = -(-part[axis] // ranks)
    return tuple(part)
