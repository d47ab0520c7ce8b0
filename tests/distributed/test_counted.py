"""What a sharded step sends and keeps: two small all-reduces per sharded mesh dimension, whatever the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from adafactor import Adafactor
from studies.temporaries import Largest
from tests.distributed.nets import Net, batch, fsdp, made, tensor_parallel
from tests.distributed.rig import Collectives, line, split, square
from tests.distributed.test_models import both
from tests.ranks import on_ranks


def sent(build: Callable[[Any], Any], even: bool, collectives: Collectives) -> list[int]:
    """The bytes of each all-reduce of a step that is not the first."""
    model = build(made(lambda: Net(even)))
    optimizer = Adafactor(model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)).mean().backward()
        found = collectives.during(optimizer.step)
    return found


def flags(parameters: int) -> int:
    """Two doubles of each."""
    return 16 * parameters


def columns(*shapes: tuple[int, int]) -> int:
    """Column sums and one mean of the rows, in double, of each matrix that is cut by rows."""
    return sum(8 * (m + 1) for _, m in shapes)


# of Net: matrices of 10 × 12, 7 × 12, 12 × 7, a convolution of 3 × 12 × 2, and what counts as vectors
OF_NET = flags(11) + columns((10, 12), (7, 12), (12, 7)) + 2 * columns((3, 12))


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_sends_columns_and_a_few_numbers_in_two_collectives(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    for found in on_ranks(size, lambda: sent(fsdp(line()), False, collectives)):
        assert found == [OF_NET, flags(11)]


def test_copies_send_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    for found in on_ranks(4, lambda: sent(fsdp(square()), False, collectives)):
        assert found == [OF_NET, flags(11)]


def test_each_sharded_dimension_has_its_own_two(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    for found in on_ranks(4, lambda: sent(both(square()), True, collectives)):
        assert len(found) == 4


def test_partial_gradients_share_one_more_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    for found in on_ranks(2, lambda: sent(tensor_parallel(line(), sequence=True), True, collectives)):
        assert len(found) == 3 and found[0] == 2 * 12 * 4  # the norm's weight and bias, 12 float32 each


@pytest.mark.parametrize(
    ("shape", "axis", "numbers"),
    [((1000, 300), 0, 300 + 1 + 2), ((1000, 300), 1, 1000 + 2), ((1000,), 0, 2), ((4, 100, 30), 0, 2)],
    ids=str,
)
def test_a_matrix_sends_one_axis_and_a_few_scalars(
    shape: tuple[int, ...], axis: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Collectives(monkeypatch)

    def check() -> None:
        p = split(torch.ones(shape), line(), [Shard(axis)]).requires_grad_()
        optimizer = Adafactor([p])
        for _ in range(2):
            p.grad = torch.ones_like(p).detach()
            found = collectives.during(optimizer.step)
        assert found == [8 * numbers, 16]

    on_ranks(2, check)


def test_extra_memory_is_a_small_multiple_of_the_sums() -> None:
    """What the step of a part makes, without what torch makes for DTensors."""

    def check() -> None:
        p = split(torch.ones(2000, 1500), line(), [Shard(0)]).requires_grad_()
        optimizer = Adafactor([p])
        for t in range(2):
            p.grad = torch.ones_like(p).detach()
            if t == 0:
                optimizer.step()
        with Largest() as largest:
            optimizer.step()
        assert largest.bytes <= 20 * 8 * (2000 + 1500) < p.to_local().nbytes  # type: ignore[attr-defined]

    on_ranks(2, check)
