"""From the command line to the tables."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import machine, results, suites, tables
from benchmarks.contenders import CONTENDERS, DTYPES, find, why_not
from benchmarks.correctness import check
from benchmarks.machine import Card, Machine
from benchmarks.measure import Entry, Tick, extra_bytes, extra_bytes_on, measure, that_fit, ticks
from benchmarks.results import Measured, Results
from benchmarks.suites import Suite

MOST_THREADS = 1024  # OpenMP crashes the process where it cannot start as many as it was told
COST = ("sgd", "adamw-fused", "cpu", "triton", "eager")  # ours, the yardstick, and the least that an optimizer can do


@dataclass(frozen=True)
class Run:
    """How to measure, and whom to tell: `start` begins a part of so many ticks."""

    rounds: int
    threads: int
    memory: bool
    machine: Machine
    start: Callable[[str, int], None]
    tick: Tick


def main(words: Sequence[str] | None = None) -> int:
    """Check, measure, show; the status is 0 also when a target is missed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Benchmark a step against every optimizer here."
    )
    add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        return run(arguments)
    except (ValueError, OSError, ImportError) as mistake:
        print(f"{parser.prog}: {mistake}", file=sys.stderr)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("--suite", nargs="+", metavar="NAME", help=f"all, or some of {', '.join(suites.SUITES)} (default: all)")
    add("--model", metavar="MODULE:FUNCTION", help="time the shapes of the torch.nn.Module that this function returns")
    add("--contender", nargs="+", metavar="NAME", help="only these optimizers; module:Class is your own")
    add("--device", default="cpu", help="where the tensors are: cuda, cuda:1, xpu (default: cpu)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of every contender (default: float32, and bfloat16 for ours and fused AdamW)",
    )
    add("--rounds", type=int, default=15, help="how often each contender is timed (default: %(default)s)")
    add("--threads", type=int, help="threads for each contender (default: all cores)")
    add("--cost", nargs="*", metavar="SIZE", help="also time models of 1M to 1B parameters, or of these sizes")
    add("--no-memory", action="store_true", help="do not measure extra memory, which takes a process per contender")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        help="folder for results.json, tables.md and plots (default: %(default)s)",
    )
    add(
        "--render", type=Path, metavar="FILE", help="measure nothing; print the tables of this results.json as Markdown"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for."""
    if arguments.render is not None:
        print(tables.markdown(results.load(arguments.render)), end="")
        return 0
    measured = bench(arguments)
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    measured.save(folder / "results.json")
    (folder / "tables.md").write_text(tables.markdown(measured), encoding="utf-8")
    files = [folder / "results.json", folder / "tables.md", *tables.plot(measured, folder)]
    tables.show(measured)
    print(f"Written: {', '.join(map(str, files))}")
    return 0


def bench(arguments: argparse.Namespace) -> Results:
    """Measure everything that was asked for."""
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    threads = machine.cores() if arguments.threads is None else arguments.threads
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"--threads {threads} must be from 1 to {MOST_THREADS}")
    here = machine.find(arguments.device)
    chosen = _suites(arguments)
    _require("numpy", "rich")
    stacks = [] if arguments.cost is None else [suites.stack(name) for name in arguments.cost or suites.SIZES]
    entries = _entries(arguments, here.device.type)
    torch.set_num_threads(threads)
    os.environ["NPROC"] = str(threads)  # for XLA, which reads it when JAX is imported
    record = Results(_command(arguments), here.describe(), {}, threads, arguments.rounds, device=str(here.device))
    record.load_before = machine.load_average()
    with _progress() as (start, tick):
        course = Run(arguments.rounds, threads, not arguments.no_memory, here, start, tick)
        start("checking the updates", len(entries))
        entries = _checked(entries, record, tick, here.device)
        record.versions = machine.versions({name for e in entries for name in e.contender.packages})
        for suite in chosen:
            record.suites.append(_measured(suite, entries, course))
        for suite in stacks:
            some = [e for e in entries if e.contender.key in COST and e.dtype == entries[0].dtype]
            record.cost.append(_measured(suite, that_fit(suite, some, here), course))
    record.load_after = machine.load_average()
    return record


def _suites(arguments: argparse.Namespace) -> list[Suite]:
    """Those asked for; all when nothing is, since `--cost` or `--model` alone mean nothing else."""
    own = [suites.of_model(arguments.model)] if arguments.model else []
    if arguments.suite is None:
        alone = own or arguments.cost is not None
        return own if alone else [suites.find(name) for name in suites.DEFAULT]
    names = suites.DEFAULT if arguments.suite == ["all"] else arguments.suite
    return [suites.find(name) for name in names] + own


def _entries(arguments: argparse.Namespace, device: str) -> list[Entry]:
    """Those asked for, each in its dtypes or in the one asked for; all float32 first."""
    found = [find(name) for name in arguments.contender or CONTENDERS]
    if others := [c.key for c in found if device not in c.devices and arguments.contender]:
        raise ValueError(f"{', '.join(others)} cannot step tensors on {device}")
    found = [c for c in found if device in c.devices]
    pairs = [Entry(c, dtype) for dtype in DTYPES for c in found]
    if arguments.dtype is None:
        return [e for e in pairs if e.dtype in e.contender.dtypes]
    # stochastic rounding is for 16 bits alone
    return [e for e in pairs if e.dtype == arguments.dtype and {e.dtype, "float32"} & set(e.contender.dtypes)]


def _checked(entries: list[Entry], record: Results, tick: Tick, device: torch.device) -> list[Entry]:
    """Those that can run here, with what the check found in the record."""
    runnable = []
    for entry in entries:
        tick(f"checking {entry.label}")
        if reason := why_not(entry.contender, entry.dtype, device):
            record.missing[entry.label] = reason
            continue
        if entry.contender.role != "floor":
            record.checks.append(check(entry.contender, entry.dtype, device))
        runnable.append(entry)
    if not runnable:
        reasons = "; ".join(f"{name}: {why}" for name, why in record.missing.items())
        raise ValueError(f"none of the contenders can run here ({reasons})")
    return runnable


def _measured(suite: Suite, entries: list[Entry], run: Run) -> Measured:
    """Times of one suite, and then memory, when the times' memory is free again."""
    run.start(suite.name, ticks(entries, run.rounds) + (len(entries) if run.memory else 0))
    measured = measure(suite, entries, run.rounds, run.tick, run.machine)
    if run.memory:
        for entry, timing in zip(entries, measured.timings, strict=True):
            run.tick(f"{suite.name}: memory of {entry.label}")
            if entry.contender.role == "floor":
                continue
            if isinstance(run.machine, Card):
                timing.extra_bytes = extra_bytes_on(run.machine, entry.contender, suite.shapes, entry.dtype)
            else:
                timing.extra_bytes = extra_bytes(entry.contender.key, suite.shapes, entry.dtype, run.threads)
    return measured


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int], None], Tick]]:
    """Show on stderr how far it is: a bar on a terminal, elsewhere a line for each contender and each round.

    It moves between turns, never while one is timed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, total: None, lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("")

        def start(text: str, total: int) -> None:
            bar.reset(task, total=total, description=text)
            bar.refresh()

        def tick(text: str) -> None:
            bar.update(task, advance=1, description=text, refresh=True)

        yield start, tick


def _require(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ImportError(f"{', '.join(missing)} is missing: pip install {' '.join(missing)}")


def _command(arguments: argparse.Namespace) -> str:
    """The command again, without where its output went."""
    words = ["python", "-m", "benchmarks"]
    for name in ("suite", "model", "contender", "dtype", "rounds", "threads", "cost"):
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    words += ["--device", arguments.device] if arguments.device != "cpu" else []
    return shlex.join(words + (["--no-memory"] if arguments.no_memory else []))


if __name__ == "__main__":
    sys.exit(main())
