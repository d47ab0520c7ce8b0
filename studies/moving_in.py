"""How the steps change when a run moves in from torch.optim, on gradients of real models; docs/migrate.md.

python -m studies.moving_in torch         # torch.optim.Adafactor: how far apart matrices end, by the gradients' size
python -m studies.moving_in adamw         # the same for torch.optim.AdamW
python -m studies.moving_in losses        # torch.optim.AdamW: the loss after the switch

The models are small and the data are at hand: this repository's documentation, the lab's phrases, and drawn letters.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adafactor
from adafactor import Adafactor
from lab import generated
from lab.model import Shape, Transformer

TEXT = b"".join(path.read_bytes() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEEDS = range(3)
Loss = Callable[[int], Tensor]  # of the batch with this number
Model = tuple[nn.Module, Loss]


def text(seed: int, batch: int = 16, length: int = 64) -> Tensor:
    """Windows of the documentation, a token for each byte: (batch, length)."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(TEXT) - length, (batch,), generator=draw).tolist()
    return torch.tensor([list(TEXT[start : start + length]) for start in starts])


def llama() -> Model:
    """A decoder of two layers that predicts the next byte."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    return model, lambda t: model(input_ids=text(t), labels=text(t)).loss


def bert() -> Model:
    """An encoder of two layers that predicts hidden bytes."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=257, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes))

    def loss(t: int) -> Tensor:
        ids = text(t)
        hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(t)) < 0.15
        found: Tensor = model(input_ids=ids.masked_fill(hidden, 256), labels=ids.masked_fill(~hidden, -100)).loss
        return found

    return model, loss


def transformer() -> Model:
    """The lab's encoder and decoder, two layers each, on its English and German phrases as bytes."""
    model = Transformer(Shape(layers=2, width=64, heads=4, filter=128, dropout=0.0), vocabulary=260)
    pairs = generated.pairs(4000, 0)

    def ids(phrase: str, first: list[int]) -> list[int]:
        found = first + [4 + byte for byte in phrase.encode()][:47]
        return found + [0] * (48 - len(found))

    def loss(t: int) -> Tensor:
        batch = random.Random(t).sample(pairs, 16)
        source = torch.tensor([ids(pair.english, []) for pair in batch])
        target = torch.tensor([ids(pair.german, [1]) for pair in batch])
        return model.loss(source, target[:, :-1], target[:, 1:], 0.1)

    return model, loss


def letters(seed: int, batch: int = 32) -> tuple[Tensor, Tensor]:
    """Letters drawn somewhere in a picture, with noise: (batch, 1, 24, 24), and which they are."""
    from PIL import Image, ImageDraw

    draw, images, labels = random.Random(seed), [], []
    for _ in range(batch):
        label = draw.randrange(len(LETTERS))
        image = Image.new("L", (24, 24))
        ImageDraw.Draw(image).text((draw.randrange(2, 16), draw.randrange(1, 11)), LETTERS[label], fill=255)
        images.append(torch.tensor(list(image.tobytes()), dtype=torch.float32).view(1, 24, 24) / 255)
        labels.append(label)
    noise = torch.randn(batch, 1, 24, 24, generator=torch.Generator().manual_seed(seed))
    return torch.stack(images) + 0.2 * noise, torch.tensor(labels)


def convolutions() -> Model:
    """Four convolutions that read a letter."""
    sides = (1, 16, 32, 32, 64)
    layers = [
        layer
        for narrow, wide in zip(sides, sides[1:], strict=False)
        for layer in (nn.Conv2d(narrow, wide, 3, padding=1, stride=1 + (narrow > 1)), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sides[-1], len(LETTERS)))

    def loss(t: int) -> Tensor:
        images, labels = letters(t)
        return F.cross_entropy(model(images), labels)

    return model, loss


MODELS = {"Llama": llama, "BERT": bert, "lab": transformer, "convolutions": convolutions}


