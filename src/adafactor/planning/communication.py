"""What a sharded step sends, from shapes and placements alone, and the table of `adafactor plan --shards`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from adafactor.core.factoring import Factoring, find_factoring, state_bytes
from adafactor.distributed.shard import Split
from adafactor.planning.models import Shape, find

MODELS = ("llama-1b", "llama-7b", "llama-70b")  # when no model is named
NUMBER = 8  # bytes: sums travel in double, on every device that has it


@dataclass(frozen=True)
class Traffic:
    """The all-reduces of one step, of the first rank, which has the largest part of everything."""

    collectives: int
    per_dimension: tuple[int, ...]  # bytes handed to all-reduce along each mesh dimension

    @property
    def bytes(self) -> int:
        """All bytes. A ring of N ranks sends each of them 2·(N − 1)/N times."""
        return sum(self.per_dimension)


def traffic(parameters: Iterable[tuple[Factoring, tuple[int | None, ...]]], mesh: tuple[int, ...]) -> Traffic:
    """Compute the traffic of one step.

    Args:
        parameters: for each its factoring and, for each mesh dimension, the axis that it cuts or None for copies; one
            that is on the first dimensions only has an entry for each of these.
        mesh: how many ranks there are along each dimension.
    """
    splits = [
        Split(factoring, tuple(a if n > 1 else None for a, n in zip(axes, mesh, strict=False)))
        for factoring, axes in parameters
    ]
    numbers = [0] * len(mesh)
    for split in splits:
        shapes = {**split.shapes(_largest_part(split, mesh)), "scalars": (2,)}  # ΣU², ΣX²
        for name, over in split.partial().items():
            for k in over:
                numbers[k] += prod(shapes[name])
    busy = [k for k, n in enumerate(numbers) if n]
    for k in busy:
        numbers[k] += 2 * sum(len(split.axes) > k for split in splits)  # is the gradient there, is it finite?
    return Traffic(2 * len(busy), tuple(NUMBER * n for n in numbers))


def fully_sharded(shapes: Iterable[Shape], ranks: int) -> Traffic:
    """Compute the traffic of FSDP2 with Algorithm 6: every parameter is cut along its first axis, if it has one."""
    return traffic([(find_factoring(shape, "outer"), (0 if shape else None,)) for shape in shapes], (ranks,))


def _largest_part(split: Split, mesh: tuple[int, ...]) -> Shape:
    part = list(split.factoring.shape)
    for axis, ranks in zip(split.axes, mesh, strict=False):
        if axis is not None:
            part[axis] = -(-part[axis] // ranks)
    return tuple(part)


@dataclass(frozen=True)
class ModelTraffic:
    """One model on so many ranks, with FSDP2, Algorithm 6 and bfloat16 gradients; all bytes are exact."""

    model: str
    parameters: int
    ranks: int
    state_bytes: int  # of all ranks together, unsharded
    collectives: int  # of a step
    optimizer_sent: int  # by each rank in a step, in a ring
    gradients_sent: int  # likewise, by the reduce-scatter of bfloat16 gradients

    @property
    def share(self) -> float:
        """What the optimizer adds to the gradients' traffic."""
        return self.optimizer_sent / self.gradients_sent if self.gradients_sent else 0.0


def plan_shards(model: str, shapes: list[Shape], ranks: int) -> ModelTraffic:
    """Compute the state of a model with these shapes, and what a step sends."""
    count, sums = sum(map(prod, shapes)), fully_sharded(shapes, ranks)
    state = sum(state_bytes(find_factoring(shape, "outer"), torch.float32, momentum=False) for shape in shapes)
    # a ring of N ranks sends 2·(N − 1)/N of an all-reduce's bytes and (N − 1)/N of a reduce-scatter's
    optimizer, gradients = 2 * sums.bytes * (ranks - 1) // ranks, 2 * count * (ranks - 1) // ranks
    return ModelTraffic(model, count, ranks, state, sums.collectives, optimizer, gradients)


def shapes_of(name: str) -> list[Shape]:
    """Return the shapes that are trained in a preset, a config.json, or the module of `module:function`."""
    return [w.shape for w in find(name).trained]


def traffic_table(models: Iterable[ModelTraffic]) -> str:
    """Write a table in Markdown."""
    heads = [
        "| model | parameters | optimizer state | ranks | collectives | optimizer sends | gradients send | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {m.model} | {m.parameters:,} | {m.state_bytes / 1e6:.1f} MB | {m.ranks:,} | {m.collectives} "
        f"| {m.optimizer_sent / 1e6:.1f} MB | {m.gradients_sent / 1e9:.2f} GB | {m.share:.3%} |"
        for m in models
    ]
    return "\n".join([*heads, *rows])
