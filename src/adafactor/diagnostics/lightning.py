"""The diagnostics as a callback of Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adafactor.diagnostics.loggers import to_callback
from adafactor.diagnostics.watch import Sink, Watch, check_every, check_sinks

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # under its older name
    from pytorch_lightning.callbacks import Callback


class ReportCallback(Callback):
    """Takes a report after every so many steps of a `Trainer`, and a last one at the end. Of several processes, one.

    Args:
        sinks: functions of a `Report`; without any, the figures go to the trainer's own loggers.
        every: optimizer steps from report to report.
        optimizer: which of the module's optimizers, if it has several.

    Example:
        >>> trainer = Trainer(..., callbacks=[ReportCallback(every=50)])
    """

    def __init__(self, *sinks: Sink, every: int = 100, optimizer: int = 0) -> None:
        """Check the arguments here, and not after the model is loaded."""
        self.sinks, self.every, self.optimizer = check_sinks(sinks) if sinks else (), check_every(every), optimizer
        self._watch: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin; the module's optimizers are there by now."""
        self.on_train_end(trainer, pl_module)
        if not 0 <= self.optimizer < len(trainer.optimizers):
            raise ValueError(
                f"optimizer={self.optimizer} must be below {len(trainer.optimizers)}, the optimizers' number"
            )
        if trainer.is_global_zero:
            sinks = self.sinks or tuple(to_callback(logger.log_metrics) for logger in trainer.loggers)
            self._watch = Watch(trainer.optimizers[self.optimizer], *sinks, every=self.every, model=pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss of the batch."""
        if self._watch is not None and isinstance(outputs, Mapping) and "loss" in outputs:
            self._watch.add_loss(outputs["loss"])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the last report."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the last report: now it is wanted."""
        self.on_train_end(trainer, pl_module)
