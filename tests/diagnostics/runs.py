"""Small runs whose faults are known, and healthy ones."""

from __future__ import annotations

import math
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from adafactor import Adafactor, schedules
from adafactor.diagnostics import Finding, Report, Watch, diagnose

TEXT = torch.tensor(list(Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes())).clamp(max=127)
ABSOLUTE: dict[str, Any] = {"relative": False, "lr_decay": None}


Train = Callable[[int], list[Report]]  # a run with a given seed


class Language(nn.Module):
    """A Transformer of bytes with norms after its layers, which makes it hard to start without warm-up."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        """The same weights for the same seed."""
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
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
        start = torch.randint(len(TEXT) - 33, (8, 1), generator=_generator(batch, self.seed))
        ids = TEXT[start + torch.arange(33)]
        return F.cross_entropy(self(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


class Perceptron(nn.Sequential):
    """Two layers."""

    def __init__(self, seed: int = 0) -> None:
        """12 → 16 → 8, the same weights for the same seed."""
        torch.manual_seed(seed)
        super().__init__(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

    @property
    def last(self) -> nn.Linear:
        """The second layer, with parameters `2.weight` and `2.bias`."""
        layer = self[2]
        assert isinstance(layer, nn.Linear)
        return layer


class LowRank(nn.Module):
    """Two frozen layers, each with a product of two small matrices beside it, of which the second starts at zero."""

    def __init__(self, seed: int) -> None:
        """Rank 8, the same weights for the same seed."""
        super().__init__()
        self.base = Perceptron(seed).requires_grad_(False)
        self.a = nn.ParameterList(torch.randn(8, n) / n**0.5 for n in (12, 16))
        self.b = nn.ParameterList(torch.zeros(m, 8) for m in (16, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 12) → (B, 8)."""
        hidden = F.relu(self.base[0](x) + x @ self.a[0].T @ self.b[0].T)
        out: Tensor = self.base.last(hidden) + hidden @ self.a[1].T @ self.b[1].T
        return out


class Idle(nn.Module):
    """A layer that is used, one that is not, and one that is multiplied by zero."""

    def __init__(self, seed: int = 0) -> None:
        """The same weights for the same seed."""
        super().__init__()
        self.used, self.unused, self.cut = Perceptron(seed), nn.Linear(3, 3), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 12) → (B, 8)."""
        out: Tensor = self.used(x) + 0 * self.cut(x)
        return out


def regression(model: nn.Module, seed: int = 0) -> Callable[[int], Tensor]:
    """Learn a fixed linear map from fresh data at each step."""
    truth = torch.randn(12, 8, generator=_generator(-1, seed))

    def loss(batch: int) -> Tensor:
        x = torch.randn(32, 12, generator=_generator(batch, seed))
        dtype = next(model.parameters()).dtype
        out: Tensor = model(x.to(dtype)).float()
        return (out - x @ truth).square().mean()

    return loss


def block_diagonal(layer: nn.Linear, seed: int = 0) -> Callable[[int], Tensor]:
    """Two halves that do not see each other, of very different gradients: V is far from rank 1."""
    scale = torch.cat([torch.full((8,), 3.0), torch.full((8,), 1 / 3)])

    def loss(t: int) -> Tensor:
        x = torch.randn(32, 16, generator=_generator(t, seed))
        upper, lower = F.linear(x[:, :8], layer.weight[:8, :8]), F.linear(x[:, 8:], layer.weight[8:, 8:])
        return ((torch.cat([upper, lower], 1) - x) * scale).square().mean()

    return loss


def run(
    optimizer: Adafactor,
    loss: Callable[[int], Tensor],
    steps: int = 40,
    every: int = 4,
    reports: list[Report] | None = None,
    scheduler: Any = None,
    spoil: Callable[[int], None] | None = None,
) -> list[Report]:
    """Train, with a report every so many steps; `spoil` is called between backward and step."""
    reports = [] if reports is None else reports
    with Watch(optimizer, reports.append, every=every) as watch:
        for t in range(steps):
            optimizer.zero_grad()
            watch.add_loss(value := loss(t))
            value.backward()
            if spoil is not None:
                spoil(t)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return reports


def kinds(findings: Iterable[Finding]) -> set[str]:
    """Of the findings, what they are."""
    return {finding.kind for finding in findings}


@dataclass(frozen=True)
class Case:
    """A run of a given seed, with what is wrong with it."""

    name: str
    train: Train
    fault: str | None = None  # what `diagnose` has to find; None for a healthy run
    also: frozenset[str] = frozenset()  # what is true of it, too
    says: tuple[str, ...] = ()  # words of the finding
    long: bool = False  # seconds, not tenths

    def findings(self, seed: int) -> list[Finding]:
        """Train, and diagnose."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gradients that are not finite
            return diagnose(self.train(seed))

    def false(self, findings: list[Finding]) -> set[str]:
        """What was found that is not so."""
        return kinds(findings) - {self.fault} - self.also