def rms(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def deviations(make: Callable[[], Model], seed: int, source: str) -> list[tuple[float, ...]]:
    """Of each matrix: RMS of the gradient, our mean RMS(U), and how far apart the same gradients drive the two.

    30 steps of torch's, then 20 of both on the gradients of torch's run; the distance is that of the worst weight,
    relative to the one that torch's matrix travelled.
    """
    torch.manual_seed(seed)
    model, loss = make()
    params = [p for p in model.parameters() if p.requires_grad]
    theirs = torch.optim.Adafactor(params) if source == "torch" else torch.optim.AdamW(params)

    def step(t: int) -> None:
        theirs.zero_grad()
        loss(10_000 * seed + t).backward()

    for t in range(30):
        step(t)
        theirs.step()
    mine = [p.detach().clone().requires_grad_() for p in params]
    start = [p.detach().clone() for p in params]
    ours = adafactor.like(source, mine)
    ours.load_state_dict(adafactor.migrate(copy.deepcopy(theirs.state_dict()), source))
    sizes: list[list[tuple[float, float]]] = [[] for _ in params]
    for t in range(30, 50):
        step(t)
        for p, q in zip(params, mine, strict=True):
            q.grad = p.grad
        theirs.step()
        ours.step()
        for found, p, line in zip(sizes, params, ours.report(), strict=True):
            found.append((rms(p.grad) if p.grad is not None else 0.0, line.rms_update))
    result: list[tuple[float, ...]] = []
    for p, q, x, found in zip(params, mine, start, sizes, strict=True):
        if p.ndim > 1:
            apart = ((p - q).detach().abs().max() / (p - x).detach().abs().max()).item()
            result.append((mean(g for g, _ in found), mean(u for _, u in found), apart))
    return result


def show_deviations(source: str) -> None:
    """Print, by the size of the gradients, how far apart matrices end."""
    print("| model | gradients' RMS | matrices | RMS(U) | apart |\n|---|---|---|---|---|")
    for name, make in MODELS.items():
        rows = [row for seed in SEEDS for row in deviations(make, seed, source)]
        for low, high in ((0, 1e-5), (1e-5, 1e-4), (1e-4, 3.4e-4), (3.4e-4, 1e-3), (1e-3, 1e9)):
            if inside := [row for row in rows if low <= row[0] < high]:
                u, apart = [row[1] for row in inside], [row[2] for row in inside]
                print(
                    f"| {name} | {low:g} to {high:g} | {len(inside)} | {min(u):.2f} to {max(u):.2f} | "
                    f"{min(apart):.2g} to {max(apart):.2g}, median {sorted(apart)[len(apart) // 2]:.2g} |"
                )


REFERENCE = "AdamW goes on"
ANEW: dict[str, Any] = {"lr": 1e-3, "lr_decay": None, "relative": False, "weight_decay": 1e-2}
ADAM: dict[str, Any] = {"beta1": 0.9, "momentum_of": "gradient", "beta2": 0.999}


def migrated(params: list[Tensor], saved: dict[str, Any], **changes: Any) -> Adafactor:
    """Ours with AdamW's state."""
    optimizer, arguments = Adafactor(params), {"betas": changes.pop("betas", (0.9, 0.999))}
    optimizer.load_state_dict(adafactor.migrate(saved, "adamw", arguments=arguments))
    for group in optimizer.param_groups:
        group.update(changes)
    return optimizer


def adamw(params: list[Tensor], saved: dict[str, Any]) -> torch.optim.AdamW:
    """Theirs, as it was."""
    optimizer = torch.optim.AdamW(params)
    optimizer.load_state_dict(saved)
    return optimizer


ARMS: dict[str, Callable[[list[Tensor], dict[str, Any]], torch.optim.Optimizer]] = {
    REFERENCE: adamw,
    "its state, migrated": migrated,
    "its state, migrated, clip=1": lambda params, saved: migrated(params, saved, clip=1.0),
    "the same keywords, state anew": lambda params, _: Adafactor(params, **ANEW, **ADAM, clip=None),
    "migrated without momentum": lambda params, saved: migrated(params, saved, betas=(0.0, 0.999)),
    "migrated without momentum, clip=None": lambda params, saved: migrated(
        params, saved, betas=(0.0, 0.999), clip=None
    ),
    "without momentum, state anew": lambda params, _: Adafactor(params, **ANEW),
}


def losses(make: Callable[[], Model], seed: int, before: int = 100, after: int = 100) -> dict[str, list[float]]:
    """The loss of each step after the switch, for each way to go on from the same AdamW run, on the same batches."""
    torch.manual_seed(seed)
    model, loss = make()
    params: list[Tensor] = list(model.parameters())

    def train(optimizer: torch.optim.Optimizer, span: range) -> list[float]:
        found = []
        for t in span:
            optimizer.zero_grad()
            value = loss(10_000 * seed + t)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    theirs = torch.optim.AdamW(params)
    train(theirs, range(before))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(theirs.state_dict())
    result = {}
    for name, switch in ARMS.items():
        model.load_state_dict(weights)
        result[name] = train(switch(params, copy.deepcopy(saved)), range(before, before + after))
    return result


def show_losses() -> None:
    """Print the loss after the switch less that of AdamW, which goes on: mean and standard deviation over seeds."""
    print("| model | how | steps 1–20 | steps 81–100 |\n|---|---|---|---|")
    for model, make in MODELS.items():
        runs = [losses(make, seed) for seed in SEEDS]
        for name in ARMS:
            cells = []
            for span in (slice(0, 20), slice(80, 100)):
                less = 0.0 if name == REFERENCE else 1.0
                found = [mean(run[name][span]) - less * mean(run[REFERENCE][span]) for run in runs]
                cells.append(f"{mean(found):{'+' if less else ''}.3f} ± {stdev(found):.3f}")
            print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", adafactor.MigrationWarning)
    if sys.argv[1:] == ["losses"]:
        show_losses()
    else:
        show_deviations(sys.argv[1])
