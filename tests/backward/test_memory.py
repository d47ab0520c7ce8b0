"""Gradients that step inside backward do not add up, and a model outlives its optimizer."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from adafactor import Adafactor, step_in_backward
from tests.backward.loops import Gauge, plain


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


def test_without_its_optimizer_a_model_is_an_ordinary_one() -> None:
    model, optimizer = plain()
    step_in_backward(model, optimizer)
    del optimizer
    gc.collect()
    model(torch.ones(6)).sum().backward()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    step_in_backward(model, Adafactor(model.parameters()))
