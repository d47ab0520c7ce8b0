"""What torch asks of a step of its own optimizers: directions, groups, closures, hooks and missing gradients."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.foreign.database import PLAIN, SUBJECTS, Subject, departure, linear, loss_of, torch_database, train

GAPS_ARE_SLOW = pytest.mark.filterwarnings("ignore:.*is stepped by eager PyTorch, more slowly:RuntimeWarning")


def may_have_gaps(subject: Subject) -> bool:
    """The compiled step alone refuses tensors that it has no path through; "auto" leaves them to eager PyTorch."""
    return subject.keywords.get("backend") != "cpu"


@SUBJECTS
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "not contiguous"])
@GAPS_ARE_SLOW
def test_steps_go_in_the_right_direction(subject: Subject, gaps: bool) -> None:
    if gaps and not may_have_gaps(subject):
        subject = subject._replace(keywords={**subject.keywords, "backend": "auto"})
    weight, bias = linear(gaps)
    optimizer = subject.make([weight, bias])
    before = loss_of(weight, bias).item()
    train(optimizer, weight, bias, 20)
    assert (loss_of(weight, bias).item() > before) == subject.keywords.get("maximize", False)
    assert repr(optimizer).startswith(subject.info.name)


@SUBJECTS
def test_groups_have_their_own_rates(subject: Subject) -> None:
    """One of 0 stands still; the other steps as if it were alone."""
    (weight, bias), (alone, _) = linear(), linear()
    optimizer = subject.make([{"params": [weight]}, {"params": [bias], "lr": 0.0}])
    single = subject.make([alone])
    before = bias.detach().clone()
    for _ in range(3):
        for p in (weight, bias, alone):
            p.grad = p.detach() * 2
        optimizer.step()
        single.step()
    assert torch.equal(bias, before) and torch.equal(weight, alone)


@PLAIN
def test_groups_have_their_own_weight_decay(subject: Subject) -> None:
    weights = [linear()[0] for _ in range(3)]
    both = subject.make([{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:2]}], lr=0.1)
    none = subject.make(weights[2:], lr=0.1)
    for _ in range(2):
        for p in weights:
            p.grad = torch.ones_like(p)
        both.step()
        none.step()
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[2])


@SUBJECTS
def test_a_rate_may_be_a_tensor(subject: Subject) -> None:
    """To the same steps, also when the tensor is written to between them, as schedulers do; a step only reads it."""
    value = subject.keywords.get("lr", 0.01)
    value = float(value) if isinstance(value, Tensor) else value
    (weight, bias), (other, other_bias) = linear(), linear()
    rate = torch.tensor(value, dtype=torch.float64)
    given, plain = subject.make([weight, bias], lr=rate), subject.make([other, other_bias], lr=value)
    train(given, weight, bias, 2)
    train(plain, other, other_bias, 2)
    assert float(given.param_groups[0]["lr"]) == value
    given.param_groups[0]["lr"].fill_(value / 4)
    plain.param_groups[0]["lr"] = value / 4
    train(given, weight, bias, 2)
    train(plain, other, other_bias, 2)
    torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
    assert float(given.param_groups[0]["lr"]) == value / 4


@SUBJECTS
def test_without_gradients_nothing_changes(subject: Subject) -> None:
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    before = copy.deepcopy((weight, bias, optimizer.state_dict()))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])
    if subject.ours:
        assert departure("state before the first step")
        assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    else:
        assert not optimizer.state


@SUBJECTS
def test_with_gradients_of_zero_nothing_but_the_decay_changes(subject: Subject) -> None:
    if subject.keywords.get("weight_decay"):
        subject = subject._replace(keywords={**subject.keywords, "weight_decay": 0.0})
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    before = weight.detach().clone(), bias.detach().clone()
    for _ in range(2):
        weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
        optimizer.step()
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])


@PLAIN
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_does_what_it_says(subject: Subject, to_none: bool) -> None:
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    loss_of(weight, bias).backward()
    bias.grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    assert weight.grad is None if to_none else not weight.grad.any()  # type: ignore[union-attr]
    assert bias.grad is None


@PLAIN
def test_a_parameter_without_a_gradient_or_frozen_stays_while_others_step(subject: Subject) -> None:
    (weight, bias), frozen = linear(), torch.ones(3, 4)
    optimizer = subject.make([weight, bias, frozen])
    before = weight.detach().clone(), bias.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(bias, before[1]) and torch.equal(frozen, torch.ones(3, 4))
    assert not torch.equal(weight, before[0])


@SUBJECTS
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(subject: Subject) -> None:
    weight, bias = linear()
    optimizer, calls = subject.make([weight, bias]), []

    def closure() -> Any:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        calls.append(loss := loss_of(weight, bias))
        loss.backward()
        return loss

    with torch.no_grad():
        returned: Any = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert len(calls) == 1 and returned is calls[0]


@PLAIN
def test_hooks_around_the_step_run_in_order_with_those_for_all_optimizers(subject: Subject) -> None:
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    said: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: said.append("before")),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: said.append("after")),
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: said.append("all before")),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: said.append("all after")),
    ]
    try:
        train(optimizer, weight, bias)
    finally:
        for handle in handles:
            handle.remove()
    train(optimizer, weight, bias)
    assert said == ["all before", "before", "after", "all after"]


@PLAIN
def test_a_hook_may_put_another_closure_in_place(subject: Subject) -> None:
    weight, bias = linear()
    optimizer = subject.make([weight, bias])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7.0), {}))
    assert optimizer.step(lambda: 1.0) == 7.0


@PLAIN
@pytest.mark.parametrize("keyword", ["foreach", "fused"])
def test_keywords_for_the_implementation_do_not_change_the_step(subject: Subject, keyword: str) -> None:
    if not subject.accepts(keyword):
        pytest.skip(f"no {keyword}")
    (weight, bias), (other, other_bias) = linear(), linear()
    train(subject.make([weight, bias], **{keyword: True}), weight, bias, 3)
    train(subject.make([other, other_bias]), other, other_bias, 3)
    torch.testing.assert_close(weight, other)


@pytest.mark.parametrize(
    "case",
    torch_database.get_error_inputs_for_all_optims("cpu", torch.float32),
    ids=lambda c: c.optimizer_error_input.desc,
)
@PLAIN
def test_what_torch_refuses_is_refused(subject: Subject, case: Any) -> None:
    """With torch's own cases, error types and messages."""
    given, message = case.optimizer_error_input, case.error_regex
    if subject.ours and given.desc == "Tensor lr must be 1-element":
        assert departure(given.desc)
        message = "^lr=tensor"
    params = given.params if given.params is not None else list(linear())
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=message):
            subject.make(params, **given.kwargs)
    else:
        with pytest.raises((case.error_type, TypeError) if message == "^lr=tensor" else case.error_type, match=message):
            subject.make(params, **given.kwargs)


@PLAIN
def test_complex_parameters_and_sparse_gradients_are_refused_by_name(subject: Subject) -> None:
    weight = torch.ones(3, 4, dtype=torch.complex64, requires_grad=True)
    if not subject.ours:
        pytest.skip("torch's optimizers differ in this among themselves")
    assert departure("complex parameters") and departure("sparse gradients")
    with pytest.raises(TypeError, match="^name has dtype torch.complex64"):
        subject.make([("name", weight)])
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = subject.make(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="weight is sparse"):
        optimizer.step()


@PLAIN
def test_a_model_learns(subject: Subject) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    data, target = torch.randn(16, 2, 4, 4), torch.randint(3, (16,))
    optimizer = subject.make(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
