"""A plain loop around `torch.compile(model)`: stop, save, and go on in a fresh model with the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from adafactor import Adafactor, schedules
from tests.integrations.exact import assert_float32_statistics, assert_same, copy_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    # torch, importing its own inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

STEPS, SAVE_AFTER = 6, 3


@dataclass
class Run:
    """A model, its compiled form, an optimizer with momentum, and a warm-up."""

    model: nn.Module
    compiled: Callable[[Tensor], Tensor]
    optimizer: Adafactor
    scheduler: LRScheduler

    def train(self, first: int, last: int) -> None:
        """Steps `first` to `last`, each on a batch of its own."""
        for t in range(first, last + 1):
            tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(t))
            logits = self.compiled(tokens[:, :-1])  # (B, T, vocabulary)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.scheduler)], path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        model, optimizer, scheduler = torch.load(path, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)


def start(seed: int, dtype: torch.dtype) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11)).to(dtype)
    optimizer = Adafactor(model.named_parameters(), lr=1.0, lr_decay=None, beta1=0.9)
    compiled = torch.compile(model, backend="inductor")
    return Run(model, compiled, optimizer, schedules.warmup(optimizer, slope=1e-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_resumed_run_ends_on_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = start(0, dtype)
    whole.train(1, SAVE_AFTER)
    whole.save(tmp_path / "checkpoint.pt")
    whole.train(SAVE_AFTER + 1, STEPS)

    resumed = start(1, dtype)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.train(SAVE_AFTER + 1, STEPS)

    assert_same(copy_of(resumed.model), copy_of(whole.model))
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_float32_statistics(resumed.optimizer.state_dict(), STEPS)


def test_without_the_optimizers_state_the_run_ends_elsewhere() -> None:
    whole, fresh = start(0, torch.float32), start(1, torch.float32)
    whole.train(1, SAVE_AFTER)
    fresh.model.load_state_dict(whole.model.state_dict())
    fresh.scheduler.load_state_dict(whole.scheduler.state_dict())
    for run in (whole, fresh):
        run.train(SAVE_AFTER + 1, STEPS)
    ends = zip(whole.model.parameters(), fresh.model.parameters(), strict=True)
    assert all((p != q).any() for p, q in ends)
