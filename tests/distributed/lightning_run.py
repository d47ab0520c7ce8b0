"""Lightning with FSDP2: `… lightning_run STEPS SAVE LOAD WAY`, under torchrun, prints losses.

WAY is to step "after" backward or "inside" it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

warnings.simplefilter("ignore")

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from adafactor import Adafactor, step_in_backward  # noqa: E402


class Module(L.LightningModule):  # type: ignore[misc]
    """Two layers, and a batch of its own for every step."""

    def __init__(self, way: str) -> None:
        """The same weights on every rank."""
        super().__init__()
        self.way = way
        torch.manual_seed(0)
        self.net, self.losses = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)), list[float]()

    def configure_model(self) -> None:
        """Shard, as Lightning wants it."""
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """The batch of this step, whatever the loader gives after a resumption."""
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.trainer.global_step))
        loss: Tensor = self.net(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Adafactor:
        """With momentum, which is state as large as the weights."""
        optimizer = Adafactor(self.net.named_parameters(), beta1=0.9)
        if self.way == "inside":
            step_in_backward(self.net, optimizer)
        return optimizer

    def on_before_optimizer_step(self, optimizer: Adafactor) -> None:
        """Look whether gradients are there."""
        assert [p.grad is not None for p in self.net.parameters()] == [self.way == "after"] * 4


def main() -> None:
    """Train up to some step, from a checkpoint if one is given."""
    steps, save, load, way = sys.argv[1:]
    module = Module(way)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(process_group_backend="gloo"),
        max_steps=int(steps),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(64, 1))), ckpt_path=None if load == "-" else load)
    if save != "-":
        trainer.save_checkpoint(save)
    if trainer.is_global_zero:
        print("RESULT", json.dumps(module.losses), flush=True)


if __name__ == "__main__":
    main()
