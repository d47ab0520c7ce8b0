"""Small trainings, sick and healthy, with a report every few steps."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adafactor import Adafactor
from adafactor.diagnostics import Finding, History, Watch

TEXT = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes())).clamp(max=127)
ABSOLUTE: dict[str, Any] = {"relative": False, "lr_decay": None}


class Language(nn.Module):
    """A Transformer of bytes with norms after its layers, which makes it hard to start without warm-up."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Always the same weights."""
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(128, 32), nn.Parameter(torch.randn(32, 32) * 0.02)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 128, 0.0, batch_first=True) for _ in range(2))
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, 32) → (B, 32, 128)."""
        x = self.tokens(ids) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(32, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(x, self.tokens.weight)

    def loss(self, batch: int) -> Tensor:
        """Of eight stretches of text."""
        start = torch.randint(len(TEXT) - 33, (8, 1), generator=torch.Generator().manual_seed(batch))
        ids = TEXT[start + torch.arange(33)]
        return F.cross_entropy(self(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def run(
    optimizer: Adafactor,
    loss: Callable[[int], Tensor],
    steps: int = 40,
    every: int = 4,
    history: History | None = None,
    scheduler: Any = None,
) -> History:
    """Train, with a report every so many steps."""
    history = History() if history is None else history
    with Watch(optimizer, history, every=every):
        for t in range(steps):
            optimizer.zero_grad()
            loss(t).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return history


def language(steps: int = 40, every: int = 4, dtype: torch.dtype = torch.float32, **keywords: Any) -> History:
    model = Language(dtype)
    return run(Adafactor(model.named_parameters(), backend="eager", **keywords), model.loss, steps, every)


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


class Perceptron(nn.Sequential):
    """Two layers, always with the same weights."""

    def __init__(self) -> None:
        """12 → 16 → 8."""
        torch.manual_seed(0)
        super().__init__(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    @property
    def last(self) -> nn.Linear:
        """The second layer, with parameters `2.weight` and `2.bias`."""
        layer = self[2]
        assert isinstance(layer, nn.Linear)
        return layer


def regression(model: nn.Module) -> Callable[[int], Tensor]:
    """Learn a fixed linear map from fresh data at each step."""
    truth = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))

    def loss(batch: int) -> Tensor:
        x = torch.randn(32, 12, generator=torch.Generator().manual_seed(batch + 2))
        dtype = next(model.parameters()).dtype
        out: Tensor = model(x.to(dtype)).float()
        return (out - x @ truth).square().mean()

    return loss
