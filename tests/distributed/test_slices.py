"""Stacks that step slice by slice: cut along the axis of the slices, each rank steps its own and sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from adafactor import Adafactor
from tests.cases import normal
from tests.distributed.rig import Collectives, assert_same_everywhere, everywhere, line, split, whole
from tests.ranks import on_ranks

SHAPES = [(5, 4, 6), (1, 3, 3), (6, 2, 3, 2)]  # uneven, fewer than ranks, of convolutions
KEYWORDS: dict[str, dict[str, Any]] = {
    "Algorithm 6": {},
    "row P": {"beta1": 0.9, "weight_decay": 0.1},
    "stochastic": {"rounding": "stochastic"},
    "raise": {"on_nonfinite": "raise"},
}


def gradient(i: int, t: int) -> Tensor:
    """Of the stack of number i; one slice has zeros, and in the second step one has a NaN."""
    g = normal(SHAPES[i], seed=10 * t + i)
    if i == 0:
        g[3] = 0.0
        g[1] = float("nan") if t == 1 else g[1]
    return g


@pytest.mark.parametrize("name", KEYWORDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_slices_step_where_they_are_and_send_nothing(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives, keywords = Collectives(monkeypatch), KEYWORDS[name]
    dtype = torch.bfloat16 if "rounding" in keywords else torch.float32

    def check() -> None:
        starts = [0.05 * normal(shape, seed=i) for i, shape in enumerate(SHAPES)]
        plain = [x.to(dtype).requires_grad_() for x in starts]
        cut = [split(x, line(), [Shard(0)]).requires_grad_() for x in plain]
        ours, theirs = (Adafactor(params, per_slice=True, **keywords) for params in (cut, plain))
        for t in range(4):
            for i, (p, q) in enumerate(zip(cut, plain, strict=True)):
                q.grad = gradient(i, t if name != "raise" else 0).to(dtype)
                p.grad = split(q.grad, line(), [Shard(0)])
            assert collectives.during(ours.step) == []
            theirs.step()
        for p, q in zip(cut, plain, strict=True):
            assert torch.equal(whole(p), q.detach())
            for key, value in theirs.state[q].items():
                assert torch.equal(whole(ours.state[p][key]), value), key
        names = [record.name for own in everywhere(list(ours.report())) for record in own]
        assert sorted(names) == sorted(record.name for record in theirs.report())
        skipped = sum(everywhere(sum(record.skipped for record in ours.report())))
        assert skipped == (0 if name == "raise" else 1)

    on_ranks(size, check)


def test_slices_go_with_what_is_reduced_also_from_partial_gradients() -> None:
    """A stack beside a matrix whose sums are reduced."""
    shapes = [(5, 4, 3), (6, 5)]

    def check() -> None:
        mesh = line()
        plain = [0.05 * normal(shape, seed=1).double() for shape in shapes]
        cut: list[Any] = [split(x, mesh, [Shard(0)]).requires_grad_() for x in plain]
        plain = [x.requires_grad_() for x in plain]
        ours, theirs = (Adafactor(params, per_slice=True) for params in (cut, plain))
        for t in range(4):
            for i, (p, q) in enumerate(zip(cut, plain, strict=True)):
                q.grad = g = normal(shapes[i], seed=10 * t + i).double()
                p.grad = split(g, mesh, [Replicate() if i == 0 and t % 2 else Shard(0)])
                if i == 0 and t == 2:
                    p.grad = DTensor.from_local(g / mesh.size(), mesh, [Partial()], run_check=False)
            ours.step()
            theirs.step()
        for p, q in zip(cut, plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-12, atol=1e-12)
        assert_same_everywhere(*cut)

    on_ranks(2, check)


def test_slices_that_are_cut_are_refused_by_name() -> None:
    def check() -> None:
        p = split(torch.ones(4, 6, 8), line(), [Shard(1)]).requires_grad_()
        with pytest.raises(ValueError, match=r"axis 1 of experts \(shape \(4, 6, 8\)\) is cut"):
            Adafactor([("experts", p)], per_slice=True)

    on_ranks(2, check)
