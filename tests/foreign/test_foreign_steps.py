"""What torch asks of a step of its own optimizers: rates, closures and keywords."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.foreign.database import SUBJECTS, Subject, linear, loss_of, train


@SUBJECTS
def test_a_rate_may_be_a_tensor(subject: Subject) -> None:
    """To the same steps, also when the tensor is written to between them, as schedulers do; a step only reads it."""
    value = 0.01
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


@SUBJECTS
@pytest.mark.parametrize("keyword", ["foreach", "fused"])
def test_keywords_for_the_implementation_do_not_change_the_step(subject: Subject, keyword: str) -> None:
    if not subject.accepts(keyword):
        pytest.skip(f"no {keyword}")
    (weight, bias), (other, other_bias) = linear(), linear()
    train(subject.make([weight, bias], **{keyword: True}), weight, bias, 3)
    train(subject.make([other, other_bias]), other, other_bias, 3)
    torch.testing.assert_close(weight, other)
