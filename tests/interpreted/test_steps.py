"""Bad gradients, missing ones, weights that somebody has written to, schedules, reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES = [(37, 20), (64, 32), (33,), (4, 6, 5)]
BACKENDS = ("triton", "eager")


def test_tensors_may_be_without_a_gradient_for_a_while() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 4)
    steps[1][0] = steps[1][2] = steps[2][1] = None
    ours, optimizer = train(begin, steps)
    theirs, other = train(begin, steps, backend="eager")
    assert distance(ours, theirs, begin) < 1e-5
    assert [r.steps for r in optimizer.report()] == [r.steps for r in other.report()] == [3, 3, 3, 4]


@pytest.mark.parametrize("keywords", [{}, {"beta1": 0.9, "momentum_dtype": "int8"}], ids=str)
def test_a_step_that_is_not_taken_leaves_every_bit(keywords: dict[str, Any], short_rows: None) -> None:
    begin = starts([(16, 384), (48, 17), (31,), (3, 520)])
    steps = random_steps(begin, 2)
    for bad in steps[1][::2]:
        assert bad is not None
        bad.view(-1)[5] = torch.nan
    (before, first), (after, second) = (train(begin, steps[:count], **keywords) for count in (1, 2))
    for i, p, q in zip(range(4), first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        same = [torch.equal(value, second.state[q][key]) for key, value in first.state[p].items()]
        assert all([torch.equal(before[i], after[i]), *same]) == (i % 2 == 0)
    with pytest.warns(RuntimeWarning, match="skipped parameter 0"):
        assert [record.skipped for record in second.report()] == [1, 0, 1, 0]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "torch knows of it": lambda p: p.mul_(30),
    "behind its back": lambda p: p.data.mul_(30),
}


@pytest.mark.parametrize("name", WRITES)
def test_after_somebody_wrote_to_a_parameter_at_most_one_step_uses_the_old_rms(name: str) -> None:
    lengths: list[list[float]] = []
    for backend in BACKENDS:
        begin = starts([(37, 20)])
        steps = random_steps(begin, 6)
        _, optimizer = train(begin, steps[:3], backend=backend)
        (p,) = optimizer.param_groups[0]["params"]
        with torch.no_grad():
            WRITES[name](p)
        lengths.append([])
        for (g,) in steps[3:]:
            before, p.grad = p.detach().clone(), g
            optimizer.step()
            lengths[-1].append(float((p.detach() - before).norm()))
    ours, theirs = lengths
    assert ours[1:] == pytest.approx(theirs[1:], rel=2e-2 if name == "behind its back" else 1e-5)
    assert ours[0] == pytest.approx(theirs[0] / (30 if name == "behind its back" else 1), rel=1e-4)


def test_the_report_is_that_of_plain_torch() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 3)
    choices: list[dict[str, Any]] = [{}, {"relative": False, "lr": 1e-3}]
    for keywords in choices:
        _, ours = train(begin, steps, clip=0.5, **keywords)
        _, theirs = train(begin, steps, clip=0.5, backend="eager", **keywords)
        for a, b in zip(ours.report(), theirs.report(), strict=True):
            for name in ("rms_update", "clip_rate", "step_size", "rms_parameter", "relative_change", "beta2", "steps"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name


@pytest.mark.parametrize("by", ["rho", "alpha", "lr"], ids=str)
def test_weight_decay_by_anything(by: str) -> None:
    begin = starts([(9, 20), (31,)])
    grads = random_steps(begin, 3)
    choices: list[dict[str, Any]] = [{}, {"relative": False, "maximize": True, "lr": 0.03}]
    for keywords in choices:
        both = (train(begin, grads, name, weight_decay=0.3, weight_decay_by=by, **keywords)[0] for name in BACKENDS)
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-7)


def test_a_bad_gradient_raises_before_anything_is_changed() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 1)
    assert steps[0][2] is not None
    steps[0][2][7] = torch.inf
    with pytest.raises(FloatingPointError, match="parameter 2"):
        train(begin, steps, on_nonfinite="raise")
