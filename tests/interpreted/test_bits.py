"""What must agree to the bit: rounding, any order of programs, gradients at any address."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import rounding
from adafactor.kernels.triton.elements import narrow, random_words, to_bfloat16
from tests.interpreted.guarded import random_steps, starts, train


@triton.jit
def round_all(x, number, out, nearest, half, count, key1, key2, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    start, low = tl.load(number + at, mask=at < count, other=0), (at * 7).to(tl.uint32)
    words = random_words(start, low, key1.to(tl.uint32), key2.to(tl.uint32))
    tl.store(out + at, to_bfloat16(value, words), mask=at < count)
    tl.store(nearest + at, narrow(value, tl.bfloat16), mask=at < count)
    tl.store(half + at, narrow(value, tl.float16), mask=at < count)


def awkward(count: int) -> Tensor:
    """Numbers of every size, and those that rounding stumbles over."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(count, generator=random) * torch.exp(30 * torch.randn(count, generator=random))
    special = [0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65520.0, 3.4e38, 6e-8, -3e-8, 6.1e-5, 1e-40, 1.0, -1.00390625]
    x[: len(special)] = torch.tensor(special)
    return x


def test_the_same_number_is_rounded_to_the_same_bits_as_in_plain_torch() -> None:
    count = 4096
    x = awkward(count)
    numbers = torch.arange(count) * 3_000_017  # beyond 32 bits
    numbers[1::2] = 3 * 2**32 - 5  # so that the lower halves overflow
    out, nearest, half = (torch.empty(count, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float16))
    keys = rounding.keys(rounding.roots(7, 5), 11)
    round_all[(1,)](x, numbers, out, nearest, half, count, *keys, BLOCK=count)
    words = rounding.random_words(numbers + 7 * torch.arange(count), keys)
    for ours, theirs in (
        (out, rounding.stochastic(x, torch.bfloat16, words)),
        (nearest, x.bfloat16()),
        (half, x.half()),
    ):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("shape", [(20, 1100), (70, 40), (1100,), (2, 9, 700)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_element_draws_its_own_random_number(shape: tuple[int, ...], transposed: bool) -> None:
    """Also beyond the first tile of a row, and in any order of memory: the bits are those of plain torch."""
    begin = starts([shape], torch.bfloat16)
    begin = [t.mT.contiguous().mT if transposed and t.dim() > 1 else t for t in begin]
    grads = random_steps(begin, 1)
    (ours,), _ = train(begin, grads, rounding="stochastic")
    (theirs,), _ = train(begin, grads, rounding="stochastic", backend="eager")
    assert (ours != theirs).sum() <= 1  # where the exact value is a neighbour in its last place
    assert (ours != train(begin, grads)[0][0]).double().mean() > 0.1  # it does matter


SHAPES = [(37, 20), (64, 32), (2, 12, 16), (33,)]


def run(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES, **keywords: object
) -> list[Tensor]:
    begin = starts(shapes, dtype)
    params, optimizer = train(begin, random_steps(begin, 2), **keywords)
    return params + [value for p in optimizer.param_groups[0]["params"] for value in optimizer.state[p].values()]


first_seen: dict[str, list[Tensor]] = {}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
        {"factored": False, "shapes": [(9, 2000)]},
        {"shapes": [(20, 640)], "beta1": 0.9, "momentum_dtype": "int8"},
    ],
    ids=str,
)
def test_programs_may_run_in_any_order(order: str, keywords: dict[str, object]) -> None:
    found = run(**keywords)  # type: ignore[arg-type]
    before = first_seen.setdefault(str(keywords), found)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


def test_the_bits_do_not_depend_on_the_address_of_a_gradient() -> None:
    """Nor on how it lies, if it has gaps or another order: what is not aligned is copied as it is."""
    begin = starts([(48, 288), (64,), (40, 30)])
    steps = random_steps(begin, 2)
    ends = []
    for offset in (0, 1):
        params = [p.clone().requires_grad_() for p in begin]
        optimizer = Adafactor(params, backend="triton")
        for step in steps:
            for p, g in zip(params, step, strict=True):
                assert g is not None
                memory = torch.empty(2 * g.numel() + 1)[offset:]
                strides = {288: (1, 48), 30: (60, 1)}.get(g.shape[-1], g.stride())
                p.grad = memory.as_strided(g.shape, strides).copy_(g)
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
