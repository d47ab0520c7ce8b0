"""Any tensor: shapes, stacks, strides and dtypes, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "short rows": [(70, 3), (37, 130), (16, 768), (600, 16)],
    "longer rows, several units of them": [(41, 1040), (5, 2309)],
    "rows that take the larger programs": [(3, 4112), (2, 8208), (2, 4101)],
    "stacks and convolutions": [(3, 20, 17), (6, 5, 3, 3), (2, 3, 4, 5, 6)],
    "kept whole": [(31,), (), (1, 23), (33001,), (1,), (2, 1, 5)],
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        *(
            pytest.param({"factored": factored, "weight_decay": 0.1, "beta1": 0.9}, marks=SLOW)
            for factored in ("outer", "row", "column", False)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_shape_is_stepped_as_plain_torch_does(shapes: list[tuple[int, ...]], keywords: dict[str, Any]) -> None:
    begin = starts(shapes)
    grads = random_steps(begin, 1 if max(shapes[0][-1:], default=0) > 4000 else 3)
    ours, _ = train(begin, grads, **keywords)
    theirs, _ = train(begin, grads, backend="eager", **keywords)
    assert distance(ours, theirs, begin) < 3e-5


def test_gaps_between_rows_stay_as_they_are() -> None:
    wide, ends = starts([(30, 64)])[0], []
    for backend in ("triton", "eager"):
        storage = wide.clone()
        p = storage[:, :40].requires_grad_()
        optimizer = Adafactor([p], backend=backend)
        for step in random_steps([torch.empty(30, 40)], 2):
            p.grad = step[0]
            optimizer.step()
        ends.append(p.detach())
        assert torch.equal(storage[:, 40:], wide[:, 40:])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)


SEVERAL = [(37, 20), (64, 32), (33,), (4, 6, 5), (16, 48)]


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_each_tensor_is_stepped_or_left_by_itself() -> None:
    begin = starts(SEVERAL)
    steps = random_steps(begin, 4)
    steps[1][0] = steps[1][2] = steps[2][1] = None
    for bad in (steps[3][1], steps[3][2]):
        assert bad is not None
        bad.view(-1)[5] = torch.nan
    ours, optimizer = train(begin, steps, clip=0.5, weight_decay=0.1)
    theirs, other = train(begin, steps, backend="eager", clip=0.5, weight_decay=0.1)
    assert distance(ours, theirs, begin) < 1e-5
    both = list(zip(optimizer.report(), other.report(), strict=True))
    assert [record.steps for record, _ in both] == [3, 2, 2, 4, 4]
    for a, b in both:
        for name in ("rms_update", "clip_rate", "step_size", "rms_parameter", "relative_change", "beta2", "skipped"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name


INT8 = {"beta1": 0.9, "momentum_dtype": "int8"}
REFUSED: dict[str, tuple[Callable[[], Tensor], dict[str, Any], str]] = {
    "float16 at random": (lambda: torch.ones(4, 3).half(), {"rounding": "stochastic"}, "float16 at random"),
    "blocks of convolutions": (lambda: torch.ones(32, 16, 3, 3), INT8, "128 elem"),
    "blocks of a transposed matrix": (lambda: torch.ones(300, 40).t(), INT8, "128 elem"),
    "int8 of what is unfactored": (lambda: torch.ones(40, 300), {**INT8, "factored": False}, "momentum in int8"),
    "gaps in what is unfactored": (lambda: torch.ones(30, 64)[:, :40], {"factored": False}, "another order in memory"),
    "transposed and unfactored": (lambda: torch.ones(30, 40).t(), {"factored": False}, "not contiguous"),
    "batch axes with gaps": (lambda: torch.ones(9, 5, 8, 6)[:, :3, :, :4], {"axes": (0, 2)}, "batch axes have gaps"),
    "long rows": (lambda: torch.ones(2, 16385), {}, "its rows have more than 16,384 elements"),
}


@pytest.mark.parametrize(("make", "keywords", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_left_to_eager_is_refused_by_name(
    make: Callable[[], Tensor], keywords: dict[str, Any], why: str
) -> None:
    p = make().requires_grad_()
    optimizer = Adafactor([p], backend="triton", **keywords)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=why):
        optimizer.step()
    assert torch.equal(p.detach(), before)


def test_rows_may_be_further_apart_than_32_bits_can_say() -> None:
    ends = []
    for backend in ("triton", "eager"):
        p = torch.linspace(0.5, 1, 32).view(2, 16).requires_grad_()
        optimizer = Adafactor([p], backend=backend)
        wide = torch.empty(2**32 + 16).as_strided((2, 16), (2**32, 1))  # memory that is not touched costs none
        p.grad = wide.copy_(torch.linspace(-1, 2, 32).view(2, 16))
        optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)
