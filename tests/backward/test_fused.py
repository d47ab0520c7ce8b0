"""`step_param`: the fused backward passes of trainers that register the hooks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backward.loops import STEPS, Run, loss_of, plain


def fuse(run: Run) -> None:
    """As kohya's scripts do: a hook per parameter, which knows the group."""
    for group in run.optimizer.param_groups:
        for p in group["params"]:

            def hook(tensor: Tensor, group: dict[str, Any] = group) -> None:
                run.optimizer.step_param(tensor, group)
                tensor.grad = None

            p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, "nearest"), (torch.bfloat16, "stochastic")])
def test_a_fused_backward_pass_ends_on_the_bits_of_step(backend: str, dtype: torch.dtype, rounding: str) -> None:
    ordinary, fused = (Run(dtype, beta1=0.9, rounding=rounding) for _ in range(2))
    fuse(fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused.optimizer, lambda _: 1.0)
    for seed in range(STEPS):
        loss_of(fused.model, seed).backward()
        scheduler.step()  # which warns if it believes that there was no step
    for group in fused.optimizer.param_groups:
        del group["initial_lr"]
    fused.assert_equal(ordinary.train())


def test_ordinary_steps_may_follow_and_without_a_gradient_nothing_happens() -> None:
    ordinary, mixed = Run(), Run()
    loss_of(mixed.model, 0).backward()
    for p in mixed.model.parameters():  # also those that are not used
        mixed.optimizer.step_param(p)
    mixed.optimizer.zero_grad()
    mixed.train(range(1, STEPS)).assert_equal(ordinary.train())


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    stranger = nn.Parameter(torch.ones(2, 3))
    stranger.grad = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"of shape \(2, 3\) is in no group"):
        plain()[1].step_param(stranger)
