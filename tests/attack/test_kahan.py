"""Weights that somebody else has written to: the next step starts from what is there, not from what was."""

from __future__ import annotations

import pytest
import torch

from tests.cases import BF16, F16, Case, Run, normal

DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(16, 12), (40,), (8, 6, 3, 3)], ids=str)
def test_what_kahan_kept_outlives_a_write_that_changes_nothing(
    shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    case = Case("", shape, {"rounding": "kahan", "lr": 1e-3, "relative": True}, dtype)  # steps of about half a unit
    written, left_alone = Run(case, backend), Run(case, backend)
    for _ in range(20):
        left_alone.step()
        written.step()
        with torch.no_grad():
            written.p.clamp_(-100, 100)
            kept = written.p.clone()
            written.p.zero_().copy_(kept)
    assert torch.equal(written.p, left_alone.p)
    assert bool(written.state["compensation"].any())


@DTYPES
@pytest.mark.parametrize("rows", [16, 1], ids=["the whole", "one row"])
def test_what_kahan_kept_of_a_weight_is_not_added_to_another_that_takes_its_place(
    dtype: torch.dtype, rows: int, backend: str
) -> None:
    keywords = {"rounding": "kahan", "lr": 1e-4, "lr_decay": None, "relative": True}
    run = Run(Case("", (16, 12), keywords, dtype), backend, torch.ones(16, 12, dtype=dtype))
    for i in range(3):  # each below half a unit in the last place, so that the remainder holds it
        run.check(normal((16, 12), i, dtype).abs())
    with torch.no_grad():
        run.p[:rows] = 2.0**-10
    run.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        run.case.give(run.p, torch.ones_like(run.p))
        run.optimizer.step()
        assert bool((run.p[:rows] == 2.0**-10).all())
