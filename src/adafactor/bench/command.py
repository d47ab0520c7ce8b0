"""`adafactor bench`: from the command line to the tables."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adafactor.bench import suites
from adafactor.bench.suites import Suite

if TYPE_CHECKING:
    import torch

    from adafactor.bench.measure import Entry, Tick
    from adafactor.bench.place import Place
    from adafactor.bench.results import Measured, Results

MOST_THREADS = 1024  # OpenMP crashes the process where it cannot start as many as it was told


@dataclass(frozen=True)
class Run:
    """How to measure, and whom to tell: `start` begins a part of so many ticks."""

    rounds: int
    threads: int
    memory: bool
    place: Place
    start: Callable[[str, int], None]
    tick: Callable[[str], None]


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
        default=Path("adafactor-bench"),
        help="folder for results.json, plots and a page (default: %(default)s)",
    )
    add(
        "--render", type=Path, metavar="FILE", help="measure nothing; print the tables of this results.json as Markdown"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, measure, show; the status is 0 also when a target is missed."""
    from adafactor.bench import page, present, results

    if arguments.render is not None:
        print(present.markdown(results.load(arguments.render)), end="")
        return 0
    found = bench(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found.save(arguments.output / "results.json")
    written = page.write(found, arguments.output)
    present.show(found)
    print(f"Written: {', '.join(str(path) for path in [arguments.output / 'results.json', *written])}")
    return 0


def bench(arguments: argparse.Namespace) -> Results:
    """Everything that was asked for."""
    import torch

    from adafactor.bench import cost, machine
    from adafactor.bench import place as places
    from adafactor.bench.results import Results

    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    threads = machine.cores() if arguments.threads is None else arguments.threads
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"--threads {threads} must be from 1 to {MOST_THREADS}")
    place = places.find(arguments.device)
    chosen = _suites(arguments)
    _require("numpy", "rich")
    sizes = [] if arguments.cost is None else [cost.suite(name) for name in arguments.cost or cost.SIZES]
    entries = _entries(arguments, place.device.type)
    torch.set_num_threads(threads)
    os.environ["NPROC"] = str(threads)  # for XLA, which reads it when JAX is imported
    results = Results(_command(arguments), place.describe(), {}, threads, arguments.rounds, device=str(place.device))
    with _progress() as (start, tick):
        course = Run(arguments.rounds, threads, not arguments.no_memory, place, start, tick)
        start("checking the updates", len(entries))
        entries = _checked(entries, results, tick, place.device)
        results.versions = machine.versions({name for e in entries for name in e.contender.packages})
        for suite in chosen:
            results.suites.append(_measured(suite, entries, course))
        for suite in sizes:
            kept = [e for e in entries if e.contender.key in cost.CONTENDERS and e.dtype == entries[0].dtype]
            results.cost.append(_measured(suite, cost.that_fit(suite, kept, place), course))
    return results


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
    from adafactor.bench.contenders import CONTENDERS, DTYPES, find
    from adafactor.bench.measure import Entry

    found = [find(name) for name in arguments.contender or CONTENDERS]
    if others := [c.key for c in found if device not in c.devices and arguments.contender]:
        raise ValueError(f"{', '.join(others)} cannot step tensors on {device}")
    found = [c for c in found if device in c.devices]
    pairs = [Entry(c, d) for d in DTYPES for c in found]
    return [e for e in pairs if (e.dtype == arguments.dtype if arguments.dtype else e.dtype in e.contender.dtypes)]


def _checked(entries: list[Entry], results: Results, tick: Tick, device: torch.device) -> list[Entry]:
    """Those that can run here, with their verdicts in the results."""
    from adafactor.bench.check import check
    from adafactor.bench.contenders import why_not

    runnable = []
    for entry in entries:
        tick(f"checking {entry.label}")
        if reason := why_not(entry.contender, entry.dtype, device):
            results.missing[entry.label] = reason
            continue
        results.checks.append(check(entry.contender, entry.dtype, device))
        runnable.append(entry)
    if not runnable:
        reasons = "; ".join(f"{name}: {why}" for name, why in results.missing.items())
        raise ValueError(f"none of the contenders can run here ({reasons})")
    return runnable


def _measured(suite: Suite, entries: list[Entry], run: Run) -> Measured:
    """Times of one suite, and then memory, when the times' memory is free again."""
    from adafactor.bench.measure import measure, ticks
    from adafactor.bench.memory import extra_bytes, extra_bytes_on

    run.start(suite.name, ticks(entries, run.rounds) + (len(entries) if run.memory else 0))
    found = measure(suite, entries, run.rounds, run.tick, run.place)
    if run.memory:
        for entry, timing in zip(entries, found.timings, strict=True):
            run.tick(f"{suite.name}: memory of {entry.label}")
            if run.place.device.type == "cpu":
                timing.extra_bytes = extra_bytes(entry.contender.key, suite.shapes, entry.dtype, run.threads)
            else:
                timing.extra_bytes = extra_bytes_on(run.place, entry.contender, suite.shapes, entry.dtype)
    return found


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int], None], Tick]]:
    """A bar on stderr, so that the tables can be redirected; it moves between turns, never while one is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("")

        def start(text: str, total: int) -> None:
            bar.reset(task, total=total, description=text)
            bar.refresh()

        def tick(text: str) -> None:
            bar.update(task, advance=1, description=text, refresh=True)

        yield start, tick


def _require(*packages: str) -> None:
    import importlib.util

    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ImportError(f"{', '.join(missing)} is missing: pip install {' '.join(missing)}")


def _command(arguments: argparse.Namespace) -> str:
    """The command again, without where its output went."""
    words = ["adafactor", "bench"]
    for name in ("suite", "model", "contender", "dtype", "rounds", "threads", "cost"):
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    words += ["--device", arguments.device] if arguments.device != "cpu" else []
    return shlex.join(words + (["--no-memory"] if arguments.no_memory else []))
