"""Step inside backward takes the steps of the ordinary loop, bit for bit."""

from __future__ import annotations

import io
import math
import threading
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
    steps = {name: inside.optimizer.state[p]["step"] for name, p in inside.model.named_parameters()}
    assert steps == {name: 0 if "unused" in name else STEPS for name in steps}


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_gradients_of_several_micro_batches_are_kept_until_the_last(batches: int) -> None:
    ordinary, inside = Run(beta1=0.9), Run(beta1=0.9).attached(accumulate=batches)
    inside.train(batches=batches).assert_equal(ordinary.train(batches=batches))


def test_a_parameter_that_the_last_micro_batch_does_not_use_steps_with_the_optimizer() -> None:
    def train(attach: bool) -> Run:
        run = Run()
        if attach:
            run.attached(accumulate=2)
        for step in range(STEPS):
            experts = run.model.unused.weight.square().sum() if step % 2 else run.model.unused.bias.sum()
            (loss_of(run.model, step) + experts).backward()
            loss_of(run.model, step + 1).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    inside = train(attach=True)
    inside.assert_equal(train(attach=False))
    assert inside.optimizer.state[inside.model.unused.weight]["step"] == STEPS // 2


def test_fewer_micro_batches_than_expected_still_make_a_step() -> None:
    ordinary, inside = Run(), Run().attached(accumulate=3)
    for run in (ordinary, inside):
        run.train(range(2), batches=3).train(range(10, 11), batches=2).train(range(3, 5), batches=3)
    inside.assert_equal(ordinary)


def test_dropping_half_accumulated_gradients_starts_the_count_anew() -> None:
    ordinary, inside = Run(), Run().attached(accumulate=2)
    for run in (ordinary, inside):
        loss_of(run.model, 99).backward()
        run.optimizer.zero_grad()
        run.train(batches=2)
    inside.assert_equal(ordinary)


def test_a_tied_parameter_steps_once_with_the_gradients_of_all_uses() -> None:
    inside = Run().attached().train(range(1))
    for p in (inside.model.embedding.weight, inside.model.twice.weight):
        assert inside.optimizer.state[p]["step"] == 1  # the result is compared above


def test_frozen_parameters_may_be_unfrozen_and_frozen_again() -> None:
    def train(attach: bool) -> Run:
        run = Run()
        run.model.embedding.requires_grad_(False)
        if attach:
            run.attached()
        run.train(range(2))
        run.model.embedding.requires_grad_(True)
        run.model.twice.requires_grad_(False)
        return run.train(range(2, 5))

    inside = train(attach=True)
    inside.assert_equal(train(attach=False))
    steps = [inside.optimizer.state[p]["step"] for p in (inside.model.embedding.weight, inside.model.twice.weight)]
    assert steps == [3, 2]
    loss_of(inside.model, 0).backward()
    assert inside.model.embedding.weight.grad is None, "since its first step it is freed inside backward as all others"


def test_a_group_that_is_added_later_joins_in() -> None:
    def train(attach: bool) -> Run:
        run = Run()
        run.model.gain.requires_grad_(False)
        others = [(name, p) for name, p in run.model.named_parameters() if name != "gain"]
        run.optimizer = Adafactor(others)
        if attach:
            run.attached()
        run.train(range(2))
        run.model.gain.requires_grad_(True)
        run.optimizer.add_param_group({"params": [("gain", run.model.gain)], "lr": 0.1})
        return run.train(range(2, 5))

    inside = train(attach=True)
    inside.assert_equal(train(attach=False))
    assert inside.optimizer.state[inside.model.gain]["step"] == 3


def test_a_model_may_be_converted_while_it_is_attached(backend: str) -> None:
    def train(attach: bool) -> Run:
        run = Run()
        if attach:
            run.attached()
        run.train(range(2))
        run.model.to(torch.bfloat16)
        return run.train(range(2, 4))

    train(attach=True).assert_equal(train(attach=False))


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR before torch 2.10
def test_schedulers_see_the_steps_that_they_wait_for() -> None:
    """Warnings are errors here: torch warns when a scheduler steps before its optimizer."""

    def train(attach: bool) -> Run:
        run = Run(lr=1.0, lr_decay=None)
        rates = [schedules.warmup(run.optimizer, slope=1e-2), lrs.ExponentialLR(run.optimizer, 0.5)]
        scheduler = lrs.SequentialLR(run.optimizer, rates, milestones=[2])
        if attach:
            run.attached()
        for step in range(STEPS):
            run.train(range(step, step + 1))
            scheduler.step()
        return run

    train(attach=True).assert_equal(train(attach=False))


