"""Train a small convolutional network from scratch with Lightning and Adafactor.

    python examples/lightning_module.py

It learns to tell drawn circles, squares and crosses apart. Training from scratch takes the paper's own settings
(Algorithm 6): no learning rate and no warm-up to choose. A 3×3 kernel's filters are factored over their two largest
axes, the channels.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor

SIDE, CLASSES = 16, 3  # pixels; circle, square, cross


class Classifier(LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, CLASSES),
        )
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch of (B, 1, 16, 16) pictures."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Adafactor:
        """Names make `report()` readable; a scheduler, if any, is returned with the optimizer as usual."""
        return Adafactor(self.named_parameters())

    def on_train_epoch_end(self) -> None:
        """Print the loss, and the parameter whose second-moment estimate is the most out of date (§5)."""
        loss = torch.stack(self.losses).mean()
        self.losses.clear()
        (optimizer,) = self.trainer.optimizers
        assert isinstance(optimizer, Adafactor)
        worst = max(optimizer.report(), key=lambda record: record.rms_update)
        print(
            f"epoch {self.current_epoch:2d}  loss {loss:.4f}  "
            f"largest RMS(U) {worst.rms_update:.2f} ({worst.name}, clipped in {worst.clip_rate:.0%} of the steps)"
        )


def pictures(count: int) -> TensorDataset:
    """Shapes of random size and place with some noise."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    labels, radius = torch.randint(CLASSES, (count,)), torch.randint(3, 6, (count, 1, 1))
    y, x = (torch.randint(6, SIDE - 6, (count, 1, 1)) for _ in range(2))
    down, across = (rows - y).abs(), (columns - x).abs()
    circle = (down**2 + across**2).sqrt() <= radius
    square = torch.maximum(down, across) <= radius
    cross = (torch.minimum(down, across) == 0) & (torch.maximum(down, across) <= radius)
    shapes = torch.stack([circle, square, cross], dim=1)[torch.arange(count), labels]  # (B, 16, 16)
    return TensorDataset((shapes + 0.3 * torch.randn(shapes.shape)).unsqueeze(1), labels)


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--precision", default="32-true", help='Lightning\'s: "bf16-true" keeps float32 statistics')
    arguments = parser.parse_args()

    seed_everything(0)
    trainer = Trainer(
        max_epochs=arguments.epochs,
        precision=arguments.precision,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(pictures(1024), batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
