"""A momentum in bfloat16 or int8: rounded to a neighbour, right in the mean, and converted where it is loaded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.core.momentum import BLOCK, SMALLEST, Blocks, decode, encode, to_bfloat16
from adafactor.core.rounding import keys, random_words, roots
from tests import reference

pytestmark = pytest.mark.usefixtures("backend")

FORMATS = pytest.mark.parametrize("format", ["bfloat16", "int8"])
# with uneven last blocks; convolutions; stacks; a vector and a small matrix, which stay float32; an unfactored matrix
SHAPES = [(32, 200), (20, 300), (30, 17, 3, 3), (3, 20, 130), (5000,), (60, 50), (1, 5000)]


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0) -> list[Parameter]:
    draws = np.random.default_rng(seed)
    return [Parameter(torch.tensor(draws.normal(size=shape)).to(dtype)) for shape in shapes]


def set_gradients(params: list[Parameter], t: int) -> None:
    draws = np.random.default_rng(t)
    for p in params:
        p.grad = torch.tensor(draws.normal(size=p.shape) * np.exp(draws.normal(size=p.shape[-1:]))).to(p.dtype)


def train(optimizer: Adafactor, first: int, last: int) -> None:
    for t in range(first, last + 1):
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], t)
        optimizer.step()


def test_it_is_kept_in_one_or_two_bytes_and_small_tensors_in_four() -> None:
    for format, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for state in Adafactor(parameters(), beta1=0.9, momentum_dtype=format).state.values():
            assert state["momentum_of_update"].dtype == dtype
    kept = [*Adafactor(parameters(), beta1=0.9, momentum_dtype="int8").state.values()]
    for shape, state in zip(SHAPES, kept, strict=True):
        is_int8 = len(shape) > 1 and np.prod(shape) >= SMALLEST
        assert ("momentum_of_update_int8" in state) == is_int8 != ("momentum_of_update" in state), shape
    scales = [tuple(state["momentum_scale"].shape) for state in kept if "momentum_scale" in state]
    assert scales == [(32, 2), (20, 3), (30, 3), (3, 20, 2), (1, 40)]  # of a convolution, 8 × 3 × 3 elements a block
    large = Adafactor(parameters(shapes=[(512, 1024)]), beta1=0.9, momentum_dtype="int8")
    (record,) = large.report()
    assert record.state_bytes <= 512 * 1024 * (1 + 4 / BLOCK) + 4 * (512 + 1024 + 1)


@given(seed=st.integers(0, 2**32), spread=st.floats(0, 8), rows=st.integers(1, 5), cols=st.integers(1, 400))
def test_int8_is_a_neighbour_of_the_value_and_its_mean_is_right(seed: int, spread: float, rows: int, cols: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, cols, generator=draws) * torch.exp(spread * torch.randn(rows, cols, generator=draws))
    blocks, total = Blocks(1, BLOCK), torch.zeros(rows, cols, dtype=torch.float64)
    for t in range(1, 65):
        random = random_words(torch.arange(rows * cols).view(rows, cols), keys(roots(seed, 0), t))
        integers, scale = encode(value, blocks, random)
        found = decode(integers, scale, blocks).double()
        unit = torch.tensor(reference.largest_in_blocks(value.double().numpy(), 1)) / 127
        assert bool(((found - value).abs() <= unit * (1 + 1e-4)).all())
        total += (found - value).double() / unit.clamp(min=1e-300)
    # 64 draws of a spread of at most half a unit: five standard errors of the mean of all
    assert abs(float(total.mean()) / 64) < 5 * 0.5 / (64 * rows * cols) ** 0.5 + 1e-4


def test_to_nearest_is_to_nearest_and_what_a_format_has_stays() -> None:
    value = torch.randn(7, 300)
    integers, scale = encode(value, Blocks(1, BLOCK), None)
    again, same = encode(decode(integers, scale, Blocks(1, BLOCK)), Blocks(1, BLOCK), None)
    assert torch.equal(again, integers) and torch.allclose(same, scale, rtol=1e-6)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    random = random_words(torch.arange(2**16), keys(roots(1, 0), 1))
    kept = to_bfloat16(every.float(), random)
    assert torch.equal(kept.nan_to_num(), every.nan_to_num()) and torch.equal(kept.isnan(), every.isnan())


def test_zeros_and_blocks_too_small_for_a_scale_stay_zeros() -> None:
    value = torch.zeros(2, 256)
    value[1, :128] = 2.0**-120
    integers, scale = encode(value, Blocks(1, BLOCK), torch.full((2, 256), 2**32 - 1))
    assert not integers.any() and not scale.any()


@FORMATS
def test_an_average_too_small_for_the_format_is_right_in_the_mean(format: str) -> None:
    """A momentum of 1/2 on its way to 1, by a hundredth of a unit of its format a step; to nearest it would stand."""
    steps = 60
    p = Parameter(torch.zeros(32, 128))
    optimizer = Adafactor(
        [p], lr=1.0, relative=False, lr_decay=None, clip=None, beta1=0.9999, beta2=0.0, factored=False,
        momentum_dtype=format,
    )  # fmt: skip
    state = optimizer.state[p]
    if format == "int8":
        state["momentum_of_update_int8"].fill_(64)
        state["momentum_of_update_int8"][:, 0] = 127  # 1, the largest of each block
        state["momentum_scale"].fill_(1 / 127)
    else:
        state["momentum_of_update"].fill_(0.5)
    start = reference.values(state)["momentum"][:, 1:].mean()
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved = reference.values(state)["momentum"][:, 1:].mean() - start
    assert abs(moved / ((1 - start) * (1 - 0.9999**steps)) - 1) < 0.15


@pytest.mark.parametrize("to", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("of", ["float32", "bfloat16", "int8"])
def test_loaded_into_another_format_it_is_converted_and_said_once(of: str, to: str) -> None:
    params = parameters(shapes=[(32, 200), (70,)])
    source = Adafactor(params, beta1=0.9, momentum_dtype=of)
    train(source, 1, 2)
    others = [Parameter(p.detach().clone()) for p in params]
    target = Adafactor(others, beta1=0.9, momentum_dtype=to)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert len([w for w in caught if "momentum_dtype" in str(w.message)]) == (of != to)
    assert target.param_groups[0]["momentum_dtype"] == to
    for p, q in zip(params, others, strict=True):
        before, after = reference.values(source.state[p])["momentum"], reference.values(target.state[q])["momentum"]
        unit = reference._unit(before, target.state[q])
        assert bool((np.abs(before - after) <= 0.51 * np.asarray(unit) + 1e-7 * np.abs(before)).all())
    train(target, 3, 4)


def test_edited_in_mid_run_the_state_follows_and_the_bits_of_a_word_are_used_once() -> None:
    params = parameters(shapes=[(32, 200), (70,)])
    optimizer = Adafactor(params, beta1=0.9)
    train(optimizer, 1, 2)
    for format in ("int8", "bfloat16", "float32"):
        optimizer.param_groups[0]["momentum_dtype"] = format
        train(optimizer, 3, 4)
        assert ("momentum_scale" in optimizer.state[params[0]]) == (format == "int8")
    words = random_words(torch.arange(1000), (5, 6)).numpy()  # X by the lower 16 bits, the momentum by the upper
    assert abs(np.corrcoef((words & 0xFFFF).astype(float), (words >> 16).astype(float))[0, 1]) < 0.15


def test_rules_may_give_a_format_only_where_there_is_a_momentum() -> None:
    with pytest.raises(ValueError, match="momentum_dtype='int8' needs a momentum: set beta1"):
        Adafactor([("w", parameters()[0])], rules={"w": {"momentum_dtype": "int8"}})
    Adafactor([{"params": parameters(), "beta1": 0.9}], momentum_dtype="int8")


@pytest.mark.parametrize("missing", ["momentum_scale", "momentum_of_update_int8"])
def test_half_of_an_int8_momentum_is_refused(missing: str) -> None:
    params = parameters(shapes=[(32, 200)])
    saved = Adafactor(params, beta1=0.9, momentum_dtype="int8").state_dict()
    saved["state"][0] = {key: value for key, value in saved["state"][0].items() if key != missing}
    with pytest.raises(ValueError, match="of int8 its 'momentum_scale'"):
        Adafactor(parameters(shapes=[(32, 200)]), beta1=0.9, momentum_dtype="int8").load_state_dict(saved)
