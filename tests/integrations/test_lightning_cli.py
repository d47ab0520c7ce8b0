"""LightningCLI finds the optimizer by its class path, and reads its arguments from a command line or a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor, hf

L = pytest.importorskip("lightning")
cli = pytest.importorskip("lightning.pytorch.cli")
pytest.importorskip("jsonargparse")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's, of this jsonargparse
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

CONFIG = """
optimizer:
  class_path: adafactor.Adafactor
  init_args:
    lr: 1e-3
    relative: false
    lr_decay: null
    eps: [1e-30, 1e-3]
    beta1: 0.9
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


class Module(L.LightningModule):  # type: ignore[misc, name-defined]
    """A line through random points."""

    def __init__(self) -> None:
        """Make it small."""
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        """Three batches."""
        return DataLoader(TensorDataset(torch.randn(12, 6)), batch_size=4)


def fitted(*words: str, kind: type[Adafactor] = Adafactor) -> Any:
    """The only optimizer of a run with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", "fit", *words])
        run = cli.LightningCLI(Module, save_config_callback=None, seed_everything_default=0)
    (optimizer,) = run.trainer.optimizers
    assert type(optimizer) is kind
    assert {record.steps for record in optimizer.report()} == {3}
    return optimizer


def test_a_yaml_file_names_the_class(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    group = fitted("--config", str(tmp_path / "config.yaml")).param_groups[0]
    assert (group["lr"], group["relative"], group["lr_decay"], group["beta1"]) == (1e-3, False, None, 0.9)
    assert tuple(group["eps"]) == (1e-30, 1e-3)


def test_a_command_line_names_the_class(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer:" + CONFIG.split("trainer:")[1])
    words = ["--optimizer=adafactor.Adafactor", "--optimizer.lr=1e-3", "--optimizer.relative=false"]
    group = fitted("--config", str(tmp_path / "config.yaml"), *words).param_groups[0]
    assert (group["lr"], group["relative"], group["lr_decay"]) == (1e-3, False, "rsqrt")


def test_a_command_line_gives_transformers_words_and_ours(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer:" + CONFIG.split("trainer:")[1])
    theirs = ["--optimizer.lr=1e-3", "--optimizer.relative_step=false", "--optimizer.scale_parameter=false"]
    words = ["--optimizer=adafactor.hf.Adafactor", *theirs, "--optimizer.rounding=stochastic"]
    group = fitted("--config", str(tmp_path / "config.yaml"), *words, kind=hf.Adafactor).param_groups[0]
    assert (group["lr"], group["relative"], group["rounding"]) == (1e-3, False, "stochastic")
