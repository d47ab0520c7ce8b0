"""Run jobs in processes of one thread each, two at a time, with one progress display for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lab.presets import Job
from lab.train import read_record, run_folder

PROCESSES = 2
RECORDS = Path(__file__).parent / "records"


@dataclass
class Running:
    """A child process at work on a job."""

    job: Job
    process: subprocess.Popen[bytes]
    task: TaskID
    log: Path


def record_path(job: Job, records: Path) -> Path:
    """Where a job's record is kept for good."""
    return records / job.scale.name / f"{job.name}.json"


def find_record(job: Job, records: Path, cache: Path) -> dict[str, Any] | None:
    """A job's record among the kept ones or in the cache."""
    kept = read_record(record_path(job, records), job)
    return kept or read_record(run_folder(job, cache) / "record.json", job)


def run_missing(jobs: list[Job], records: Path, cache: Path, processes: int = PROCESSES) -> list[str]:
    """Run the jobs that have no record yet; returns the names of those that failed.

    Stopped by Ctrl-C or killed, it continues where it was when started again. While the file that
    `$ADAFACTOR_LAB_PAUSE` names exists, the runs stand still, so that something else can be measured.
    """
    missing = [job for job in jobs if read_record(record_path(job, records), job) is None]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them already recorded.", flush=True)
    failed: list[str] = []
    columns = (TextColumn("{task.description:<26}"), BarColumn(30), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as display:
        whole = display.add_task("all", total=max(1, len(missing)), note="", visible=len(missing) > processes)
        running: list[Running] = []
        paused = False
        try:
            while missing or running:
                if paused != _pause_wanted():
                    paused = not paused
                    for child in running:
                        child.process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)
                while missing and len(running) < processes and not paused:
                    running.append(_start(missing.pop(0), records, cache, display))
                time.sleep(0.5)
                for child in list(running):
                    _show(child, cache, display)
                    if child.process.poll() is not None:
                        running.remove(child)
                        display.remove_task(child.task)
                        display.advance(whole)
                        failed += _report_end(child, records, display)
        finally:
            for child in running:
                child.process.terminate()
                child.process.send_signal(signal.SIGCONT)  # one that stands still does not hear
    return failed


def _pause_wanted() -> bool:
    path = os.environ.get("ADAFACTOR_LAB_PAUSE")
    return bool(path) and Path(str(path)).exists()


def _start(job: Job, records: Path, cache: Path, display: Progress) -> Running:
    folder = run_folder(job, cache)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("ab") as stream:
        process = subprocess.Popen(command(job, records, cache), stdout=stream, stderr=stream)
    return Running(job, process, display.add_task(job.name, total=job.scale.steps, note="starting"), log)


def command(job: Job, records: Path, cache: Path) -> list[str]:
    """The command line that runs a job in a process of its own."""
    words = [sys.executable, "-m", "lab", "run", job.row, "--scale", job.scale.name, "--quiet"]
    words += ["--warmup" if job.warmup else "--no-warmup", "--seed", str(job.seed)]
    words += ["--corpus", job.corpus, "--cache", str(cache), "--records", str(records)]
    words += ["--multiplier", repr(job.effective_multiplier)]
    return words + ([] if job.scale.shape.tied else ["--embedding", job.scale.shape.embedding])


def _show(child: Running, cache: Path, display: Progress) -> None:
    path = run_folder(child.job, cache) / "progress.json"
    if path.exists():
        now = json.loads(path.read_text())
        note = f"loss {now['loss']:.3f}  {now['tokens_per_second']:,.0f} tokens/s"
        display.update(child.task, completed=now["step"], note=note if now["step"] < now["steps"] else "translating")


def _report_end(child: Running, records: Path, display: Progress) -> list[str]:
    record = read_record(record_path(child.job, records), child.job)
    if child.process.returncode != 0 or record is None:
        tail = child.log.read_text(errors="replace").strip().splitlines()[-1:]
        display.console.print(f"{child.job.name} failed: {' '.join(tail)}", highlight=False)
        return [child.job.name]
    display.console.print(summary(record), highlight=False)
    return []


def summary(record: dict[str, Any]) -> str:
    """One line on a finished run."""
    if record["diverged"]:
        return f"{record['name']:<26} diverged at step {record['steps']}"
    scores = "  ".join(f"{part} BLEU {value['all']:.1f}" for part, value in record["bleu"].items())
    seconds = record["train_seconds"] + record["evaluate_seconds"]
    return f"{record['name']:<26} loss {record['dev_loss']:.3f}  {scores}  {seconds:.0f} s"
