"""What a step size does in fine-tuning and in a diffusion model; the tables of docs/settings.md.

    python -m studies.learning_rate                  # both, about half an hour on one core
    python -m studies.learning_rate --tables         # from the committed record alone

Fine-tuning: a byte-level GPT is trained on the source code of Python's standard library, then goes on with Python's
manual (both come with Python), and is measured on what it has not seen of either. Diffusion: a small convolutional
network learns from scratch to tell the noise from drawings of circles, squares and crosses.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import pydoc_data.topics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from adafactor import Adafactor

RECORD = Path(__file__).parent / "results" / "learning_rate.json"
RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
SEEDS = 3
LENGTH, BATCH, BEFORE, AFTER = 96, 8, 2000, 200  # bytes of a piece, pieces of a batch, steps before and after
SIDE, LEVELS, DENOISE = 16, 50, 500  # pixels, levels of noise, steps

Make = Callable[[nn.Module, float], Optimizer]
Loss = Callable[[nn.Module], Tensor]
Results = dict[str, dict[str, list[dict[str, float]]]]  # by optimizer and step size, one for each seed

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model, lr: AdamW(model.parameters(), lr=lr, weight_decay=0.0),
    "absolute": lambda model, lr: Adafactor(model.parameters(), lr=lr, relative=False, lr_decay=None),
    "absolute, momentum": lambda model, lr: Adafactor(
        model.parameters(), lr=lr, relative=False, lr_decay=None, beta1=0.9
    ),
    "relative": lambda model, lr: Adafactor(model.parameters(), lr=lr, lr_decay=None),
}


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: three layers."""

    def __init__(self, width: int = 96) -> None:
        """Torch's own layers, with the norm first."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, pieces: Tensor) -> Tensor:
        """The loss of (B, LENGTH + 1) bytes."""
        x = self.bytes(pieces[:, :-1]) + self.positions.weight
        logits = self.head(self.norm(self.layers(x, mask=self.mask, is_causal=True)))
        return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


class Denoiser(nn.Module):
    """From a noisy (B, 1, 16, 16) picture and the level of its noise to the noise."""

    def __init__(self, width: int = 16) -> None:
        """Five convolutions with norms, the level added to each."""
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.levels = nn.Embedding(LEVELS, width)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Residual layers."""
        h = self.first(x)
        for norm, convolution in zip(self.norms, self.middle, strict=True):
            h = h + convolution(F.silu(norm(h) + self.levels(level)[:, :, None, None]))
        noise: Tensor = self.last(F.silu(h))
        return noise


def text_loss(text: Tensor, count: int, seed: int, model: nn.Module) -> Tensor:
    """On so many pieces from random places."""
    starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(torch.stack([text[start : start + LENGTH + 1] for start in starts]))
    return loss


def texts() -> dict[str, tuple[Tensor, Tensor]]:
    """Source code and prose, each as bytes to learn from and bytes to be measured on."""
    library = Path(argparse.__file__).parent.glob("*.py")
    code = b"\n".join(path.read_bytes() for path in sorted(library) if path.stat().st_size > 10_000)
    prose = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)).encode()
    both = {"old": torch.tensor(list(code)), "new": torch.tensor(list(prose))}
    return {name: (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]) for name, text in both.items()}


def drawings(count: int, generator: torch.Generator) -> Tensor:
    """(count, 1, 16, 16) circles, squares and crosses of −1 and 1."""
    down, across = (
        (torch.arange(SIDE) - torch.randint(5, SIDE - 5, (count, 1), generator=generator)).abs() for _ in range(2)
    )
    down, across = down[:, :, None], across[:, None, :]
    radius = torch.randint(3, 6, (count, 1, 1), generator=generator)
    cross = (torch.minimum(down, across) == 0) & (torch.maximum(down, across) <= radius)
    shapes = torch.stack([down**2 + across**2 <= radius**2, torch.maximum(down, across) <= radius, cross])
    chosen = shapes[torch.randint(3, (count,), generator=generator), torch.arange(count)]
    return chosen[:, None].float() * 2 - 1


