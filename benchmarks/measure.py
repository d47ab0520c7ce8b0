"""Seconds and memory of a step: the contenders take turns in one process, so that all see the same machine.

`python -m benchmarks.measure REQUEST` is the process of its own in which the memory of a step on a CPU is measured.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Contender, find, own, parameters
from benchmarks.machine import ENVIRONMENT, PEAK, Copy, load_average, peak, seconds
from benchmarks.record import Row
from benchmarks.suites import Suite

ROOT = Path(__file__).parents[1]
TURN = 0.05  # seconds that a turn takes at least: shorter steps are taken several times


def measure(
    suite: Suite,
    contenders: Sequence[Contender],
    dtype: str,
    rounds: int,
    tell: Callable[[str], object],
    device: torch.device,
) -> list[Row]:
    """Give each contender its turn, round after round, with a copy in every round; return a row for each.

    They share gradients and, but for those that keep track of theirs, parameters: a step's time does not depend on the
    values, and the memory is needed for their states. Every turn is `repeats` steps, whose mean is one sample.
    """
    params = parameters(suite.shapes, dtype, device)
    runners: list[Any] = []
    for contender in contenders:
        tell(f"{suite.name}, {dtype}: warming up {contender.label}")
        runners.append(contender.make(own(params) if contender.alone else params))
        seconds(runners[-1].step, 3, device)  # makes the state, compiles
    repeats = [max(1, math.ceil(TURN / seconds(runner.step, 1, device))) for runner in runners]
    times: list[list[float]] = [[] for _ in runners]
    copy, bandwidths, loads = Copy(device), [], []
    for number in range(rounds):
        tell(f"{suite.name}, {dtype}: round {number + 1} of {rounds}")
        for i, runner in enumerate(runners):
            times[i].append(round(seconds(runner.step, repeats[i], device), 9))
        bandwidths.append(round(copy.bandwidth()))
        loads.append(load_average())
    what: Row = {"suite": suite.name, "dtype": dtype, "parameters": suite.parameters}
    rows = [
        {**what, "contender": contender.key, "state_bytes": runner.state_bytes(), "seconds": taken}
        for contender, taken, runner in zip(contenders, times, runners, strict=True)
    ]
    del params, runners, runner, copy
    gc.collect()  # before a process of its own measures memory
    return [*rows, {**what, "contender": "copy", "bytes_per_second": bandwidths, "load": loads}]


def extra_bytes(contender: str, shapes: Sequence[tuple[int, ...]], dtype: str) -> int | None:
    """Return the most memory that a step held beyond parameters, gradients and state; None where it cannot be known.

    The first two steps are not looked at: they make the state, compile, and start threads. The kernel counts pages
    in batches, so that small figures are rough.
    """
    if not PEAK.exists():  # Linux has it
        return None
    request = json.dumps([contender, shapes, dtype, torch.get_num_threads()])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measure", request]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    return None if child.returncode else int(child.stdout.split()[-1])


def main(request: str) -> None:
    """In the child: take three steps, print the peak of the last."""
    contender, shapes, dtype, threads = json.loads(request)
    torch.set_num_threads(threads)
    runner = find(contender).make(parameters([tuple(shape) for shape in shapes], dtype))
    runner.step()
    runner.step()
    print(peak(runner.step))


if __name__ == "__main__":
    main(sys.argv[1])
