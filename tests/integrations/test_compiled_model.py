"""A plain loop around `torch.compile(model)`: stop, save, and go on in a fresh model with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adafactor import Adafactor, schedules
from tests.integrations.exact import assert_float32_statistics, assert_same, copy_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    # torch, importing its own inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

STEPS, SAVE_AFTER = 6, 3


class Run:
    """A model, its compiled form, an optimizer with momentum, and a warm-up."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        """The same weights for the same seed."""
        torch.manual_seed(seed)
        layers = (nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
        self.model = nn.Sequential(*layers).to(dtype)
        self.compiled = torch.compile(self.model, backend="inductor")
        self.optimizer = Adafactor(self.model.named_parameters(), lr=1.0, lr_decay=None, beta1=0.9)
        self.scheduler = schedules.warmup(self.optimizer, slope=1e-2)
        self.parts: tuple[Any, ...] = (self.model, self.optimizer, self.scheduler)

    def train(self, first: int, last: int) -> None:
        """Steps `first` to `last`, each on a batch of its own."""
        for t in range(first, last + 1):
            tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(t))
            logits = self.compiled(tokens[:, :-1])  # (B, T, vocabulary)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_ends_on_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    whole, resumed = Run(0, dtype), Run(1, dtype)
    whole.train(1, SAVE_AFTER)
    torch.save([part.state_dict() for part in whole.parts], tmp_path / "checkpoint.pt")
    whole.train(SAVE_AFTER + 1, STEPS)
    for part, state in zip(resumed.parts, torch.load(tmp_path / "checkpoint.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    resumed.train(SAVE_AFTER + 1, STEPS)
    assert_same(copy_of(resumed.model), copy_of(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_float32_statistics(resumed.optimizer.state_dict(), STEPS)
