"""What a sharded step sends, from shapes and placements alone, and the tables of `adafactor plan --shards`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from adafactor.core.factoring import Factoring, find_factoring, state_bytes
from adafactor.distributed.shard import Split
from adafactor.planning.models import Model, Shape, find, largest_part

MODELS = ("llama-1b", "llama-7b", "llama-70b", "llama-405b")  # when no model is named
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
        part = split.factoring.shape
        for axis, ranks in zip(split.axes, mesh, strict=False):
            part = part if axis is None else largest_part(part, ranks, axis)
        shapes = {**split.shapes(part), "scalars": (2,)}  # ΣU², ΣX²
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


@dataclass(frozen=True)
class Link:
    """What connects ranks, and how long collectives take on it if nothing else is in the way.

    A ring of N ranks takes N − 1 messages for a reduce-scatter and twice as many for an all-reduce, of 1/N of the bytes
    each; a tree takes 2·⌈log₂N⌉ for an all-reduce, and all bytes twice.
    """

    bandwidth: float  # bytes a second that each rank sends
    latency: float  # seconds that a message takes besides

    def all_reduce(self, count: int, size: int, ranks: int) -> float:
        """Return the seconds of so many all-reduces, of so many bytes together: the faster of rings and trees."""
        ring = 2 * (ranks - 1) * (count * self.latency + size / ranks / self.bandwidth)
        tree = 2 * (count * (ranks - 1).bit_length() * self.latency + size / self.bandwidth)
        return min(ring, tree)

    def reduce_scatter(self, count: int, size: int, ranks: int) -> float:
        """Return the seconds of so many reduce-scatters, of so many bytes together, in rings."""
        return (ranks - 1) * (count * self.latency + size / ranks / self.bandwidth)


@dataclass(frozen=True)
class ModelTraffic:
    """One model on so many ranks, with FSDP2, Algorithm 6 and bfloat16 gradients; all bytes are exact.

    Inside backward the parameters of each wrapped module step together: the same bytes in more collectives.
    """

    model: str
    parameters: int
    ranks: int
    state_bytes: int  # of all ranks together, unsharded
    collectives: int  # of a step
    optimizer_sent: int  # by each rank in a step, in a ring
    gradients_sent: int  # likewise, by the reduce-scatter of bfloat16 gradients
    collectives_in_backward: int  # of a step that is taken inside backward
    gradients_seconds: float | None = None  # the rest is computed, on a given link
    optimizer_seconds: float | None = None
    optimizer_seconds_in_backward: float | None = None

    @property
    def share(self) -> float:
        """What the optimizer adds to the gradients' traffic."""
        return self.optimizer_sent / self.gradients_sent if self.gradients_sent else 0.0


def plan_shards(
    model: str, shapes: Sequence[Shape], ranks: int, modules: int = 1, link: Link | None = None
) -> ModelTraffic:
    """Compute the state of a model with these shapes, what a step sends, and how long that takes on a link.

    Args:
        model: its name.
        shapes: of all parameters that are trained.
        ranks: how many share each of them.
        modules: how many are wrapped by `fully_shard`: the layers and the whole.
        link: what connects the ranks; None: nothing is said of time.
    """
    count, sums = sum(map(prod, shapes)), fully_sharded(shapes, ranks)
    state = sum(state_bytes(find_factoring(shape, "outer"), torch.float32, momentum=False) for shape in shapes)
    gradients, in_backward = torch.bfloat16.itemsize * count, modules * sums.collectives
    # a ring of N ranks sends 2·(N − 1)/N of an all-reduce's bytes and (N − 1)/N of a reduce-scatter's
    optimizer_sent = 2 * sums.bytes * (ranks - 1) // ranks
    gradients_sent = gradients * (ranks - 1) // ranks
    result = ModelTraffic(model, count, ranks, state, sums.collectives, optimizer_sent, gradients_sent, in_backward)
    if link is None:
        return result
    return replace(
        result,
        gradients_seconds=link.reduce_scatter(modules, gradients, ranks),
        optimizer_seconds=link.all_reduce(sums.collectives, sums.bytes, ranks),
        optimizer_seconds_in_backward=link.all_reduce(in_backward, sums.bytes, ranks),
    )


def shapes_of(name: str) -> list[Shape]:
    """Return the shapes that are trained in a preset, a config.json, or the module of `module:function`."""
    return [w.shape for w in find(name).trained]


def traffic_of(model: Model, ranks: int, link: Link | None = None) -> ModelTraffic:
    """Compute the traffic of what is trained of a model, each of whose layers is wrapped."""
    return plan_shards(model.name, [w.shape for w in model.trained], ranks, model.layers + 1, link)


def traffic_table(models: Iterable[ModelTraffic]) -> str:
    """Write a table in Markdown; what has no time has no columns for it."""
    rows = []
    for m in models:
        row = {
            "model": m.model,
            "parameters": f"{m.parameters:,}",
            "optimizer state": f"{m.state_bytes / 1e6:.1f} MB",
            "ranks": f"{m.ranks:,}",
            "gradients send": f"{m.gradients_sent / 1e9:.2f} GB",
            "optimizer sends": f"{m.optimizer_sent / 1e6:.1f} MB",
            "share": f"{m.share:.3%}",
            "collectives": f"{m.collectives}",
            "in backward": f"{m.collectives_in_backward}",
        }
        times = m.gradients_seconds, m.optimizer_seconds, m.optimizer_seconds_in_backward
        for name, seconds in zip(("gradients take", "optimizer takes", "in backward it takes"), times, strict=True):
            row |= {} if seconds is None else {name: f"{1e3 * seconds:,.1f} ms"}
        rows.append(row)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
