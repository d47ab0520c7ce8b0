"""What a sharded step sends, from shapes alone: the table of `adafactor plan --shards`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from adafactor.core.factoring import find_factoring
from adafactor.planning.communication import fully_sharded
from adafactor.planning.models import find
from adafactor.planning.shapes import Shape

TRAFFIC = ("llama-1b", "llama-7b", "llama-70b")  # when no model is named


@dataclass(frozen=True)
class Sent:
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


def plan_shards(model: str, shapes: list[Shape], ranks: int) -> Sent:
    """The line of one model: what is kept, and what a step sends."""
    count, sums = sum(map(prod, shapes)), fully_sharded(shapes, ranks)
    state = sum(find_factoring(shape, "outer").state_bytes(torch.float32, momentum=False) for shape in shapes)
    # a ring of N ranks sends 2·(N − 1)/N of an all-reduce's bytes and (N − 1)/N of a reduce-scatter's
    ours, theirs = 2 * sums.bytes * (ranks - 1) // ranks, 2 * count * (ranks - 1) // ranks
    return Sent(model, count, ranks, state, sums.collectives, ours, theirs)


def shapes_of(name: str) -> list[Shape]:
    """Of what is trained in a preset, a config.json, or the torch.nn.Module that `module:function` returns."""
    return [w.shape for w in find(name).trained]


def traffic_table(lines: Iterable[Sent]) -> str:
    """In Markdown."""
    heads = [
        "| model | parameters | optimizer state | ranks | collectives | optimizer sends | gradients send | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [
        f"| {sent.model} | {sent.parameters:,} | {sent.state_bytes / 1e6:.1f} MB | {sent.ranks:,} "
        f"| {sent.collectives} | {sent.optimizer_sent / 1e6:.1f} MB | {sent.gradients_sent / 1e9:.2f} GB "
        f"| {sent.share:.3%} |"
        for sent in lines
    ]
    return "\n".join([*heads, *rows])
