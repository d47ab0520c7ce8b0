"""Step inside backward takes the steps of the ordinary loop, bit for bit, and keeps no gradients."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint

from adafactor import Adafactor, backward, schedules, step_in_backward
from tests.integrations.exact import assert_same, copy_of

ROOT = Path(__file__).parent.parent
STEPS = 4


class Net(nn.Module):
    """Shapes of all kinds; the embedding is tied to the output, one layer is used twice and one is never used."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        """A matrix, vectors, a stack of matrices, a kernel in channels-last order, a transposed one and a scalar."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.twice, self.norm, self.unused = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(3, 5)
        self.stack = nn.Parameter(torch.randn(2, width, 6))
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(width, 18).t())
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T, vocabulary)."""
        x = self.embedding(ids)
        x = x + self.twice(self.twice(x).tanh())
        y = torch.einsum("btd,sdk->bstk", x, self.stack)
        y = self.convolution(y).transpose(1, 2).flatten(2)  # (B, T, 18)
        return F.linear(self.norm(x + self.gain * (y @ self.turned)), self.embedding.weight)


def ids(seed: int, vocabulary: int = 11) -> Tensor:
    return torch.randint(vocabulary, (4, 7), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    tokens = ids(seed)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Run:
    """A model with its optimizer, and the loop that everybody writes."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, **keywords: Any) -> None:
        """The same model for the same seed."""
        torch.manual_seed(seed)
        self.model = Net().to(dtype)
        self.optimizer = Adafactor(self.model.named_parameters(), **keywords)

    def attached(self, **keywords: Any) -> Run:
        """The same, stepping inside backward."""
        self.handle = step_in_backward(self.model, self.optimizer, **keywords)
        return self

    def train(self, steps: range = range(STEPS), batches: int = 1) -> Run:
        """So many steps of so many micro-batches."""
        for step in steps:
            for batch in range(batches):
                (loss_of(self.model, step * batches + batch) / batches).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def assert_equal(self, other: Run) -> None:
        """The same bits in weights and state, and the same figures in the report."""
        assert_same(copy_of(self.model), copy_of(other.model))
        assert_same(self.optimizer.state_dict(), other.optimizer.state_dict())
        ours, theirs = (pickle.dumps(run.optimizer.report()) for run in (self, other))
        assert ours == theirs


def grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def plain() -> tuple[nn.Sequential, Adafactor]:
    """Two layers and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    return model, Adafactor(model.named_parameters())


KEYWORDS: list[dict[str, Any]] = [
    {},
    {"beta1": 0.9, "weight_decay": 0.1},
    {"beta1": 0.9, "momentum": "gradient", "beta2": 0.99, "lr": 1e-3, "lr_decay": None, "relative": False},
    {"factored": False, "beta1": 0.9},
    {"factored": "row"},
    {"factored": "column", "clip": None, "maximize": True},
    {"on_nonfinite": "raise"},
]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_results_are_those_of_the_ordinary_loop_bit_for_bit(
    keywords: dict[str, Any], dtype: torch.dtype, backend: str
) -> None:
    ordinary, inside = Run(dtype, **keywords), Run(dtype, **keywords).attached()
    inside.train().assert_equal(ordinary.train())
    steps = {name: inside.optimizer.state[p]["step"] for name, p in inside.model.named_parameters()}
    assert steps == {name: 0 if "unused" in name else STEPS for name in steps}


@pytest.mark.filterwarnings("ignore:convolution.weight .* is stepped by plain torch:RuntimeWarning")
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_of_short_weights_is_that_of_the_ordinary_loop(rounding: str, backend: str) -> None:
    ordinary, inside = (Run(torch.bfloat16, rounding=rounding, seed=3) for _ in range(2))
    inside.attached().train().assert_equal(ordinary.train())


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_gradients_of_several_micro_batches_are_kept_until_the_last(batches: int, backend: str) -> None:
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


def test_the_number_of_micro_batches_can_change_between_steps() -> None:
    ordinary, inside = Run().train(batches=2).train(batches=3), Run().attached(accumulate=2).train(batches=2)
    inside.handle.accumulate = 3
    inside.train(batches=3)
    inside.assert_equal(ordinary)


def test_dropping_half_accumulated_gradients_starts_the_count_anew() -> None:
    ordinary, inside = Run(), Run().attached(accumulate=2)
    for run in (ordinary, inside):
        loss_of(run.model, 99).backward()
        run.optimizer.zero_grad()
        run.train(batches=2)
    inside.assert_equal(ordinary)


def test_no_gradient_is_left_after_the_step_and_none_holds_memory_before() -> None:
    inside = Run().attached()
    loss_of(inside.model, 0).backward()
    used = [g for name, p in inside.model.named_parameters() if (g := p.grad) is not None and "unused" not in name]
    assert len(used) == 10 and sum(g.nbytes for g in used) == 0
    inside.optimizer.step()
    assert grads(inside.model) == [None] * 12


class Gauge:
    """Follows every gradient's memory from the moment it is complete, whoever refers to it."""

    def __init__(self, model: nn.Module) -> None:
        """Before `step_in_backward`, so that a gradient is seen before it is used."""
        self.seen: list[tuple[StorageWeakRef, int]] = []
        self.most = 0
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.look)

    def look(self, p: Tensor) -> None:
        """One more."""
        assert p.grad is not None
        self.seen.append((StorageWeakRef(p.grad.untyped_storage()), p.grad.nbytes))
        self.most = max(self.most, self.living())

    def living(self) -> int:
        """The bytes of gradients that exist now."""
        return sum(size for storage, size in self.seen if not storage.expired())


