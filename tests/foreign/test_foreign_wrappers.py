"""Other parts of torch that are handed an optimizer: averages of weights, gradient scalers, and ZeRO's shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from adafactor import Adafactor
from tests import inside

BACKENDS = pytest.mark.parametrize("backend", inside.HERE)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@BACKENDS
def test_averaged_models_see_every_step(backend: str) -> None:
    """The compiled step writes to the weights behind torch's back; an average must see it all the same."""
    model = network()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Adafactor(model.parameters(), backend=backend)
    scheduler = SWALR(optimizer, swa_lr=0.005, anneal_epochs=3)
    seen = []
    for i in range(4):
        train(model, optimizer, range(i, i + 1))
        averaged.update_parameters(model)
        scheduler.step()
        seen.append(next(model.parameters()).detach().clone())
    expected = seen[0]
    for x in seen[1:]:
        expected = 0.5 * expected + 0.5 * x
    torch.testing.assert_close(next(averaged.parameters()).detach(), expected)
    update_bn([torch.randn(2, 6)], averaged)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


@BACKENDS
@pytest.mark.parametrize("clipped", [False, True])
def test_a_gradient_scaler_unscales_and_leaves_out_infinities(backend: str, clipped: bool) -> None:
    scaled, plain = network(), network()
    ours, other = (Adafactor(m.parameters(), backend=backend) for m in (scaled, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.randn(16, 6)
    for i in range(4):
        before = copy.deepcopy(scaled)
        ours.zero_grad()
        other.zero_grad()
        scaler.scale(scaled(data).square().mean()).backward()
        plain(data).square().mean().backward()
        if i == 2:
            next(scaled.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        if clipped:
            scaler.unscale_(ours)
            for model in (scaled, plain):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(ours)
        scaler.update()
        if i == 2:
            assert same(before, scaled)
        else:
            other.step()
        for p, q in zip(scaled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert {record.steps for record in ours.report()} == {3} and scaler.get_scale() == 512


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # by torch, in its own import
def test_zero_redundancy_optimizer_steps_as_ours_alone() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, wrapped = network(), network()
    alone = Adafactor(plain.parameters(), lr=0.02, beta1=0.9)
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), Adafactor, lr=0.02, beta1=0.9)
    train(plain, alone, range(3))
    train(wrapped, zero, range(3))
    assert same(plain, wrapped)
    zero.consolidate_state_dict(0)
    again = network()
    again.load_state_dict(wrapped.state_dict())
    other = Adafactor(again.parameters(), lr=0.02, beta1=0.9)
    other.load_state_dict(zero.state_dict())
    train(plain, alone, range(3, 6))
    train(again, other, range(3, 6))
    assert same(plain, again)


def test_flat_slices_in_place_of_matrices_are_noticed_once() -> None:
    """DeepSpeed's ZeRO makes an optimizer with the model's parameters, and then replaces each group's by one slice."""
    model = nn.Linear(6, 8)
    optimizer = Adafactor(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.warns(RuntimeWarning, match="DeepSpeed's ZeRO.*Use FSDP2"):
        optimizer.step()
    optimizer.step()  # in silence


def test_vectors_that_were_frozen_or_are_all_that_is_left_are_no_flat_slices() -> None:
    """Here in silence, since warnings are errors."""
    model = nn.Linear(6, 8)
    model.bias.requires_grad_(False)
    optimizer = Adafactor([{"params": [p]} for p in model.parameters()])
    model.bias.requires_grad_(True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    del optimizer.param_groups[0]
    optimizer.step()