def _generator(batch: int, seed: int) -> torch.Generator:
    """Batches of different seeds have nothing in common."""
    return torch.Generator().manual_seed(1_000_003 * seed + batch + 2)


def _language(steps: int = 40, rate: Callable[[int], float] | None = None, **given: Any) -> Train:
    """The Transformer, with lr times `rate(t)`."""

    def train(seed: int) -> list[Report]:
        keywords = dict(given)
        model = Language(keywords.pop("dtype", torch.float32), seed)
        optimizer = Adafactor(model.named_parameters(), backend="eager", **keywords)
        return run(optimizer, model.loss, steps, scheduler=LambdaLR(optimizer, rate) if rate else None)

    return train


def _perceptron(
    steps: int = 40,
    factor: Callable[[int], float] = lambda t: 1.0,
    rate: Callable[[int], float] | None = None,
    change: Callable[[Perceptron], object] = lambda model: None,
    spoil: Callable[[int, Perceptron], None] = lambda t, model: None,
    **keywords: Any,
) -> Train:
    """The regression with its loss times `factor(t)`, a model that is changed first, and gradients that are spoilt."""

    def train(seed: int) -> list[Report]:
        model = Perceptron(seed)
        fit = regression(model, seed)
        change(model)
        optimizer = Adafactor(model.named_parameters(), backend="eager", **keywords)
        scheduler = LambdaLR(optimizer, rate) if rate else None
        return run(optimizer, lambda t: fit(t) * factor(t), steps, scheduler=scheduler, spoil=lambda t: spoil(t, model))

    return train


def _of(make: Callable[[int], nn.Module], **keywords: Any) -> Train:
    """The regression with another model."""

    def train(seed: int) -> list[Report]:
        model = make(seed)
        return run(Adafactor(model.named_parameters(), backend="eager", **keywords), regression(model, seed))

    return train


def _blocks(seed: int) -> list[Report]:
    torch.manual_seed(seed)
    layer = nn.Linear(16, 16, bias=False)
    optimizer = Adafactor(layer.named_parameters(), clip=None, lr=3e-3, backend="eager")
    return run(optimizer, block_diagonal(layer, seed), steps=20)


def _noise(seed: int) -> list[Report]:
    """Random answers: there is nothing to learn, and the figures of an optimizer cannot know."""
    model = Perceptron(seed)

    def loss(t: int) -> Tensor:
        generator = _generator(t, seed)
        x, y = torch.randn(32, 12, generator=generator), torch.randint(8, (32,), generator=generator)
        return F.cross_entropy(model(x), y)

    return run(Adafactor(model.named_parameters(), backend="eager"), loss)


def _tuned(seed: int) -> list[Report]:
    """Trained for 300 steps, then from there for the same task as documents advise."""
    model = Perceptron(seed)
    fit = regression(model, seed)
    run(Adafactor(model.named_parameters(), lr=3e-2, backend="eager"), fit, 300)
    return run(Adafactor(model.named_parameters(), lr=3e-4, backend="eager", **ABSOLUTE), lambda t: fit(t + 300))


def _dying(t: int, model: Perceptron) -> None:
    """From step 24 on no hidden unit ever speaks."""
    if t == 24:
        nn.init.constant_(model.get_parameter("0.bias"), -1e3)


def _nan(t: int, parameters: Iterable[Tensor]) -> None:
    for p in parameters if t in (7, 8, 13) else ():
        assert p.grad is not None
        p.grad[0] = math.nan