@pytest.mark.parametrize("keywords", [{}, {"max_norm": 1.0}], ids=str)
def test_gradients_do_not_add_up_during_backward(keywords: dict[str, Any], backend: str) -> None:
    width, depth = 64, 12

    def most(attach: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        optimizer = Adafactor(model.parameters(), beta1=0.9)
        gauge = Gauge(model)
        if attach:
            step_in_backward(model, optimizer, **keywords)
        for _ in range(3):
            model(torch.ones(2, width)).sum().backward()
            assert gauge.living() == 0 or not attach
            optimizer.step()
            optimizer.zero_grad()
        return gauge.most

    layer = 4 * width * (width + 1)
    assert most(attach=False) == depth * layer
    assert most(attach=True) <= layer


def test_accumulating_costs_the_memory_of_all_gradients() -> None:
    model, optimizer = plain()
    gauge = Gauge(model)
    step_in_backward(model, optimizer, accumulate=2)
    model(torch.ones(6)).sum().backward()
    assert gauge.living() == sum(p.nbytes for p in model.parameters())
    model(torch.ones(6)).sum().backward()
    assert gauge.living() == 0


def test_a_tied_parameter_steps_once_with_the_gradients_of_all_uses() -> None:
    inside = Run().attached().train(range(1))
    for p in (inside.model.embedding.weight, inside.model.twice.weight):
        assert inside.optimizer.state[p]["step"] == 1  # the result is compared above


def test_unused_parameters_stay_as_they_are() -> None:
    inside = Run(weight_decay=0.1)
    before = copy_of(inside.model.unused)
    inside.attached().train()
    assert_same(copy_of(inside.model.unused), before)
    assert inside.optimizer.state[inside.model.unused.weight]["step"] == 0


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
    freed = inside.model.embedding.weight.grad
    assert freed is not None and freed.nbytes == 0, "since its first step it is freed inside backward as all others"


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


@pytest.mark.filterwarnings("ignore:convolution.weight .* is stepped by plain torch:RuntimeWarning")
@pytest.mark.parametrize("keywords", [{}, {"max_norm": 0.5}], ids=str)
def test_a_resumed_run_ends_on_the_same_bits(keywords: dict[str, Any], backend: str) -> None:
    whole = Run(torch.bfloat16, beta1=0.9, rounding="stochastic").attached(**keywords).train(range(3))
    file = io.BytesIO()
    torch.save([whole.model.state_dict(), whole.optimizer.state_dict()], file)
    whole.train(range(3, 6))

    resumed = Run(torch.bfloat16, seed=1, beta1=0.9, rounding="stochastic").attached(**keywords)
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
def test_activation_checkpoints_change_nothing(shared: bool, reentrant: bool, backend: str) -> None:
    expected = train_checkpointed(False, shared, None)
    assert_same(train_checkpointed(True, shared, reentrant), expected)


def test_a_parameter_shared_by_reentrant_checkpoints_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"second gradient came for blocks\.0\.0\.\w+, .* use_reentrant=False"):
        train_checkpointed(True, shared=True, reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_it_works_from_the_threads_that_autograd_uses_for_deep_recursion(backend: str) -> None:
    depth, threads = 70, set()  # beyond 60 levels autograd goes on in threads of a pool

    def nested(x: Tensor, level: int = 0) -> Tensor:
        y: Tensor = layers[level](x)
        return checkpoint(nested, y, level + 1, use_reentrant=True) if level + 1 < depth else y

    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(300, 300, bias=False) for _ in range(depth)])
        layers[-1].weight.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
        optimizer = Adafactor(layers.named_parameters())
        if attach:
            step_in_backward(layers, optimizer)
        nested(torch.ones(1, 300, requires_grad=True)).sum().backward()
        optimizer.step()
        results.append(copy_of(layers))
    assert threads - {threading.get_ident()}
    assert_same(results[1], results[0])


