"""Run jobs in processes of one thread each, two at a time, with one progress display for all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lab import records
from lab.presets import Job
from lab.results import Record
from lab.train import run_folder

SLOTS: tuple[tuple[str, ...], ...] = ((), ())  # for each process that may run at a time, its own options


@dataclass
class Running:
    """A child process at work on a job."""

    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    task: TaskID
    log: Path


def run_missing(
    jobs: list[Job],
    folder: Path,
    cache: Path,
    fingerprint: str | None = None,
    slots: Sequence[Sequence[str]] = SLOTS,
) -> list[str]:
    """Run the jobs that have no record yet, of the text with this fingerprint; returns the names of those that failed.

    As many run at a time as there are `slots`, each of which has options of its own, such as the device.

    Stopped by Ctrl-C or killed, it continues where it was when started again.
    """
    recorded = records.read(folder)
    missing = [job for job in jobs if records.find(job, recorded, fingerprint) is None]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them already recorded.", flush=True)
    failed: list[str] = []
    columns = (TextColumn("{task.description:<26}"), BarColumn(30), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as display:
        whole = display.add_task("all", total=max(1, len(missing)), note="", visible=len(missing) > len(slots))
        running: list[Running] = []
        try:
            while missing or running:
                while missing and len(running) < len(slots):
                    slot = next(i for i in range(len(slots)) if all(child.slot != i for child in running))
                    words = [*command(missing[0], folder, cache), *slots[slot]]
                    running.append(_start(missing.pop(0), slot, words, cache, display))
                time.sleep(0.5)
                for child in list(running):
                    _show(child, cache, display)
                    if child.process.poll() is not None:
                        running.remove(child)
                        display.remove_task(child.task)
                        display.advance(whole)
                        failed += _report_end(child, folder, display)
        finally:
            for child in running:
                child.process.terminate()
    return failed


def _start(job: Job, slot: int, words: list[str], cache: Path, display: Progress) -> Running:
    log = run_folder(job, cache) / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream)
    return Running(job, slot, process, display.add_task(job.name, total=job.scale.steps, note="starting"), log)


def command(job: Job, folder: Path, cache: Path) -> list[str]:
    """The command line that runs a job in a process of its own."""
    words = [sys.executable, "-m", "lab", "run", job.row, "--scale", job.scale.name, "--quiet"]
    words += ["--warmup" if job.warmup else "--no-warmup", "--seed", str(job.seed)]
    words += ["--corpus", job.corpus, "--cache", str(cache), "--records", str(folder)]
    words += ["--multiplier", repr(job.effective_multiplier)] + ["--bfloat16"] * job.scale.autocast
    return words + ([] if job.scale.shape.tied else ["--embedding", job.scale.shape.embedding])


def _show(child: Running, cache: Path, display: Progress) -> None:
    path = run_folder(child.job, cache) / "progress.json"
    if path.exists():
        now = json.loads(path.read_text())
        note = f"loss {now['loss']:.3f}  {now['tokens_per_second']:,.0f} tokens/s"
        display.update(child.task, completed=now["step"], note=note if now["step"] < now["steps"] else "translating")


def _report_end(child: Running, folder: Path, display: Progress) -> list[str]:
    record = records.find(child.job, records.read(folder, child.job.scale.name))
    if child.process.returncode != 0 or record is None:
        tail = child.log.read_text(errors="replace").strip().splitlines()[-1:]
        display.console.print(f"{child.job.name} failed: {' '.join(tail)}", highlight=False)
        return [child.job.name]
    display.console.print(summary(record), highlight=False)
    return []


def summary(record: Record) -> str:
    """One line on a finished run: its weights after the decay, where it has one, else the last."""
    if record["diverged"]:
        return f"{record['name']:<26} diverged at step {record['steps']}"
    found = record.get("ways", {}).get("decayed", record)
    scores = "  ".join(f"{part} BLEU {value['all']:.1f}" for part, value in found["bleu"].items())
    seconds = record["train_seconds"] + record["evaluate_seconds"]
    return f"{record['name']:<26} dev loss {found['dev_loss']:.3f}  {scores}  {seconds:.0f} s"
