"""Step inside backward keeps no gradients, and nothing else alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from adafactor import Adafactor, step_in_backward
from tests.backward.loops import Gauge, Run, plain


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


def test_an_attached_model_is_freed_at_once_with_its_optimizer() -> None:
    Run().attached().train(range(1))  # what is imported meanwhile may hold frames
    gc.collect()
    gc.disable()
    try:
        inside = Run().attached().train(range(1))
        model, optimizer = weakref.ref(inside.model.twice.weight), weakref.ref(inside.optimizer)
        del inside
        assert model() is None and optimizer() is None
    finally:
        gc.enable()


def test_without_its_optimizer_a_model_is_an_ordinary_one() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    del optimizer
    gc.collect()
    model(torch.ones(6)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    step_in_backward(model, Adafactor(model.parameters()))
