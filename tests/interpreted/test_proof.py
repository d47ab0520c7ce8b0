"""The first steps of each kind of parameter are compared with eager PyTorch, and a wrong one is put right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adafactor import Adafactor
from adafactor.core.contract import Parameter
from adafactor.kernels.triton import proof
from adafactor.kernels.triton.plan import Plan
from tests.interpreted.guarded import random_steps, starts, train

SHAPES = [(24, 16), (24, 16), (33,)]


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """As at the beginning of a process; and forget what was found here."""
    proof.known.cache_clear()
    yield
    proof.known.cache_clear()


def spoil(change: Callable[[Plan], object], patch: pytest.MonkeyPatch) -> None:
    """Let every step of Triton's do one thing more."""
    step = Plan.step

    def wrong(plan: Plan, g: Tensor) -> None:
        step(plan, g)
        change(plan)

    patch.setattr(Plan, "step", wrong)


def run(backend: str) -> tuple[list[Tensor], Adafactor]:
    return train(starts(SHAPES), random_steps(starts(SHAPES), 4), backend)


def test_one_of_each_kind_is_copied_and_only_in_its_first_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    prove = proof.prove

    def note(plan: Plan, *rest: Any) -> str | None:
        seen.append(plan.x.numel())
        return prove(plan, *rest)

    monkeypatch.setattr(proof, "prove", note)
    run("triton")
    assert sorted(seen) == [33, 33, 24 * 16, 24 * 16]
    run("triton")
    assert len(seen) == 4


def test_slices_whose_factors_begin_elsewhere_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for what begins at a multiple of 16 bytes; X does here in every slice, R does not."""
    slices: list[Parameter] = []
    prove = proof.prove

    def note(plan: Plan, *rest: Any) -> str | None:
        slices.append(plan.parameter)
        return prove(plan, *rest)

    monkeypatch.setattr(proof, "prove", note)
    p = starts([(2, 3, 4)])[0].requires_grad_()
    p.grad = torch.ones_like(p)
    Adafactor([p], backend="triton", per_slice=True).step()
    assert len(slices) == 2 and all(one.x.data_ptr() % 16 == 0 for one in slices)


def last_columns(plan: Plan) -> None:
    plan.x.data.view(-1)[-1] += 1e-3


def statistics(plan: Plan) -> None:
    for key in ("row", "full"):
        if key in plan.parameter.state:
            plan.parameter.state[key].mul_(1.001)


@pytest.mark.parametrize("change", [last_columns, statistics])
def test_a_wrong_step_is_put_right_and_eager_goes_on_with_one_warning(
    change: Callable[[Plan], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(change, monkeypatch)
    with pytest.warns(RuntimeWarning, match="Triton's step was wrong on .*Please report") as told:
        ours, optimizer = run("triton")
    assert len(told) == 1
    theirs, other = run("eager")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert str(optimizer.report()) == str(other.report())
    again, _ = run("triton")  # a second optimizer does not try it
    assert all(torch.equal(a, b) for a, b in zip(again, theirs, strict=True))


@pytest.mark.parametrize(
    ("key", "dtype", "keywords"),
    [
        ("momentum_of_update", torch.float32, {"beta1": 0.9, "momentum_dtype": "bfloat16"}),
        ("compensation", torch.bfloat16, {"rounding": "kahan"}),
    ],
)
def test_a_wrong_momentum_and_a_wrong_compensation_are_found(
    key: str, dtype: torch.dtype, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = starts([(24, 16)], dtype)[0].requires_grad_()
    optimizer = Adafactor([p], backend="triton", **keywords)
    p.grad = torch.ones_like(p)
    spoil(lambda plan: plan.parameter.state[key].add_(0.02), monkeypatch)
    with pytest.warns(RuntimeWarning, match="Triton's step was wrong"):
        optimizer.step()


def test_a_wrong_count_is_found_late_in_a_training() -> None:
    p = starts([(24, 16)])[0].requires_grad_()
    optimizer = Adafactor([p], backend="triton")
    optimizer.state[p]["step"].fill_(20_000)
    p.grad = torch.ones_like(p)
    with pytest.MonkeyPatch.context() as patch:
        spoil(lambda plan: plan.parameter.state["step"].add_(1), patch)
        with pytest.warns(RuntimeWarning, match="Triton's step was wrong.*step differs"):
            optimizer.step()


@pytest.mark.parametrize("value", [torch.nan, 0.0])
def test_a_step_that_moves_nothing_proves_nothing_and_is_not_tried_for_ever(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = starts([(24, 16)])[0].requires_grad_()
    optimizer = Adafactor([p], backend="triton")
    monkeypatch.setattr(proof, "TRIES", 3)
    for _ in range(5):
        p.grad = torch.full_like(p, value)
        optimizer.step()
    assert not any(proof.known().right.values())
    monkeypatch.setattr(proof, "prove", None)  # which nobody calls any more
    optimizer.step()


@pytest.mark.parametrize("entry", ["a note", torch.tensor([torch.inf]), torch.empty(0)], ids=repr)
def test_what_a_user_puts_into_a_state_is_not_compared(entry: object) -> None:
    p = starts([(24, 16)])[0].requires_grad_()
    optimizer = Adafactor([p], backend="triton")
    optimizer.state[p]["mine"] = entry
    p.grad = torch.ones_like(p)
    optimizer.step()  # and no warning
    assert sum(proof.known().right.values()) == 1


def test_a_large_parameter_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LARGEST", 100)
    spoil(last_columns, monkeypatch)
    p = starts([(24, 16)])[0].requires_grad_()
    optimizer = Adafactor([p], backend="triton")
    p.grad = torch.ones_like(p)
    optimizer.step()  # and no warning
