"""Any tensor: shapes, stacks, strides and dtypes, beside eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "short rows": [(70, 3), (37, 130), (16, 768), (600, 16)],
    "longer rows": [(9, 1040), (5, 2309)],
    "rows that take the larger programs": [(3, 4112), (2, 8208), (2, 4101)],
    "rows that no program can hold": [(2, 16400), (3, 16403), (2, 35000)],
    "stacks and convolutions": [(3, 20, 17), (6, 5, 3, 3), (2, 3, 4, 5, 6), (20, 2, 18)],
    "kept whole": [(31,), (), (1, 23), (4099,), (33000,), (1,), (2, 1, 5)],
}


def both(begin: list[Tensor], steps: int = 3, g_dtype: torch.dtype | None = None, **keywords: Any) -> float:
    """How far Triton ends from eager PyTorch."""
    grads = random_steps(begin, steps, g_dtype)
    ours, _ = train(begin, grads, **keywords)
    theirs, _ = train(begin, grads, backend="eager", **keywords)
    return distance(ours, theirs, begin)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_shape_is_stepped_as_plain_torch_does(shapes: list[tuple[int, ...]]) -> None:
    assert both(starts(shapes), steps=1 if max(shapes[0][-1:], default=0) > 4000 else 2) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{"beta1": 0.9}, {"beta1": 0.9, "momentum_of": "gradient"}], ids=str)
@pytest.mark.parametrize("factored", ["outer", "row", "column", False], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_shape_with_any_estimator_and_momentum(
    shapes: list[tuple[int, ...]], factored: str | bool, keywords: dict[str, Any]
) -> None:
    assert both(starts(shapes), factored=factored, weight_decay=0.1, **keywords) < 2e-5


def test_long_rows_with_momentum_of_gradients() -> None:
    assert both(starts([(3, 2064), (3, 70)]), beta1=0.9, momentum_of="gradient") < 1e-5


def test_any_order_of_memory() -> None:
    """Transposed, channels last, with gaps; and a gradient in another order than its parameter."""
    plain = starts([(20, 33), (8, 6, 3, 3), (24, 40), (12, 14)])
    begin = [
        plain[0].t(),
        plain[1].to(memory_format=torch.channels_last),
        plain[2].t().contiguous().t(),
        plain[3],
    ]
    grads = random_steps(begin, 2)
    for step in grads:
        other = step[3]
        assert other is not None
        step[3] = other.t().contiguous().t()
    ours, optimizer = train(begin, grads)
    theirs, _ = train(begin, grads, backend="eager")
    assert distance(ours, theirs, begin) < 1e-5
    assert all(not record.skipped for record in optimizer.report())


def test_gaps_between_rows() -> None:
    wide = starts([(30, 64)])[0]
    ends = []
    for backend in ("triton", "eager"):
        from adafactor import Adafactor

        storage = wide.clone()
        p = storage[:, :40].requires_grad_()
        optimizer = Adafactor([p], backend=backend)
        for step in random_steps([torch.empty(30, 40)], 2):
            p.grad = step[0]
            optimizer.step()
        ends.append(p.detach())
        assert torch.equal(storage[:, 40:], wide[:, 40:])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)


TYPES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("x", "g"), TYPES, ids=str)
def test_any_pair_of_dtypes(x: torch.dtype, g: torch.dtype) -> None:
    """In 16 bits two results may round to neighbours: then they are one unit in the last place apart."""
    begin = starts([(20, 33), (40, 16), (31,)], x)
    grads = random_steps(begin, 2)
    ours, _ = train(begin, [[t.to(g) for t in step if t is not None] for step in grads], lr=0.3, lr_decay=None)
    theirs, _ = train(
        begin, [[t.to(g) for t in step if t is not None] for step in grads], backend="eager", lr=0.3, lr_decay=None
    )
    for a, b in zip(ours, theirs, strict=True):
        unit = torch.finfo(x).eps * b.abs().double().clamp(min=1e-3)
        apart = (a.double() - b.double()).abs() / unit
        assert (
            apart.max() <= (1.01 if x.itemsize == 2 else 40) and (apart > 0.01).double().mean() < 0.02 or x.itemsize > 2
        )


def test_rows_that_are_further_apart_than_32_bits_can_say_are_refused_by_name() -> None:
    p = torch.ones(2, 16, requires_grad=True)
    optimizer = Adafactor([p], backend="triton")
    p.grad = torch.empty(2**32 + 16).as_strided((2, 16), (2**32, 1)).fill_(1.0)  # memory that is not touched costs none
    with pytest.raises(ValueError, match="too far apart"):
        optimizer.step()
