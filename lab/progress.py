"""A run's progress: a bar, and a file that the process which started the run reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Display

from lab.files import write_text
from lab.presets import Job
from lab.train import Progress, run_folder


class Shown:
    """Shows a run's progress in a file and, if asked for, as a bar."""

    def __init__(self, job: Job, cache: Path, bar: bool) -> None:
        """Prepare what is asked for."""
        self.job, self.folder = job, run_folder(job, cache)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self.display = Display(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not bar)
        self.task = self.display.add_task(job.name, total=job.scale.steps + job.scale.branch, note="")
        self.written = 0.0

    def __enter__(self) -> None:
        """Start the bar."""
        self.display.start()

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.display.stop()

    def __call__(self, progress: Progress) -> None:
        """After every step."""
        steps, speed = self.job.scale.steps + self.job.scale.branch, progress.tokens / max(progress.seconds, 1e-9)
        note = f"loss {progress.smooth_loss():.3f}  {speed:,.0f} tokens/s"
        self.display.update(self.task, completed=progress.step, note=note)
        if time.monotonic() - self.written > 1 or progress.step == steps:
            self.written = time.monotonic()
            now = {"step": progress.step, "steps": steps, "loss": progress.smooth_loss(), "tokens_per_second": speed}
            write_text(self.folder / "progress.json", json.dumps(now))
