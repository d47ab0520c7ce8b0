"""Seconds and memory of a step: the contenders take turns in one process, so that all see the same machine.

`python -m benchmarks.measure REQUEST` is the process of its own in which the memory of a step on a CPU is measured.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contenders import DTYPES, Contender, find, own, parameters
from benchmarks.machine import ENVIRONMENT, PEAK, Card, Copy, Machine, Processor, peak
from benchmarks.results import Measured, Timing
from benchmarks.suites import Suite

ROOT = Path(__file__).parents[1]
TURN = 0.05  # seconds that a turn takes at least: shorter steps are taken several times
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A contender in a dtype."""

    contender: Contender
    dtype: str

    @property
    def label(self) -> str:
        """What a table calls it; float32 goes without saying."""
        return self.contender.label + ("" if self.dtype == "float32" else f", {self.dtype}")


def measure(suite: Suite, entries: list[Entry], rounds: int, tick: Tick, machine: Machine | None = None) -> Measured:
    """Give each contender its turn, round after round, with a copy in every round.

    Contenders of one dtype share gradients and, but for those that keep track of theirs, parameters: a step's time does
    not depend on the values, and the memory is needed for their states. Every turn is `repeats` steps, whose mean is
    one sample.
    """
    machine = machine or Processor()
    dtypes = {entry.dtype for entry in entries}
    params = {dtype: parameters(suite.shapes, dtype, device=machine.device) for dtype in dtypes}
    runners = []
    for entry in entries:
        tick(f"{suite.name}: warming up {entry.label}")
        shared = params[entry.dtype]
        runners.append(entry.contender.make(own(shared) if entry.contender.alone else shared))
        machine.seconds(runners[-1].step, 3)  # makes the state, compiles; optax compiles once more in its second step
    repeats = [max(1, math.ceil(TURN / machine.seconds(runner.step))) for runner in runners]
    seconds: list[list[float]] = [[] for _ in entries]
    copy, bandwidths = Copy(machine), []
    for number in range(rounds):
        tick(f"{suite.name}: round {number + 1} of {rounds}")
        for i, runner in enumerate(runners):
            seconds[i].append(machine.seconds(runner.step, repeats[i]))
        bandwidths.append(copy.bandwidth())
    timings = [
        Timing(entry.contender.key, entry.dtype, times, runner.state_bytes())
        for entry, times, runner in zip(entries, seconds, runners, strict=True)
    ]
    del params, runners, runner, copy
    gc.collect()  # before a process of its own measures memory
    bandwidth = statistics.median(bandwidths)
    return Measured(suite.name, suite.title, len(suite.shapes), suite.parameters, suite.large, bandwidth, timings)


def ticks(entries: list[Entry], rounds: int) -> int:
    """How often `measure` calls `tick`."""
    return len(entries) + rounds


def that_fit(suite: Suite, entries: list[Entry], machine: Machine | None = None) -> list[Entry]:
    """Choose those that fit the memory together, ours first: weights, gradients, states, and a tenth to spare."""
    free = (machine or Processor()).available_bytes()
    if free is None:
        return entries
    bytes_of = {dtype: suite.parameters * kind.itemsize for dtype, kind in DTYPES.items()}
    used = sum(2 * bytes_of[dtype] for dtype in {entry.dtype for entry in entries})
    chosen = []
    for entry in sorted(entries, key=lambda entry: entry.contender.role != "ours"):
        copies = 2 * entry.contender.key.startswith("adamw") + entry.contender.alone
        if used + copies * bytes_of[entry.dtype] <= 0.9 * free:
            used += copies * bytes_of[entry.dtype]
            chosen.append(entry)
    return [entry for entry in entries if entry in chosen]


# ---- extra memory during a step: the peak of the resident set, in a process of its own for each contender


def extra_bytes(contender: str, shapes: Sequence[tuple[int, ...]], dtype: str, threads: int) -> int | None:
    """Return the most memory that a step held beyond parameters, gradients and state; None where it cannot be known.

    The first two steps are not looked at: they make the state, compile, and start threads. The kernel counts pages
    in batches, so that small figures are rough.
    """
    if not PEAK.exists():  # Linux has it
        return None
    request = json.dumps({"contender": contender, "shapes": shapes, "dtype": dtype, "threads": threads})
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "NPROC": str(threads), "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.measure", request]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    return None if child.returncode else int(child.stdout.split()[-1])


def extra_bytes_on(card: Card, contender: Contender, shapes: Sequence[tuple[int, ...]], dtype: str) -> int:
    """Return the same for a card, which counts its own memory, in this process: of the third step, too."""
    runner = contender.make(parameters(shapes, dtype, device=card.device))
    runner.step()
    runner.step()
    return card.peak(runner.step)


def main(request: str) -> None:
    """In the child: take three steps, print the peak of the last."""
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    shapes = [tuple(shape) for shape in asked["shapes"]]
    runner = find(asked["contender"]).make(parameters(shapes, asked["dtype"]))
    runner.step()
    runner.step()
    print(peak(runner.step))


if __name__ == "__main__":
    main(sys.argv[1])