def noise_loss(count: int, seed: int, model: nn.Module) -> Tensor:
    """The mean square error of the noise, at levels drawn evenly; 1 is that of a model that has learned nothing."""
    generator = torch.Generator().manual_seed(seed)
    clean, level = drawings(count, generator), torch.randint(LEVELS, (count,), generator=generator)
    kept = torch.cos((level + 0.5) / LEVELS * torch.pi / 2)[:, None, None, None]
    noise = torch.randn(clean.shape, generator=generator)
    return F.mse_loss(model(kept * clean + (1 - kept**2).sqrt() * noise, level), noise)


def train(model: nn.Module, optimizer: Optimizer, loss: Callable[[int, nn.Module], Tensor], batches: range) -> None:
    """A step for each seed of a batch, at a constant step size."""
    for seed in batches:
        optimizer.zero_grad()
        loss(seed, model).backward()
        optimizer.step()


def seeds(run: int, steps: int) -> range:
    """Of a run's batches: none is seen twice, nor that of the measurement, 0."""
    return range(10_000 * (run + 1), 10_000 * (run + 1) + steps)


@torch.no_grad()
def measured(losses: Mapping[str, Loss], model: nn.Module) -> dict[str, float]:
    """Each loss of the trained model."""
    return {name: round(float(loss(model)), 4) for name, loss in losses.items()}


def learned(text: Tensor, width: int = 96) -> GPT:
    """The model that fine-tuning starts from."""
    torch.manual_seed(0)
    model = GPT(width)
    train(model, Adafactor(model.parameters()), partial(text_loss, text, BATCH), range(BEFORE))
    return model


def finetuning() -> Iterator[tuple[str, str, dict[str, float]]]:
    """The losses on old and new text after each optimizer and step size; first of all, before any of them."""
    data = texts()
    losses = {name: partial(text_loss, held, 128, 0) for name, (_, held) in data.items()}
    start = learned(data["old"][0])
    yield "before", "", measured(losses, start)
    for (name, make), rate, seed in product(OPTIMIZERS.items(), RATES, range(SEEDS)):
        model = copy.deepcopy(start)
        train(model, make(model, rate), partial(text_loss, data["new"][0], BATCH), seeds(seed, AFTER))
        yield name, f"{rate:g}", measured(losses, model)


def diffusion() -> Iterator[tuple[str, str, dict[str, float]]]:
    """The error on held-out noise after each optimizer and step size."""
    losses: dict[str, Loss] = {"error": partial(noise_loss, 2048, 0)}
    for (name, make), rate, seed in product(OPTIMIZERS.items(), RATES, range(SEEDS)):
        torch.manual_seed(seed)
        model = Denoiser()
        train(model, make(model, rate), partial(noise_loss, 16), seeds(seed, DENOISE))
        yield name, f"{rate:g}", measured(losses, model)


EXPERIMENTS = {"finetuning": finetuning, "diffusion": diffusion}
TABLES = [("finetuning", "new"), ("diffusion", "error")]


def run() -> dict[str, Results]:
    """All experiments, with a progress bar."""
    found: dict[str, Results] = {}
    for title, experiment in EXPERIMENTS.items():
        results = found[title] = {}
        with Progress() as bar:
            task = bar.add_task(title, total=len(OPTIMIZERS) * len(RATES) * SEEDS)
            for name, rate, losses in experiment():
                results.setdefault(name, {}).setdefault(rate, []).append(losses)
                bar.advance(task, 0 if name == "before" else 1)
    return found


def table(results: Results, figure: str) -> str:
    """A row for each optimizer, a column for each step size: the mean of the seeds and the largest distance from it."""
    rates = [f"{rate:g}" for rate in RATES]
    lines = ["| `lr` | " + " | ".join(rates) + " |", "|---|" + "---|" * len(rates)]
    for name in OPTIMIZERS:
        runs = [[losses[figure] for losses in results[name][rate]] for rate in rates]
        cells = [f"{mean(run):.3f}\u00a0±\u00a0{max(abs(x - mean(run)) for x in run):.3f}" for run in runs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="print the tables of the committed record; run nothing")
    parser.add_argument("--output", type=Path, default=RECORD)
    arguments = parser.parse_args()
    if not arguments.tables:
        about = {"python": platform.python_version(), "torch": torch.__version__, "seeds": SEEDS}
        arguments.output.write_text(json.dumps({"about": about, **run()}, indent=1) + "\n")
    record = json.loads(arguments.output.read_text())
    for title, figure in TABLES:
        print(f"\n{title}, {figure}\n\n{table(record[title], figure)}")


if __name__ == "__main__":
    main()