def test_the_closure_form_steps_inside_the_closures_backward() -> None:
    ordinary, inside = Run().train(), Run().attached()
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            inside.optimizer.zero_grad()
            loss = loss_of(inside.model, step)
            before = inside.model.gain.item()
            loss.backward()
            assert inside.model.gain.item() != before
            return loss.item()

        loss = inside.optimizer.step(closure) if step % 2 else inside.optimizer.step(closure=closure)
        assert loss > 0
        assert grads(inside.model) == [None] * 12
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


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, shared: bool, reentrant: bool | None) -> None:
        """Three blocks, or one that is used three times; None: nothing is computed again."""
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(1 if shared else 3)])
        self.order = [self.blocks[0 if shared else i] for i in range(3)]
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to the same."""
        for block in self.order:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def train_checkpointed(attach: bool, shared: bool, reentrant: bool | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Checkpointed(shared, reentrant)
    optimizer = Adafactor(model.named_parameters(), beta1=0.9)
    if attach:
        step_in_backward(model, optimizer)
    for seed in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy_of(model)


@pytest.mark.parametrize(
    ("shared", "reentrant"), [(False, False), (False, True), (True, False)], ids=["", "reentrant", "shared"]
)
def test_activation_checkpoints_change_nothing(shared: bool, reentrant: bool) -> None:
    expected = train_checkpointed(False, shared, None)
    assert_same(train_checkpointed(True, shared, reentrant), expected)


def test_a_parameter_shared_by_reentrant_checkpoints_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"second gradient came for blocks\.0\.0\.\w+, .* use_reentrant=False"):
        train_checkpointed(True, shared=True, reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_it_works_from_the_threads_that_autograd_uses_for_deep_recursion() -> None:
    depth, threads = 70, set()  # beyond 60 levels autograd goes on in threads of a pool

    def nested(x: Tensor, level: int = 0) -> Tensor:
        y: Tensor = layers[level](x)
        return checkpoint(nested, y, level + 1, use_reentrant=True) if level + 1 < depth else y

    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(300, 300, bias=False) for _ in range(depth)])
        *_, last = layers.parameters()
        last.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
        optimizer = Adafactor(layers.named_parameters())
        if attach:
            step_in_backward(layers, optimizer)
        nested(torch.ones(1, 300, requires_grad=True)).sum().backward()
        optimizer.step()
        results.append(copy_of(layers))
    assert threads - {threading.get_ident()}
    assert_same(results[1], results[0])


def test_two_losses_of_one_graph_are_two_micro_batches() -> None:
    def train(attach: bool) -> Run:
        run = Run()
        if attach:
            run.attached(accumulate=2)
        for step in range(STEPS):
            logits = run.model(ids(step))
            logits.square().mean().backward(retain_graph=True)
            logits.logsumexp(-1).mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    train(attach=True).assert_equal(train(attach=False))


def test_gradients_of_gradients_are_as_ever() -> None:
    def train(attach: bool) -> dict[str, Tensor]:
        model, optimizer = plain()
        if attach:
            step_in_backward(model, optimizer)
        for seed in range(STEPS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            y = model(x).square().sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            (y + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy_of(model)

    assert_same(train(attach=True), train(attach=False))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_that_makes_a_graph_steps_too() -> None:
    expected, inside = Run().train(range(1)), Run().attached()
    loss_of(inside.model, 0).backward(create_graph=True)
    inside.optimizer.step()
    inside.assert_equal(expected)


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_a_bad_gradient_is_skipped_and_freed() -> None:
    results = []
    for attach in (False, True):
        model, optimizer = plain()
        if attach:
            step_in_backward(model, optimizer)
        before = copy_of(model)
        x = torch.ones(6)
        x[2] = math.inf  # through tanh: the first weight's gradient has a NaN, all others are finite
        for batch in (torch.ones(6), x, torch.ones(6)):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.report()[0].skipped == 1
        assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
        results.append(copy_of(model))
    assert_same(results[1], results[0])
