"""Other parts of torch that are handed an optimizer: gradient scalers, and DeepSpeed's flat slices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adafactor import Adafactor
from tests import inside

BACKENDS = pytest.mark.parametrize("backend", inside.HERE)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


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
