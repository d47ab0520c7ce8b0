"""Lightning's `Trainer` with a scheduler: a fresh module goes on from `ckpt_path` with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor, schedules
from tests.integrations.exact import assert_float32_statistics, assert_same, copy_of

L = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.slow,
    # Lightning's own business with this torch, and its advice for larger data
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

BATCHES = 3  # per epoch


def module(seed: int) -> Any:
    """A small classifier; its class is made here because Lightning may be missing where it is imported."""

    class Classifier(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = Adafactor(self.named_parameters(), lr=1.0, lr_decay=None, beta1=0.9)
            scheduler = schedules.warmup(optimizer, slope=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    torch.manual_seed(seed)
    return Classifier()


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * BATCHES, 6, generator=generator)
    y = torch.randint(3, (4 * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(epochs: int, precision: str) -> Any:
    return L.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=epochs,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_resumed_run_ends_on_the_same_bits(precision: str, tmp_path: Path) -> None:
    whole, first, resumed = trainer(2, precision), trainer(1, precision), trainer(2, precision)
    whole.fit(module(0), batches())
    first.fit(module(0), batches())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed.fit(module(1), batches(), ckpt_path=tmp_path / "first.ckpt", weights_only=True)

    assert (first.global_step, resumed.global_step) == (BATCHES, 2 * BATCHES)
    assert_same(copy_of(resumed.lightning_module), copy_of(whole.lightning_module))
    (optimizer,), (expected,) = resumed.optimizers, whole.optimizers
    assert_same(optimizer.state_dict(), expected.state_dict())
    assert_float32_statistics(optimizer.state_dict(), 2 * BATCHES)
