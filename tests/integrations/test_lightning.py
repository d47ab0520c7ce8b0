"""Lightning: a fresh module goes on from `ckpt_path` with the same bits, a callback watches, LightningCLI finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adafactor import Adafactor, hf, schedules, step_in_backward
from adafactor.diagnostics import Report
from tests.exact import assert_float32_statistics, assert_same, copy_of

L = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.slow,
    # Lightning's own business with this torch and this jsonargparse, and its advice for larger data
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

BATCHES = 6  # per epoch
QUIET = {"accelerator": "cpu", "enable_checkpointing": False, "logger": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


class Classifier(L.LightningModule):  # type: ignore[misc, name-defined]
    """A small classifier with a warm-up."""

    def __init__(self, seed: int = 0, broken_at: int | None = None, inside: bool = False) -> None:
        """The same weights for the same seed."""
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.broken_at, self.inside = broken_at, inside

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        if number == self.broken_at:
            raise ZeroDivisionError
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        """The same batches in every run."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4 * BATCHES, 6, generator=generator)
        y = torch.randint(3, (4 * BATCHES,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=4)

    def configure_optimizers(self) -> dict[str, Any]:
        """Ours; LightningCLI puts its own here."""
        optimizer = Adafactor(self.named_parameters(), lr=1.0, lr_decay=None, beta1=0.9)
        if self.inside:
            step_in_backward(self, optimizer)
        scheduler = schedules.warmup(optimizer, slope=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(epochs: int = 1, **given: Any) -> Any:
    return L.Trainer(**{**QUIET, "max_epochs": epochs, **given})


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_resumed_run_ends_on_the_same_bits(precision: str, tmp_path: Path) -> None:
    whole, first, resumed = (trainer(epochs, precision=precision) for epochs in (2, 1, 2))
    whole.fit(Classifier())
    first.fit(Classifier())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed.fit(Classifier(1), ckpt_path=tmp_path / "first.ckpt", weights_only=True)
    assert (first.global_step, resumed.global_step) == (BATCHES, 2 * BATCHES)
    assert_same(copy_of(resumed.lightning_module), copy_of(whole.lightning_module))
    (optimizer,), (expected,) = resumed.optimizers, whole.optimizers
    assert_same(optimizer.state_dict(), expected.state_dict())
    assert_float32_statistics(optimizer.state_dict(), 2 * BATCHES)


def test_the_step_moves_into_backward_on_the_same_bits() -> None:
    ordinary, inside = Classifier(), Classifier(inside=True)
    for module in (ordinary, inside):
        trainer().fit(module)
        assert (module.net[0].weight.grad is None) == module.inside
    assert_same(copy_of(inside), copy_of(ordinary))


def test_a_run_is_watched_step_by_step_and_a_last_time_when_it_fails(tmp_path: Path) -> None:
    from adafactor.diagnostics.lightning import ReportCallback

    history: list[Report] = []
    trainer(callbacks=[ReportCallback(history.append, every=2)], accumulate_grad_batches=2).fit(Classifier())
    assert [(report.step, report[0].steps) for report in history] == [(2, 2), (3, 1)], "steps, not micro-batches"
    assert [record.name for record in history[0]][:2] == ["net.0.weight", "net.0.bias"]
    history.clear()
    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[ReportCallback(history.append, every=100)]).fit(Classifier(broken_at=4))
    assert [report.step for report in history] == [4]
    with pytest.raises(ValueError, match="optimizer=1"):
        trainer(callbacks=[ReportCallback(history.append, optimizer=1)]).fit(Classifier())


def test_without_sinks_the_figures_go_to_lightnings_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from adafactor.diagnostics.lightning import ReportCallback

    logger = CSVLogger(tmp_path, name="", version="")
    trainer(callbacks=[ReportCallback(every=3)], logger=logger, log_every_n_steps=1).fit(Classifier())
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "rms_update/net.0.weight" in lines[0] and len(lines) == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Adafactor, {"lr": "1e-3", "relative": "false", "lr_decay": "null", "eps": "[1e-30, 1e-3]", "beta1": "0.9"}),
        (hf.Adafactor, {"lr": "1e-3", "relative_step": "false", "scale_parameter": "false", "rounding": "stochastic"}),
    ],
)
def test_lightning_cli_finds_the_class_by_its_path(
    kind: type[Adafactor], words: dict[str, str], tmp_path: Path
) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    pytest.importorskip("jsonargparse")
    path = f"{kind.__module__.removesuffix('.optimizer')}.Adafactor"
    settings = {f"trainer.{name}": str(value).lower() for name, value in {**QUIET, "max_epochs": 1}.items()}
    settings |= {"optimizer": path, **{f"optimizer.{name}": value for name, value in words.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", "fit", *(f"--{name}={value}" for name, value in settings.items())])
        patch.delattr(Classifier, "configure_optimizers")
        run = cli.LightningCLI(Classifier, save_config_callback=None, seed_everything_default=0)
    optimizer: Any = run.trainer.optimizers[0]
    assert type(optimizer) is kind
    assert {record.steps for record in optimizer.report()} == {BATCHES}
    group = optimizer.param_groups[0]
    assert (group["lr"], group["relative"], group["lr_decay"]) == (1e-3, False, None)
    assert group.get("rounding") == words.get("rounding", "nearest") and tuple(group["eps"]) == (1e-30, 1e-3)