TOO_LARGE = frozenset({"overwritten", "growing", "loss grows", "too small"})
CASES = [
    Case("absolute lr=0.1", _language(lr=0.1, **ABSOLUTE), "overwritten", TOO_LARGE, long=True,
         says=("relative=True, lr=1e-2",)),
    Case("relative lr=0.5", _language(lr=0.5), "overwritten", TOO_LARGE, long=True, says=("changes 50% of",)),
    Case("absolute lr=0.3 for 120 steps", _language(120, lr=0.3, **ABSOLUTE), "growing", TOO_LARGE, long=True),
    Case("AdamW's lr=3e-4 with relative steps", _language(lr=3e-4), "hardly moves", long=True),
    Case("absolute lr=1e-8", _perceptron(lr=1e-8, **ABSOLUTE), "hardly moves"),
    Case("the loss with the wrong sign", _perceptron(200, maximize=True), "loss grows"),
    Case("other data from step 30 on", _perceptron(60, lambda t: 1.0 if t < 30 else 50.0), "loss grows"),
    Case("gradients that grow twenty-fold, without clipping",
         _perceptron(80, lambda t: 20.0 if t >= 60 else 1.0, lr=1e-3, beta2=0.999, clip=None, **ABSOLUTE),
         "out of date", frozenset({"loss grows"}),
         says=("clip=1.0", "beta2=None", "warm-up", "2 of 4 tensors: 0.weight, 2.weight",)),
    Case("gradients that fall a thousand-fold", _perceptron(40, lambda t: 1e3 if t < 12 else 1.0, beta2=0.999),
         "too small", says=("beta2=None", "0.weight, 2.weight",)),
    Case("two halves in one matrix", _blocks, "poor fit", says=("factored=False", "(certain)",)),
    Case("bfloat16, lr=5e-5", _language(lr=5e-5, dtype=torch.bfloat16, **ABSOLUTE), "lost to rounding", long=True,
         says=('rounding="stochastic"', 'rounding="kahan"',)),
    Case("a loss that is NaN", _perceptron(spoil=lambda t, model: _nan(t, model.parameters())), "not finite",
         says=("the loss itself", "4 of 4 tensors", "3 steps skipped",)),
    Case("a layer that overflows", _perceptron(spoil=lambda t, model: _nan(t, [model.last.weight])), "not finite",
         says=("overflows in these layers", "where: 2.weight", "3 steps skipped",
         "change: It is not every parameter, so the loss is finite",)),
    Case("a layer that is not used", _of(Idle), "unused", frozenset({"zero gradient"})),
    Case("a layer that is multiplied by zero", _of(Idle), "zero gradient", frozenset({"unused"})),
    Case("units that die at step 24 of 40", _perceptron(spoil=_dying), "zero gradient", frozenset({"loss grows"})),
    Case("a scheduler that ends at step 24 of 40", _perceptron(rate=lambda t: float(t < 24)), "no step size"),
    Case("a matrix of zeros without a floor",
         _perceptron(change=lambda m: nn.init.zeros_(m.last.weight), eps=(1e-30, 0.0), lr=1e-3), "no step size",
         frozenset({"hardly moves", "zero gradient"}), says=("where: 2.weight",)),
    Case("a matrix that starts at zero", _perceptron(change=lambda m: nn.init.zeros_(m.last.weight)), "on the floor",
         says=("where: 2.weight", "100 steps",)),
    Case("LoRA with relative steps", _of(LowRank), "on the floor"),
    Case("clip=0.2", _perceptron(220, clip=0.2), "always clipped", says=("clip=1.0",)),
    Case("decay_rate=1.2", _perceptron(decay_rate=1.2), "never forgets"),
    Case("random answers", _noise, "nothing to learn"),
    Case("the defaults", _language(), long=True),
    Case("the defaults in bfloat16", _language(dtype=torch.bfloat16), long=True),
    Case("the paper's warm-up",
         _language(rate=lambda t: schedules.with_warmup(t + 1, 1e-4), lr=1.0, lr_decay=None), long=True),
    Case("absolute lr=1e-3", _language(lr=1e-3, **ABSOLUTE), long=True),
    Case("absolute lr=1e-2, the best of this model", _language(lr=1e-2, **ABSOLUTE), long=True),
    Case("bfloat16 with stochastic rounding",
         _language(lr=1e-3, rounding="stochastic", dtype=torch.bfloat16, **ABSOLUTE), long=True),
    Case("momentum of the gradient", _language(lr=1e-3, beta1=0.9, momentum_of="gradient", **ABSOLUTE), long=True),
    Case("momentum of the update", _perceptron(beta1=0.9)),
    Case("fine-tuning at lr=3e-4", _tuned),
    Case("LoRA with absolute lr=3e-3", _of(LowRank, lr=3e-3, **ABSOLUTE)),
    Case("a frozen layer", _perceptron(change=lambda model: model[0].requires_grad_(False))),
]  # fmt: skip