def test_backward_may_be_called_from_another_thread(backend: str) -> None:
    ordinary, inside = Run().train(), Run().attached()
    thread = threading.Thread(target=inside.train)
    thread.start()
    thread.join()
    inside.assert_equal(ordinary)


GONE = r"the gradient of \S+ is gone: step_in_backward"


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf, foreach=False),
        lambda model: clip_grad_norm_(model[2].bias, 1.0),
        lambda model: clip_grad_value_(model.parameters(), 1.0),
        lambda model: get_total_norm([p.grad for p in model.parameters()]),
        lambda model: model[0].weight.grad.norm().item(),
        lambda model: model[0].weight.grad.abs().max(),
        lambda model: model[0].weight.grad.mul_(2),
        lambda model: model.to(torch.float64),
    ],
    ids=["norm", "maximum norm", "norm of one", "value", "total norm", "log", "look", "scale", "convert"],
)
def test_whoever_asks_for_a_gradient_after_backward_is_told_that_it_is_gone(ask: Callable[[Any], Any]) -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    model(torch.ones(6)).sum().backward()
    with pytest.raises(RuntimeError, match=GONE):
        ask(model)
    optimizer.step()
    assert grads(model) == [None] * 4


def test_a_freed_gradient_can_be_printed() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    model(torch.ones(6)).sum().backward()
    assert "the gradient of 2.bias, used and freed" in repr(model[2].bias.grad)


def test_a_gradient_scaler_is_told_that_gradients_are_gone() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(6)).sum()).backward()
    with pytest.raises(RuntimeError, match=f"{GONE}.*GradScaler.*bfloat16"):
        scaler.step(optimizer)


def test_a_disabled_gradient_scaler_does_no_harm() -> None:
    ordinary, inside = Run().train(), Run().attached()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        scaler.scale(loss_of(inside.model, step)).backward()
        scaler.step(inside.optimizer)
        scaler.update()
        inside.optimizer.zero_grad()
    inside.assert_equal(ordinary)


def test_a_second_backward_in_a_step_is_refused() -> None:
    inside = Run().attached()
    loss_of(inside.model, 0).backward()
    with pytest.raises(RuntimeError, match=r"second gradient came for \S+, .* optimizer\.step\(\) .* accumulate="):
        loss_of(inside.model, 1).backward()


