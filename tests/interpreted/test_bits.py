"""What must agree to the bit: rounding, any order of programs, a step inside backward, a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from adafactor import Adafactor
from adafactor.core import rounding
from adafactor.kernels.triton import executor
from adafactor.kernels.triton.elements import narrow, random_words, stochastic
from tests.interpreted.guarded import random_steps, starts, train


@triton.jit
def round_all(x, number, out, nearest, count, key1, key2, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    start, low = tl.load(number + at, mask=at < count, other=0), (at * 7).to(tl.uint32)
    words = random_words(start, low, key1.to(tl.uint32), key2.to(tl.uint32))
    tl.store(out + at, stochastic(value, words, DTYPE), mask=at < count)
    tl.store(nearest + at, narrow(value, DTYPE), mask=at < count)


def awkward(count: int) -> Tensor:
    """Numbers of every size, and those that rounding stumbles over."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(count, generator=random) * torch.exp(30 * torch.randn(count, generator=random))
    special = [0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65520.0, 3.4e38, 6e-8, -3e-8, 6.1e-5, 1e-40, 1.0, -1.00390625]
    x[: len(special)] = torch.tensor(special)
    half = torch.randn(count // 4, generator=random) * 1e-5  # where float16 is subnormal
    x[count // 2 : count // 2 + len(half)] = half
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_number_is_rounded_to_the_same_bits_as_in_plain_torch(dtype: torch.dtype) -> None:
    count = 4096
    x = awkward(count)
    numbers = torch.arange(count) * 3_000_017  # beyond 32 bits
    numbers[1::2] = 3 * 2**32 - 5  # so that the lower halves overflow
    out, nearest = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    keys = rounding.keys(rounding.roots(7, 5), 11)
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    round_all[(1,)](x, numbers, out, nearest, count, *keys, DTYPE=types[dtype], BLOCK=count)
    words = rounding.random_words(numbers + 7 * torch.arange(count), keys)
    assert torch.equal(out.view(torch.int16), rounding.stochastic(x, dtype, words).view(torch.int16))
    assert torch.equal(nearest.view(torch.int16), x.to(dtype).view(torch.int16))


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
    kept = [value for p in optimizer.param_groups[0]["params"] for value in optimizer.state[p].values()]
    return params + kept


first_seen: dict[str, list[Tensor]] = {}


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
        {"beta1": 0.9, "momentum_of": "gradient"},
        {"shapes": [(30, 17, 3, 3), (9, 520)], "beta1": 0.9, "momentum_dtype": "int8"},
    ],
    ids=str,
)
def test_programs_may_run_in_any_order(order: str, keywords: dict[str, object]) -> None:
    found = run(**keywords)  # type: ignore[arg-type]
    before = first_seen.setdefault(str(keywords), found)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_saving_and_loading_the_bits_are_the_same(dtype: torch.dtype) -> None:
    begin = starts(SHAPES, dtype)
    steps = random_steps(begin, 4)
    straight, _ = train(begin, steps)
    half, optimizer = train(begin, steps[:2])
    params = [p.clone().requires_grad_() for p in half]
    resumed = Adafactor(params, backend="triton")
    resumed.load_state_dict(optimizer.state_dict())
    for step in steps[2:]:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, params, strict=True))


def shifted(t: Tensor, by: int) -> Tensor:
    """A copy that begins so many elements after a multiple of 64 bytes."""
    memory = torch.empty(t.numel() + 32, dtype=t.dtype)
    first = -memory.data_ptr() % 64 // t.element_size() + by
    return memory[first : first + t.numel()].view(t.shape).copy_(t)


@pytest.mark.parametrize(
    ("shape", "keywords"), [((48, 288), {}), ((48, 288), {"beta1": 0.9, "momentum_of": "gradient"}), ((2, 9008), {})]
)
def test_a_gradient_at_an_odd_address_is_stepped_alone(
    shape: tuple[int, ...], keywords: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as good a step, by kernels of its own; the tensors beside it keep theirs, and so their bits.

    Kernels that load elements one by one hold the longest of these rows in two halves.
    """
    variants: list[tuple[str, bool]] = []
    run = executor.launch

    def launch(kernel: object, programs: int, arguments: object, options: dict[str, object]) -> None:
        variants.append((kernel.__name__, bool(options["KIND"].aligned)))  # type: ignore[attr-defined]
        run(kernel, programs, arguments, options)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "launch", launch)
    shapes, ends = [(32, 64), shape, (64,), (8, 64)], []
    for by in (0, 1):
        params = [shifted(p, 0).requires_grad_() for p in starts(shapes)]
        optimizer = Adafactor(params, backend="triton", **keywords)
        for p in params:
            optimizer.state[p] = {key: shifted(t, 0) for key, t in optimizer.state[p].items()}
        for step in random_steps(params, 3):
            for i, (p, g) in enumerate(zip(params, step, strict=True)):
                assert g is not None
                p.grad = shifted(g, by * (i == 1))
            variants.clear()
            optimizer.step()
        ends.append([p.detach() for p in params])
        assert {name for name, aligned in variants if not aligned} == ({"first_pass", "last_pass"} if by else set())
        assert {"first_pass", "last_pass"} <= {name for name, aligned in variants if aligned}
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(*ends, strict=True)) if i != 1)
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-6, atol=1e-8)
