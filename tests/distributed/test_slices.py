"""Stacks that step slice by slice: cut along the axis of the slices, each rank steps its own and sends nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from adafactor import Adafactor, step_in_backward
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
    """A stack beside a matrix whose sums are reduced, and a vector."""
    shapes = {"stack": (5, 4, 3), "matrix": (6, 5), "vector": (9,)}

    def check() -> None:
        mesh = line()
        plain = {name: 0.05 * normal(shape, seed=1).double() for name, shape in shapes.items()}
        cut: dict[str, Any] = {name: split(x, mesh, [Shard(0)]).requires_grad_() for name, x in plain.items()}
        plain = {name: x.requires_grad_() for name, x in plain.items()}
        ours, theirs = (Adafactor(list(m.items()), per_slice=True) for m in (cut, plain))
        for t in range(4):
            for i, name in enumerate(shapes):
                g = normal(shapes[name], seed=10 * t + i).double()
                plain[name].grad = g
                cut[name].grad = split(g, mesh, [Replicate() if name == "stack" and t % 2 else Shard(0)])
                if name == "stack" and t == 2:
                    cut[name].grad = DTensor.from_local(g / mesh.size(), mesh, [Partial()], run_check=False)
            ours.step()
            theirs.step()
        for name in shapes:
            torch.testing.assert_close(whole(cut[name]), plain[name].detach(), rtol=1e-12, atol=1e-12)
        assert_same_everywhere(*cut.values())

    on_ranks(2, check)


def test_slices_that_are_cut_are_refused_by_name() -> None:
    def check() -> None:
        p = split(torch.ones(4, 6, 8), line(), [Shard(1)]).requires_grad_()
        with pytest.raises(ValueError, match=r"axis 1 of experts \(shape \(4, 6, 8\)\) is cut"):
            Adafactor([("experts", p)], per_slice=True)

    on_ranks(2, check)


def test_experts_that_are_cut_along_their_axis_send_two_numbers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)

    def check() -> None:
        plain = normal((6, 6, 5), seed=0).double().requires_grad_()
        p = split(plain, line(), [Shard(0)]).requires_grad_()
        ours, theirs = Adafactor([p], axes=(1, 2)), Adafactor([plain], axes=(1, 2))
        for t in range(4):
            plain.grad = normal((6, 6, 5), seed=t + 1).double()
            p.grad = split(plain.grad, line(), [Shard(0)])
            theirs.step()
            assert collectives.during(ours.step) == [16, 16], "whatever the size of an expert"
        torch.testing.assert_close(whole(p), plain.detach(), rtol=1e-12, atol=1e-12)

    on_ranks(2, check)


class Experts(nn.Module):
    """Two layers of experts in one tensor each, as many as divide unevenly."""

    def __init__(self) -> None:
        """The same at any time."""
        super().__init__()
        self.first = nn.Parameter(0.3 * normal((5, 4, 6), seed=1))
        self.second = nn.Parameter(0.3 * normal((5, 6, 3), seed=2))

    def forward(self, x: Tensor) -> Tensor:
        """Every expert sees its own part of the batch."""
        return torch.bmm(torch.bmm(x, self.first).sin(), self.second)


def trained(model: nn.Module, optimizer: Adafactor, steps: range) -> list[Tensor]:
    """The weights after some steps."""
    for t in steps:
        model(normal((5, 2, 4), seed=t)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in model.parameters()]


def test_a_state_of_slices_goes_on_to_the_same_bits_whole_or_sharded_and_inside_backward() -> None:
    keywords: dict[str, Any] = {"per_slice": True, "beta1": 0.9}

    def check() -> None:
        model = Experts()
        plain = copy.deepcopy(model)
        fully_shard(model)
        optimizer, alone = (Adafactor(m.named_parameters(), **keywords) for m in (model, plain))
        trained(model, optimizer, range(2))
        full = StateDictOptions(full_state_dict=True)
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=full))
        sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.copy_(whole(p))
        resumed = Adafactor(model.named_parameters(), **keywords)
        set_optimizer_state_dict(model, resumed, sharded)
        with step_in_backward(model, resumed):
            ours = trained(model, resumed, range(2, 4))
        if state:  # on the first rank only
            assert state["state"]["first"]["row"].shape == (5, 4, 1) and state["state"]["first"]["step"].shape == (5,)
            alone.load_state_dict(optimizer_state(state, alone))
            theirs = trained(plain, alone, range(2, 4))
            assert all(map(torch.equal, ours, theirs))

    on_ranks(2, check)


def optimizer_state(by_name: dict[str, Any], optimizer: Adafactor) -> dict[str, Any]:
    """A state dict by names as `load_state_dict` takes it."""
    own = optimizer.state_dict()
    names = [name for group in own["param_groups"] for name in group["param_names"]]
    return {**own, "state": {i: by_name["state"][name] for i, name in enumerate(names)}}
