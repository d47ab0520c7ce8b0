"""What a model's optimizer state takes and what a sharded step sends, from shapes alone: `adafactor plan`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from adafactor.layout import layout
from adafactor.traffic import fully_sharded

Shape = tuple[int, ...]


def llama(layers: int, width: int, inner: int, key: int, words: int, tied: bool) -> Iterator[Shape]:
    """The parameters of a Llama; `key` is the width of keys and values."""
    yield from [(words, width)] * (1 if tied else 2)
    yield (width,)
    for _ in range(layers):
        yield from [(width, width), (key, width), (key, width), (width, width)]
        yield from [(inner, width), (inner, width), (width, inner), (width,), (width,)]


PRESETS = {
    "llama-1b": (16, 2048, 8192, 512, 128256, True),  # Llama 3.2 1B
    "llama-7b": (32, 4096, 11008, 4096, 32000, False),  # Llama 2 7B
    "llama-70b": (80, 8192, 28672, 1024, 128256, False),  # Llama 3 70B
}


@dataclass(frozen=True)
class Line:
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


def plan_shards(model: str, shapes: list[Shape], ranks: int) -> Line:
    """The line of one model: what is kept, and what a step sends."""
    count, sums = sum(map(prod, shapes)), fully_sharded(shapes, ranks)
    state = sum(layout(shape, "outer").state_bytes(torch.float32, momentum=False) for shape in shapes)
    # a ring of N ranks sends 2·(N − 1)/N of an all-reduce's bytes and (N − 1)/N of a reduce-scatter's
    ours, theirs = 2 * sums.bytes * (ranks - 1) // ranks, 2 * count * (ranks - 1) // ranks
    return Line(model, count, ranks, state, sums.collectives, ours, theirs)


def shapes_of(name: str) -> list[Shape]:
    """Of a preset, or of the torch.nn.Module that `module:function` returns."""
    if name in PRESETS:
        return list(llama(*PRESETS[name]))
    if ":" not in name:
        raise ValueError(f"{name!r} must be module:function or one of {', '.join(PRESETS)}")
    from adafactor.bench.suites import of_model

    return list(of_model(name).shapes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `adafactor plan`."""
    parser.add_argument("models", nargs="*", default=list(PRESETS), help=f"{', '.join(PRESETS)}, or module:function")
    parser.add_argument("--shards", nargs="+", type=int, default=[8, 64, 1024], metavar="N", help="numbers of ranks")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if min(arguments.shards) < 1:
        raise ValueError(f"--shards {min(arguments.shards)} must be at least 1")
    print("| model | parameters | optimizer state | ranks | collectives | optimizer sends | gradients send | share |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        shapes = shapes_of(model)
        for ranks in arguments.shards:
            line = plan_shards(model, shapes, ranks)
            print(
                f"| {line.model} | {line.parameters:,} | {line.state_bytes / 1e6:.1f} MB | {ranks:,} "
                f"| {line.collectives} | {line.optimizer_sent / 1e6:.1f} MB | {line.gradients_sent / 1e9:.2f} GB "
                f"| {line.share:.3%} |"
            )
    return 0
