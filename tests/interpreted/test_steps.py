"""Several tensors at once: some have no gradient for a while, or a bad one."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted.guarded import distance, random_steps, starts, train

SHAPES = [(37, 20), (64, 32), (33,), (4, 6, 5), (16, 48)]


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_each_tensor_is_stepped_or_left_by_itself() -> None:
    begin = starts(SHAPES)
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


def test_a_bad_gradient_raises_before_anything_is_changed() -> None:
    begin = starts(SHAPES)
    steps = random_steps(begin, 1)
    assert steps[0][2] is not None
    steps[0][2][7] = torch.inf
    with pytest.raises(FloatingPointError, match="parameter 2"):
        train(begin, steps, on_nonfinite="raise")
