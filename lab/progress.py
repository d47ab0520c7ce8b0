"""A run's progress: a bar, a file that others read, TensorBoard; and all runs that are at work, as a live table."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Display
from rich.table import Table

from lab.files import write_text
from lab.presets import Job
from lab.train import Progress, run_folder, thin

BLOCKS = "▁▂▃▄▅▆▇█"
LONG = 1000  # steps of a run whose time is told in advance
STALE = 120.0  # seconds without a word after which a run is not at work


class Shown:
    """Shows a run's progress as a bar, in a file for other processes, and in TensorBoard, as asked for."""

    def __init__(self, job: Job, cache: Path, bar: bool, tensorboard: bool) -> None:
        """Prepare what is asked for."""
        self.job, self.folder = job, run_folder(job, cache)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self.display = Display(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not bar)
        self.task = self.display.add_task(job.name, total=job.scale.steps + job.scale.branch, note="")
        self.written = 0.0
        self.first: tuple[int, float] | None = None  # the step and the seconds from which the speed is taken
        self.writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an option, so not needed to start

            self.writer = SummaryWriter(str(self.folder / "tensorboard"))

    def __enter__(self) -> None:
        """Start the bar."""
        self.display.start()

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.display.stop()
        if self.writer:
            self.writer.close()

    def __call__(self, progress: Progress) -> None:
        """After every step."""
        steps, speed = self.job.scale.steps + self.job.scale.branch, progress.tokens / max(progress.seconds, 1e-9)
        note = f"loss {progress.smooth_loss():.3f}  {speed:,.0f} tokens/s"
        self.display.update(self.task, completed=progress.step, note=note)
        self._expect(progress, steps)
        if self.writer:
            self.writer.add_scalar("loss", progress.losses[-1], progress.step)
            if progress.rms_updates and math.isfinite(progress.rms_updates[-1]):
                self.writer.add_scalar("rms_update", progress.rms_updates[-1], progress.step)
        if time.monotonic() - self.written > 1 or progress.step == steps:
            self.written = time.monotonic()
            now = {"step": progress.step, "steps": steps, "loss": progress.smooth_loss(), "tokens_per_second": speed,
                   "seconds": progress.seconds, "curve": [loss for _, loss in thin(progress.losses)]}  # fmt: skip
            write_text(self.folder / "progress.json", json.dumps(now))

    def _expect(self, progress: Progress, steps: int) -> None:
        """After a hundred steps say how long a long run will take; the first ten, which warm up, do not count."""
        start, seconds = self.first or (progress.step, 0.0)
        if progress.step < start + 10:
            self.first = (start, progress.seconds)
        if progress.step == start + 99 and steps >= LONG:
            speed = (progress.seconds - seconds) / 90
            hours = speed * (steps - progress.step) / 3600
            self.display.console.print(
                f"{speed:.3g} s a step: {hours:,.1f} hours for the {steps - progress.step:,} to go"
            )


def at_work(cache: Path) -> list[tuple[str, dict[str, Any]]]:
    """The runs that said something a short time ago and have no record yet."""
    found = []
    for path in sorted((cache / "runs").glob("*/progress.json")):
        if time.time() - path.stat().st_mtime < STALE and not (path.parent / "record.json").exists():
            found.append((path.parent.name, json.loads(path.read_text())))
    return found


def spark(values: list[float], width: int = 40) -> str:
    """A curve as a line of blocks; what is above three times the last drop counts as the top."""
    if not values:
        return ""
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else values
    low, high = min(picked), max(picked[len(picked) // 20 :])
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((min(v, high) - low) / span * len(BLOCKS)))] for v in picked)


def table(cache: Path) -> Table:
    """The runs at work."""
    shown = Table("run", "step", "loss", "tokens/s", "left", "loss so far", box=None, title="Runs at work")
    for name, now in at_work(cache):
        left = (now["steps"] - now["step"]) * now.get("seconds", 0.0) / max(1, now["step"])
        step = f"{now['step']:,} of {now['steps']:,}" if now["step"] < now["steps"] else "translating"
        speed, curve = f"{now['tokens_per_second']:,.0f}", spark(now.get("curve", []))
        shown.add_row(name, step, f"{now['loss']:.3f}", speed, f"{left / 60:.0f} min", curve)
    if not shown.rows:
        shown.add_row("none", "", "", "", "", "")
    return shown


def watch(cache: Path, once: bool = False) -> None:
    """Show the runs at work until Ctrl-C; where there is no terminal, or asked for `once`, print them and end."""
    console = Console()
    if once or not console.is_terminal:
        console.print(table(cache))
        return
    with Live(table(cache), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(table(cache), refresh=True)