def test_a_graph_that_is_kept_for_a_second_backward_is_refused() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    loss = model(torch.ones(6)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second gradient|modified by an inplace operation"):  # ours or torch's
        loss.backward()


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


def test_torch_notices_when_a_parameter_that_has_stepped_is_needed_again() -> None:
    """Its gradient is complete before the product that reads it without a gradient goes backward."""
    w, x = nn.Parameter(torch.ones(3, 3)), torch.ones(3, 3, requires_grad=True)
    holder = nn.ParameterList([w])
    step_in_backward(holder, Adafactor(holder.parameters()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ((x @ w.detach()).tanh() @ w).sum().backward()


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_a_bad_gradient_is_skipped_and_freed(backend: str) -> None:
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
        assert not torch.equal(model[0].weight.detach(), before["0.weight"])
        results.append(copy_of(model))
    assert_same(results[1], results[0])


def test_raising_inside_backward_leaves_the_bad_one_and_says_that_others_have_stepped(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = Adafactor(model.named_parameters(), on_nonfinite="raise")
    step_in_backward(model, optimizer)
    before = copy_of(model)
    x = torch.ones(6)
    x[2] = math.inf
    with pytest.raises(FloatingPointError, match=r"gradient of 0\.weight .* nothing was updated of it, but this is"):
        model(x).sum().backward()
    same = {name for name, value in copy_of(model).items() if torch.equal(value, before[name])}
    assert same - {"0.bias"} == {"0.weight"}  # the bias beside it may come before or after
    with pytest.raises(FloatingPointError, match="0.weight"):
        optimizer.step()  # as in the ordinary loop, until the gradient is dropped
    optimizer.zero_grad()
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach(), before["0.weight"])


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The identity."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Out of memory, say."""
        raise MemoryError("half-way")


def test_after_a_failure_half_way_the_next_batch_goes_on() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    with pytest.raises(MemoryError, match="half-way"):
        model[2](Fails.apply(model[:2](torch.ones(6)))).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [1, 1, 2, 2]


def limited(limit: float, steps: int = STEPS) -> tuple[Run, list[float]]:
    """The ordinary loop with what `max_norm` is to do, and the norms."""
    run, norms = Run(), [0.0]
    for step in range(steps):
        loss_of(run.model, step).backward()
        found = [g for g in grads(run.model) if g is not None]
        factor = min(1.0, limit / (norms[-1] + 1e-6))
        norms.append(get_total_norm(found).item())
        for g in found:
            g.mul_(factor)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run, norms[1:]


@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_max_norm_scales_by_the_norm_of_the_step_before(limit: float) -> None:
    expected, norms = limited(limit)
    assert min(norms) > 1.0, "else nothing is limited"
    inside = Run().attached(max_norm=limit)
    assert inside.handle.norm is None
    for step in range(STEPS):
        inside.train(range(step, step + 1))
        assert inside.handle.norm is not None
        assert inside.handle.norm.item() == pytest.approx(norms[step], rel=1e-5)
    for name, value in copy_of(inside.model).items():
        torch.testing.assert_close(value, expected.model.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(inside.model.embedding.weight, Run().train().model.embedding.weight) == (limit == math.inf)


def test_max_norm_counts_gradients_that_wait_for_the_optimizer() -> None:
    expected, norms = limited(1.0)
    inside = Run().attached(max_norm=1.0, accumulate=2).train()  # one backward only, so that all of them wait
    assert inside.handle.norm is not None and inside.handle.norm.item() == pytest.approx(norms[-1], rel=1e-5)
    for name, value in copy_of(inside.model).items():
        torch.testing.assert_close(value, expected.model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:skipped:RuntimeWarning")
def test_a_bad_gradient_does_not_make_the_norm_bad() -> None:
    model, optimizer = plain()
    handle = step_in_backward(model, optimizer, max_norm=1.0)
    x = torch.ones(6)
    x[2] = math.inf
    model(x).sum().backward()
    optimizer.step()
    assert handle.norm is not None and 0 < handle.norm.item() < math.inf


@pytest.mark.parametrize("shape", [(3000, 700), (700, 3000), (2_100_000,), (1, 1_100_000), (3, 2, 5), ()], ids=str)
def test_the_norm_of_bfloat16_gradients_is_exact_enough(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert backward._norm(g).dtype == torch.float32
    assert backward._norm(g).item() == pytest.approx(g.double().norm().item(), rel=1e-4)


def test_a_detached_model_is_an_ordinary_one_again() -> None:
    inside = Run().attached(max_norm=1.0).train(range(2))
    inside.handle.remove()
    inside.handle.remove()
    ordinary = Run()
    ordinary.model.load_state_dict(inside.model.state_dict())
    ordinary.optimizer.load_state_dict(inside.optimizer.state_dict())
    before = copy_of(inside.model)
    loss_of(inside.model, 2).backward()
    assert_same(copy_of(inside.model), before)
    assert clip_grad_norm_(inside.model.parameters(), 1.0) > 0
    loss_of(ordinary.model, 2).backward()
    clip_grad_norm_(ordinary.model.parameters(), 1.0)
    for run in (inside, ordinary):
        run.optimizer.step()
        assert run.model.gain.grad is not None
    assert_same(inside.optimizer.state_dict(), ordinary.optimizer.state_dict())
    assert_same(copy_of(inside.model), copy_of(ordinary.model))


def test_it_ends_with_its_with_block_and_can_begin_again() -> None:
    run = Run()
    for steps in (range(2), range(2, 4)):
        with step_in_backward(run.model, run.optimizer):
            run.train(steps)
            loss_of(run.model, steps[-1] + 1)
        assert all(not p._post_accumulate_grad_hooks for p in run.model.parameters())
    run.assert_equal(Run().train(range(4)))


def test_detached_in_mid_step_it_has_stepped_once() -> None:
    inside = Run().attached()
    loss_of(inside.model, 0).backward()
    inside.handle.remove()
    inside.optimizer.step()
    inside.assert_equal(Run().train(range(1)))


def test_detached_among_micro_batches_the_gradients_stay() -> None:
    inside = Run().attached(accumulate=2)
    (loss_of(inside.model, 0) / 2).backward()
    inside.handle.remove()
    (loss_of(inside.model, 1) / 2).backward()
    inside.optimizer.step()
    inside.assert_equal(Run().train(range(1), batches=2))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_is_not_attached_and_takes_the_same_steps(copied: Callable[[Any], Any]) -> None:
    inside = Run().attached().train(range(2))
    loss_of(inside.model, 2).backward()  # in mid-step, when gradients are gone
    other = Run()
    other.model, other.optimizer = copied((inside.model, inside.optimizer))
    inside.optimizer.step()
    inside.train(range(3, 5))
    other.train(range(3, 5))
    assert_same(copy_of(other.model), copy_of(inside.model))
    loss_of(other.model, 5).backward()
    assert clip_grad_norm_(other.model.parameters(), 1.0) > 0
    step_in_backward(other.model, other.optimizer)


def test_an_attached_model_is_collected_with_its_optimizer() -> None:
    inside = Run().attached().train()
    model, optimizer = weakref.ref(inside.model.twice.weight), weakref.ref(inside.optimizer)
    del inside
    gc.collect()
    assert model() is None and optimizer() is None


def test_without_its_optimizer_a_model_is_an_ordinary_one() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    del optimizer
    gc.collect()
    model(torch.ones(6)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    step_in_backward(model, Adafactor(model.parameters()))


def test_bad_arguments_are_named() -> None:
    model, optimizer = plain()
    for wrong, error, message in (
        ((model.parameters(), optimizer), TypeError, "model must be a torch.nn.Module, not generator"),
        ((model, torch.optim.SGD(model.parameters())), TypeError, "optimizer must be an adafactor.Adafactor, not SGD"),
        ((model[0], optimizer), ValueError, "2.weight, 2.bias: held by the optimizer, but not in the model"),
        ((nn.ModuleList([model, nn.Linear(2, 2)]), optimizer), ValueError, "1.weight, 1.bias: trainable, but not in"),
    ):
        with pytest.raises(error, match=message):
            step_in_backward(*wrong)  # type: ignore[arg-type]
    for keywords, error, message in (
        ({"accumulate": 0}, ValueError, "accumulate=0 must be at least 1"),
        ({"accumulate": 2.0}, TypeError, "accumulate=2.0 must be an integer, not float"),
        ({"accumulate": True}, TypeError, "accumulate=True must be an integer"),
        ({"max_norm": 0}, ValueError, "max_norm=0 must be None or a number above 0"),
        ({"max_norm": math.nan}, ValueError, "max_norm=nan must be"),
        ({"max_norm": "1"}, TypeError, "max_norm='1' must be None or a number above 0, not str"),
    ):
        with pytest.raises(error, match=message):
            step_in_backward(model, optimizer, **keywords)  # type: ignore[arg-type]
    loss = model(torch.ones(6)).sum()
    loss.backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0, "nothing was attached by a call that failed"


def test_parameters_without_names_are_numbered_and_many_are_not_all_listed() -> None:
    model, _ = plain()
    optimizer = Adafactor(model.parameters())
    with pytest.raises(ValueError, match="^parameter 2, parameter 3: held by"):
        step_in_backward(model[0], optimizer)
    with pytest.raises(ValueError, match="^parameter 0, parameter 1, parameter 2 and 1 more: held by"):
        step_in_backward(nn.Linear(2, 2), optimizer)


def test_attaching_twice_is_an_error() -> None:
    model, optimizer = plain()
    handle = step_in_backward(model, optimizer)
    for other in (optimizer, Adafactor(model.parameters())):
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias, 2\.weight and 1 more: attached already"):
            step_in_backward(model, other)
    handle.remove()
    step_in_backward(model, optimizer)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"0\.weight, .* and 1 more: sharded \(DTensor\)"):
        step_in_backward(model, Adafactor(model.parameters()))


@pytest.mark.usefixtures("alone")
def test_data_parallel_gradients_are_refused_also_when_the_wrapper_is_not_seen() -> None:
    model, optimizer = plain()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match="DistributedDataParallel, which adds up gradients after"):
        step_in_backward(wrapped, optimizer)
    step_in_backward(model, optimizer)
    with pytest.raises(RuntimeError, match=GONE):
        wrapped(torch.ones(6)).sum().backward()
