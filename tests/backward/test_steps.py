"""Step inside backward takes the steps of the ordinary loop, bit for bit."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, schedules, step_in_backward
from tests.backward.loops import STEPS, Run, grads, ids, loss_of, plain
from tests.exact import assert_same, copy_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_results_are_those_of_the_ordinary_loop_bit_for_bit(dtype: torch.dtype, backend: str) -> None:
    """Of a model with shapes of all kinds; tests/test_properties.py has every keyword."""
    keywords: dict[str, Any] = {"beta1": 0.9, "weight_decay": 0.1, "rounding": "stochastic"}
    ordinary, inside = Run(dtype, **keywords), Run(dtype, **keywords).attached()
    inside.train().assert_equal(ordinary.train())
    names = [name for name, _ in inside.model.named_parameters()]
    assert inside.steps_of(*names) == [0 if "unused" in name else STEPS for name in names]  # also what is tied


# ---- what a training loop may do: each of these is run with ordinary steps and with steps inside backward


def one_micro_batch_after_the_other(run: Run) -> None:
    run.attach(accumulate=3)
    run.train(batches=3)


def a_last_micro_batch_that_does_not_use_all(run: Run) -> None:
    run.attach(accumulate=2)
    for step in range(STEPS):
        experts = run.model.unused.weight.square().sum() if step % 2 else run.model.unused.bias.sum()
        (loss_of(run.model, step) + experts).backward()
        loss_of(run.model, step + 1).backward()
        run.end_step()
    assert run.steps_of("unused.weight") == [STEPS // 2]


def fewer_micro_batches_than_expected(run: Run) -> None:
    run.attach(accumulate=3)
    run.train(range(2), batches=3)
    loss_of(run.model, 10).backward()
    run.optimizer.step()
    assert (run.model.gain.grad is None) == run.inside
    run.optimizer.zero_grad()
    run.train(range(3, 5), batches=3)


def dropping_half_accumulated_gradients(run: Run) -> None:
    run.attach(accumulate=2)
    loss_of(run.model, 99).backward()
    run.optimizer.zero_grad()
    run.train(batches=2)


def two_losses_of_one_graph(run: Run) -> None:
    run.attach(accumulate=2)
    for step in range(STEPS):
        logits = run.model(ids(step))
        logits.square().mean().backward(retain_graph=True)
        logits.logsumexp(-1).mean().backward()
        assert (run.model.gain.grad is None) == run.inside
        run.end_step()


def freezing_and_unfreezing(run: Run) -> None:
    run.model.embedding.requires_grad_(False)
    run.attach()
    run.train(range(2))
    run.model.embedding.requires_grad_(True)
    run.model.twice.requires_grad_(False)
    run.train(range(2, 5))
    assert run.steps_of("embedding.weight", "twice.weight") == [3, 2]
    if run.inside:
        loss_of(run.model, 0).backward()
        assert run.model.embedding.weight.grad is None, "since its first step it is freed as all others"
        run.detach()
    else:
        run.train(range(1))


def a_group_that_is_added_later(run: Run) -> None:
    run.model.gain.requires_grad_(False)
    run.optimizer = Adafactor([(name, p) for name, p in run.model.named_parameters() if name != "gain"])
    run.attach()
    run.train(range(2))
    run.model.gain.requires_grad_(True)
    run.optimizer.add_param_group({"params": [("gain", run.model.gain)], "lr": 0.1})
    run.train(range(2, 5))
    assert run.steps_of("gain") == [3]


def detaching_in_mid_step_and_beginning_again(run: Run) -> None:
    run.attach(max_norm=math.inf)
    run.train(range(1))
    run.detach()
    run.attach()
    loss_of(run.model, 0).backward()
    run.detach()
    run.end_step()
    run.attach(accumulate=2)
    loss_of(run.model, 1).backward()
    run.detach()  # the gradients stay
    loss_of(run.model, 2).backward()
    run.end_step()
    run.attach()
    run.train(range(3, 5))


def converting_the_model(run: Run) -> None:
    run.attach()
    run.train(range(2))
    run.model.to(torch.bfloat16)
    run.train(range(2, 4))


def schedulers(run: Run) -> None:
    """Warnings are errors here: torch warns when a scheduler steps before its optimizer."""
    run.optimizer = Adafactor(run.model.named_parameters(), lr=1.0, lr_decay=None)
    rates = [schedules.warmup(run.optimizer, slope=1e-2), lrs.ExponentialLR(run.optimizer, 0.5)]
    scheduler = lrs.SequentialLR(run.optimizer, rates, milestones=[2])
    run.attach()
    for step in range(STEPS):
        run.train(range(step, step + 1))
        scheduler.step()


def a_closure(run: Run) -> None:
    run.attach()
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            loss, before = loss_of(run.model, step), run.model.gain.item()
            loss.backward()
            assert (run.model.gain.item() != before) == run.inside
            return loss.item()

        loss = run.optimizer.step(closure) if step % 2 else run.optimizer.step(closure=closure)
        assert loss > 0 and (grads(run.model) == [None] * 12) == run.inside


def a_backward_that_makes_a_graph(run: Run) -> None:
    run.attach()
    loss_of(run.model, 0).backward(create_graph=True)
    run.end_step()


def gradients_of_gradients(run: Run) -> None:
    run.attach()
    for step in range(STEPS):
        x = run.model.embedding(ids(step)).detach().requires_grad_()
        y = run.model.twice(x).tanh().square().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (y + slope.square().sum()).backward()
        run.end_step()


SCENARIOS: list[Callable[[Run], None]] = [
    one_micro_batch_after_the_other,
    a_last_micro_batch_that_does_not_use_all,
    fewer_micro_batches_than_expected,
    dropping_half_accumulated_gradients,
    two_losses_of_one_graph,
    freezing_and_unfreezing,
    a_group_that_is_added_later,
    detaching_in_mid_step_and_beginning_again,
    converting_the_model,
    schedulers,
    a_closure,
    a_backward_that_makes_a_graph,
    gradients_of_gradients,
]


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR before torch 2.10
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_whatever_the_loop_does_the_bits_are_those_of_ordinary_steps(scenario: Callable[[Run], None]) -> None:
    ordinary, inside = (Run(inside=inside, beta1=0.9) for inside in (False, True))
    for run in (ordinary, inside):
        scenario(run)
    inside.assert_equal(ordinary)


def test_a_resumed_run_ends_on_the_same_bits_and_knows_the_last_norm() -> None:
    whole = Run(torch.bfloat16, beta1=0.9, rounding="stochastic").attached(max_norm=0.5).train(range(3))
    file = io.BytesIO()
    torch.save([whole.model.state_dict(), whole.optimizer.state_dict()], file)
    whole.train(range(3, 6))
    resumed = Run(torch.bfloat16, seed=1, beta1=0.9, rounding="stochastic").attached(max_norm=0.5)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    resumed.train(range(3, 6))
    assert_same(copy_of(resumed.model), copy_of(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


def train_blocks(attach: bool, order: list[int], call: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """The weights of some blocks that are called in this order in each of some steps."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(max(order) + 1)))
    optimizer = Adafactor(blocks.named_parameters(), beta1=0.9)
    if attach:
        step_in_backward(blocks, optimizer)
    for seed in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for i in order:
            x = call(blocks[i], x)
        x.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy_of(blocks)


def recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """An activation checkpoint around each block."""
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


@pytest.mark.parametrize(
    ("order", "reentrant"), [([0, 1, 2], False), ([0, 1, 2], True), ([0, 0, 0], False)], ids=["", "reentrant", "shared"]
)
def test_activation_checkpoints_change_nothing(order: list[int], reentrant: bool) -> None:
    expected = train_blocks(False, order, lambda block, x: block(x))
    assert_same(train_blocks(True, order, recomputed(reentrant)), expected)


def test_a_parameter_shared_by_reentrant_checkpoints_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"second gradient came for 0\.0\.\w+, .* use_reentrant=False"):
        train_blocks(True, [0, 0, 0], recomputed(True))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_blocks_that_are_compiled_take_the_same_steps() -> None:
    compiled: Callable[[nn.Module], Any] = cache(torch.compile)
    after, inside = (train_blocks(attach, [0, 1, 2], lambda block, x: compiled(block)(x)) for attach in (False, True))
    assert_same(inside, after)


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_a_bad_gradient_is_skipped_and_freed() -> None:
    results = []
    for attach in (False, True):
        model, optimizer = plain()
        if attach:
            step_in_backward(model, optimizer)
        x = torch.ones(6)
        x[2] = math.inf  # through tanh: the first weight's gradient has a NaN, all others are finite
        for batch in (torch.ones(6), x, torch.ones(6)):
            model(batch).sum().backward()
            assert not attach or grads(model) == [None] * 4
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.report()[0].skipped == 1
        results.append(copy_of(model))
    assert_same(results[1], results[0])
