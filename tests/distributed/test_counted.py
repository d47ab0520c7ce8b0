"""What a sharded step sends and keeps: two small all-reduces per sharded mesh dimension, whatever the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.distributed.tensor import Shard

from adafactor import Adafactor
from studies.temporaries import Largest
from tests.distributed.nets import Net, batch, both, even, fsdp, made, tensor_parallel
from tests.distributed.rig import Collectives, line, split, square
from tests.ranks import on_ranks

FLAGS = 16 * 11  # two doubles of each parameter


def columns(*shapes: tuple[int, int]) -> int:
    """Column sums and one mean of the rows, in double, of each matrix that is cut by rows."""
    return sum(8 * (m + 1) for _, m in shapes)


# of Net: matrices of 10 × 12, 7 × 12, 12 × 7, a convolution of 3 × 12 × 2, and what counts as vectors
OF_NET = [FLAGS + columns((10, 12), (7, 12), (12, 7)) + 2 * columns((3, 12)), FLAGS]
NORM = 2 * 12 * 4  # weight and bias of the norm, whose gradients are partial: 12 float32 each
SENT: dict[str, tuple[int, Callable[[], Any], Callable[[], Net], list[Any]]] = {
    "FSDP2": (2, lambda: fsdp(line()), Net, OF_NET),
    "FSDP2 on 4": (4, lambda: fsdp(line()), Net, OF_NET),
    "HSDP, whose copies send nothing more": (4, lambda: fsdp(square()), Net, OF_NET),
    "two of each dimension": (4, lambda: both(square()), even, [ANY] * 4),
    "one more of all partial gradients": (2, lambda: tensor_parallel(line(), sequence=True), even, [NORM, ANY, ANY]),
}


@pytest.mark.parametrize("way", SENT)
def test_a_model_sends_columns_and_a_few_numbers_in_two_collectives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, build, net, expected = SENT[way]
    collectives = Collectives(monkeypatch)

    def sent() -> list[int]:
        model = build()(made(net))
        optimizer = Adafactor(model.named_parameters())
        for step in range(2):  # the first one asks whether all agree
            optimizer.zero_grad()
            model(batch(step)).mean().backward()
            found = collectives.during(optimizer.step)
        return found

    assert on_ranks(size, sent) == [expected] * size


@pytest.mark.parametrize(
    ("shape", "axis", "numbers"),
    [((1000, 300), 0, 300 + 1 + 2), ((1000, 300), 1, 1000 + 2), ((1000,), 0, 2), ((4, 100, 30), 0, 2)],
    ids=str,
)
def test_a_matrix_sends_one_axis_and_a_few_scalars_and_keeps_little_more(
    shape: tuple[int, ...], axis: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Collectives(monkeypatch)

    def check() -> None:
        p = split(torch.ones(shape), line(), [Shard(axis)]).requires_grad_()
        optimizer = Adafactor([p])
        for _ in range(2):
            p.grad = torch.ones_like(p).detach()
            with Largest() as largest:
                found = collectives.during(optimizer.step)
        assert found == [8 * numbers, 16]
        assert largest.bytes <= 20 * 8 * sum(shape)

    on_ranks(2, check)
