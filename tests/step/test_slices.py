"""With `per_slice`, the slices of a stack step as if they were parameters of their own, and nothing else differs."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adafactor import Adafactor
from tests import inside, oracle
from tests.compare import error

pytestmark = pytest.mark.usefixtures("backend")

NAN = float("nan")
STEPS = 3


def as_slices(x: Tensor) -> list[Tensor]:
    """Parameters of their own, with the strides that the slices have; a vector and a matrix are none but themselves."""
    alike = [(one, torch.empty_strided(one.shape, one.stride(), dtype=x.dtype)) for one in parts(x.detach())]
    return [new.copy_(one).requires_grad_() for one, new in alike]


def parts(x: Tensor) -> list[Tensor]:
    return list(x.unbind()) if x.dim() > 2 else [x]


def joined(ones: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(list(ones)) if like.dim() > 2 else ones[0]


def compare_with_separate_parameters(
    tensors: list[Tensor], grads: list[list[Tensor | None]], keywords: dict[str, Any]
) -> tuple[Adafactor, Adafactor]:
    """Step stacks and their slices side by side; every bit of X, the state and the report must be the same."""
    stacks = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    apart = [as_slices(x) for x in tensors]
    ours, theirs = Adafactor(stacks, per_slice=True, **keywords), Adafactor(list(chain(*apart)), **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that are skipped
        for step in grads:
            for x, ones, g in zip(stacks, apart, step, strict=True):
                x.grad = None if g is None else g.clone(memory_format=torch.preserve_format)
                for one, part in zip(ones, [None] * len(ones) if g is None else as_slices(g), strict=True):
                    one.grad = None if part is None else part.detach()
            ours.step()
            theirs.step()
        reports = ours.report(), theirs.report()
    for x, ones in zip(stacks, apart, strict=True):
        assert torch.equal(x.nan_to_num(7), joined(ones, x).nan_to_num(7))
        for key, value in ours.state[x].items():
            assert torch.equal(value, joined([theirs.state[one][key] for one in ones], x)), key
    for mine, other in zip(*reports, strict=True):
        assert repr(replace(mine, name="")) == repr(replace(other, name=""))  # NaN is NaN in text
    return ours, theirs


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def interleaved(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@given(data=st.data())
def test_a_stack_steps_as_its_slices_would_alone(data: st.DataObject) -> None:
    one_of = st.sampled_from
    dtype = data.draw(one_of([torch.float32, torch.bfloat16, torch.float64]))
    size, most = st.integers(1, 5), 3
    shapes = data.draw(st.lists(st.lists(size, min_size=1, max_size=4).map(tuple), min_size=1, max_size=most))
    is_long = min(map(len, shapes)) > 2  # each has two axes to name
    keywords = {
        "factored": data.draw(one_of(["outer", "row", "column", False])),
        "beta1": data.draw(one_of([0.0, 0.9])),
        "momentum_of": data.draw(one_of(["update", "gradient"])),
        "relative": data.draw(st.booleans()),
        "clip": data.draw(one_of([1.0, None])),
        "weight_decay": data.draw(one_of([0.0, 0.1])),
        "min_factored": data.draw(one_of([0, 3])),
        "axes": data.draw(one_of([None, (-2, -1), (1, 0)])) if is_long else None,
        "rounding": data.draw(one_of(["nearest", "stochastic", "kahan"])),
        "on_nonfinite": "skip",
    }
    tensors = [normal(shape, i, dtype) for i, shape in enumerate(shapes)]
    # the slices lie between each other in memory, where Triton leaves some to eager PyTorch
    is_interleaved = data.draw(st.booleans())
    if is_interleaved:
        tensors = list(map(interleaved, tensors))
    grads: list[list[Tensor | None]] = []
    for t in range(STEPS):
        step: list[Tensor | None] = [normal(shape, 10 * t + i, dtype) for i, shape in enumerate(shapes)]
        for i, g in enumerate(step):
            kind = data.draw(one_of(["whole", "whole", "missing", "NaN in a slice", "zeros in a slice"]))
            which = data.draw(st.integers(0, shapes[i][0] - 1))
            if kind == "missing":
                step[i] = None
            elif g is not None and kind != "whole":
                g[which] = NAN if kind == "NaN in a slice" else 0.0
            if g is not None and step[i] is not None and is_interleaved:
                step[i] = interleaved(g)
        grads.append(step)
    compare_with_separate_parameters(tensors, grads, keywords)


@pytest.mark.parametrize("keywords", [{}, {"beta1": 0.9, "weight_decay": 0.1}, {"factored": False}], ids=str)
def test_on_a_device_slices_are_masked_one_by_one(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inside.keep_scalars_on_the_device(monkeypatch)
    grads: list[list[Tensor | None]] = [[normal((3, 4, 2), t, torch.float32)] for t in range(1, 4)]
    bad = grads[1][0]
    assert bad is not None
    bad[1] = NAN
    stack = normal((3, 4, 2), 0, torch.float32)
    ours, _ = compare_with_separate_parameters([stack], grads, {**keywords, "backend": "eager"})
    assert next(iter(ours.state.values()))["step"].tolist() == [3, 2, 3]


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(3, 40, 130), (3, 10, 100)], ids=str)  # for int8, slices of the second are too small
def test_a_momentum_of_few_bits_is_that_of_the_slices(shape: tuple[int, ...], format: str) -> None:
    grads: list[list[Tensor | None]] = [[normal(shape, t, torch.float32)] for t in (1, 2)]
    stack = normal(shape, 0, torch.float32)
    compare_with_separate_parameters([stack], grads, {"beta1": 0.9, "momentum_dtype": format})


def test_the_whole_is_not_the_sum_of_its_slices() -> None:
    """The control: slices of different sizes, of which RMS(X) and the clipping are their own."""
    row = replace(oracle.TABLE_2["O"], per_slice=True)
    assert error(row, (3, 7, 5), torch.float64, steps=3, per_slice=False) > 1e-3


@pytest.mark.parametrize("how", ["skip", "raise", "ignore"])
def test_a_nan_concerns_the_slice_that_has_it(how: str) -> None:
    x = normal((4, 5, 3), 0, torch.float32).requires_grad_()
    optimizer = Adafactor([("experts", x)], per_slice=True, on_nonfinite=how)
    x.grad = normal((4, 5, 3), 1, torch.float32)
    optimizer.step()
    before, state = x.detach().clone(), copy.deepcopy(optimizer.state[x])
    x.grad[2, 1, 1] = NAN
    if how == "raise":
        with pytest.raises(FloatingPointError, match=r"the gradient of experts\[2\] \(shape \(5, 3\)\)"):
            optimizer.step()
        assert torch.equal(x, before)
        return
    if how == "skip":
        with pytest.warns(RuntimeWarning, match=r"skipped experts\[2\] \(shape \(5, 3\)\)"):
            optimizer.step()
            reports = optimizer.report()
        assert [record.skipped for record in reports] == [0, 0, 1, 0]
        assert optimizer.state[x]["step"].tolist() == [2, 2, 1, 2]
        assert all(torch.equal(value[2], state[key][2]) for key, value in optimizer.state[x].items())
        assert torch.equal(x[2], before[2])
    else:
        optimizer.step()
        assert x[2].isnan().any()
    assert all(x[i].isfinite().all() and not torch.equal(x[i], before[i]) for i in (0, 1, 3))


def test_the_report_has_a_record_for_each_slice() -> None:
    shapes: dict[str, tuple[int, ...]] = {"norm": (7,), "experts": (3, 5, 4), "empty": (0, 4), "head": ()}
    params = [(name, torch.ones(shape)) for name, shape in shapes.items()]
    for _, p in params:
        p.requires_grad_()
        p.grad = torch.ones_like(p)
    optimizer = Adafactor(params, per_slice=True)
    optimizer.step()
    records = optimizer.report()
    names = ["norm", "experts[0]", "experts[1]", "experts[2]", "empty", "head"]
    assert [record.name for record in records] == names
    assert [record.shape for record in records] == [(7,), *[(5, 4)] * 3, (0, 4), ()]
    stack = optimizer.state[params[1][1]]
    assert {key: tuple(value.shape) for key, value in stack.items()} == {
        "step": (3,),
        "row": (3, 5, 1),
        "col": (3, 1, 4),
    }
    assert sum(record.state_bytes for record in records[1:4]) == sum(value.nbytes for value in stack.values())
    assert optimizer.state[params[0][1]]["step"].shape == ()  # a vector is one parameter


def test_a_matrix_is_no_stack_of_vectors() -> None:
    p, q = (torch.ones(4, 9, requires_grad=True) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [p], "per_slice": True}, {"params": [q]}]
    optimizer = Adafactor(groups)
    assert optimizer.state[p].keys() == optimizer.state[q].keys() == {"step", "row", "col"}


@pytest.mark.parametrize("before", [False, True])
def test_a_state_of_the_whole_is_not_taken_for_one_of_slices(before: bool) -> None:
    p = torch.ones(1, 5, 3, requires_grad=True)
    state = Adafactor([("experts", p)], per_slice=before).state_dict()
    state["param_groups"][0]["per_slice"] = not before
    with pytest.raises(ValueError, match=r"experts of shape .*per_slice"):
        Adafactor([("experts", p)]).load_state_dict(state)


def test_a_negative_count_of_one_slice_is_refused() -> None:
    p = torch.ones(2, 3, 4, requires_grad=True)
    optimizer = Adafactor([p], per_slice=True)
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor([1.0, -1.0])
    with pytest.raises(ValueError, match="must be whole numbers that are not negative"):
        optimizer.load_state_dict(state)


def test_a_gradient_that_does_not_fit_is_refused_by_the_name_of_the_whole() -> None:
    p = torch.ones(3, 4, 5, requires_grad=True)
    optimizer = Adafactor([("experts", p)], per_slice=True)
    p.grad = torch.ones(3, 4, 5)
    optimizer.step()
    p.grad = torch.ones(3, 4, 5).to_sparse()
    with pytest.raises(TypeError, match="the gradient of experts is sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"axes=\(0, 2\) must be axes of the tensor, whose shape is \(4, 5\)"):
        Adafactor([p], per_slice=True, axes=(0, 2))


def test_what_users_put_into_the_state_stays() -> None:
    p = torch.ones(3, 4, 5, requires_grad=True)
    optimizer = Adafactor([p], per_slice=True)
    optimizer.state[p].update(note="mine", norm=torch.tensor(2.0), table=torch.ones(2, 7))
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["note"] == "mine" and optimizer.state[p]["norm"] == 2
    assert optimizer.state[p]["step"].tolist() == [2, 2, 2]
