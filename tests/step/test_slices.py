"""What `per_slice` says and refuses; that slices step as they would alone is a property of every matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adafactor import Adafactor
from tests.cases import normal
from tests.exact import refused

pytestmark = pytest.mark.usefixtures("backend")


def test_a_slice_that_is_skipped_or_refused_is_named_and_counted_alone() -> None:
    for how in ("skip", "raise"):
        x = normal((4, 5, 3), 0).requires_grad_()
        optimizer = Adafactor([("experts", x)], per_slice=True, on_nonfinite=how)
        x.grad = normal((4, 5, 3), 1)
        x.grad[2, 1, 1] = float("nan")
        if how == "raise":
            with refused(optimizer, FloatingPointError, r"the gradient of experts\[2\] \(shape \(5, 3\)\)"):
                optimizer.step()
        else:
            with pytest.warns(RuntimeWarning, match=r"skipped experts\[2\] \(shape \(5, 3\)\)"):
                optimizer.step()
                reports = optimizer.report()
            assert [record.skipped for record in reports] == [0, 0, 1, 0]
            assert optimizer.state[x]["step"].tolist() == [1, 1, 0, 1]


def test_the_report_has_a_record_for_each_slice() -> None:
    shapes: dict[str, tuple[int, ...]] = {"norm": (7,), "experts": (3, 5, 4), "empty": (0, 4), "head": ()}
    params = [(name, torch.ones(shape, requires_grad=True)) for name, shape in shapes.items()]
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer = Adafactor(params, per_slice=True)
    optimizer.step()
    records, slices = optimizer.report(), [f"experts[{i}]" for i in range(3)]
    assert [record.name for record in records] == ["norm", *slices, "empty", "head"]
    assert [record.shape for record in records] == [(7,), *[(5, 4)] * 3, (0, 4), ()]
    stack = optimizer.state[params[1][1]]
    found = {key: tuple(value.shape) for key, value in stack.items()}
    assert found == {"step": (3,), "row": (3, 5, 1), "col": (3, 1, 4)}
    assert sum(record.state_bytes for record in records[1:4]) == sum(value.nbytes for value in stack.values())
    assert optimizer.state[params[0][1]]["step"].shape == ()  # a vector is one parameter


def test_a_matrix_is_no_stack_of_vectors() -> None:
    p, q = (torch.ones(4, 9, requires_grad=True) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [p], "per_slice": True}, {"params": [q]}]
    optimizer = Adafactor(groups)
    assert optimizer.state[p].keys() == optimizer.state[q].keys() == {"step", "row", "col"}


def test_a_gradient_that_does_not_fit_is_refused_by_the_name_of_the_whole() -> None:
    p = torch.ones(3, 4, 5, requires_grad=True)
    optimizer = Adafactor([("experts", p)], per_slice=True)
    p.grad = torch.ones(3, 4, 5).to_sparse()
    with pytest.raises(TypeError, match="the gradient of experts is sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"axes=\(0, 2\) must be axes of the tensor, whose shape is \(4, 5\)"):
        Adafactor([p], per_slice=True, axes=(0, 2))


def test_what_users_put_into_the_state_stays() -> None:
    p = torch.ones(3, 4, 5, requires_grad=True)
    optimizer = Adafactor([p], per_slice=True)
    optimizer.state[p].update(note="mine", norm=torch.tensor(2.0), table=torch.ones(2, 7))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["note"] == "mine" and optimizer.state[p]["norm"] == 2
    assert optimizer.state[p]["step"].tolist() == [1, 1, 1]
