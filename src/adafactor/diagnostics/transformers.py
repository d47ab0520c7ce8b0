"""The diagnostics as a callback of transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from adafactor.diagnostics.watch import Sink, Watch, check_every, check_sinks


class ReportCallback(TrainerCallback):
    """Takes a report after every so many steps of a `Trainer`, and a last one at the end. Of several processes, one.

    Args:
        sinks: functions of a `Report`, such as `reports.append` or `to_callback(wandb.log)`.
        every: optimizer steps from report to report.

    Example:
        >>> trainer = Trainer(..., callbacks=[ReportCallback(reports.append, to_callback(wandb.log), every=50)])
    """

    def __init__(self, *sinks: Sink, every: int = 100) -> None:
        """Check the arguments here, and not after the model is loaded."""
        self.sinks, self.every = check_sinks(sinks), check_every(every)
        self._watch: Watch | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Begin; the `Trainer` has made or wrapped its optimizer by now."""
        self.on_train_end(args, state, control)
        if state.is_world_process_zero:
            self._watch = Watch(optimizer, *self.sinks, every=self.every, model=model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the loss that the `Trainer` logs."""
        if self._watch is not None and "loss" in (logs or {}):
            self._watch.add_loss(float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the last report."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
