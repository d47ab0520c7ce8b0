"""Seconds of a step: the contenders take turns in one process, so that all see the same machine."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from adafactor.bench.contenders import DTYPES, Contender, own, parameters
from adafactor.bench.floor import floor_bytes
from adafactor.bench.machine import Copy
from adafactor.bench.place import Place, Processor
from adafactor.bench.results import Measured, Timing
from adafactor.bench.suites import Suite

Tick = Callable[[str], None]
TURN = 0.05  # seconds that a turn takes at least: shorter steps are taken several times


@dataclass(frozen=True)
class Entry:
    """A contender in a dtype."""

    contender: Contender
    dtype: str

    @property
    def label(self) -> str:
        """What a table calls it; float32 goes without saying."""
        return self.contender.label + ("" if self.dtype == "float32" else f", {self.dtype}")


def measure(suite: Suite, entries: list[Entry], rounds: int, tick: Tick, place: Place | None = None) -> Measured:
    """Each contender's turn, round after round, and a copy in every round.

    Contenders of one dtype share gradients and, but for those that keep track of theirs, parameters: a step's time does
    not depend on the values, and the memory is needed for their states. Every turn is `repeats` steps, whose mean is
    one sample.
    """
    place = place or Processor()
    dtypes = {entry.dtype for entry in entries}
    params = {dtype: parameters(suite.shapes, dtype, device=place.device) for dtype in dtypes}
    runners = []
    for entry in entries:
        tick(f"{suite.name}: warming up {entry.label}")
        given = params[entry.dtype]
        runners.append(entry.contender.make(own(given) if entry.contender.alone else given))
        place.seconds(runners[-1].step, 3)  # makes the state, compiles; optax compiles once more in its second step
    repeats = [max(1, math.ceil(TURN / place.seconds(runner.step))) for runner in runners]
    seconds: list[list[float]] = [[] for _ in entries]
    copy, bandwidths = Copy(place), []
    for number in range(rounds):
        for i, entry in enumerate(entries):
            tick(f"{suite.name}: round {number + 1} of {rounds}, {entry.label}")
            seconds[i].append(place.seconds(runners[i].step, repeats[i]))
        bandwidths.append(copy.bandwidth())
    timings = [
        Timing(entry.contender.key, entry.dtype, found, runner.state_bytes(), None, _floor(suite, entry, place))
        for entry, found, runner in zip(entries, seconds, runners, strict=True)
    ]
    del params, runners, copy
    gc.collect()  # before a process of its own measures memory
    return Measured(
        suite.name,
        suite.title,
        len(suite.shapes),
        suite.parameters,
        suite.large,
        statistics.median(bandwidths),
        timings,
    )


def ticks(entries: list[Entry], rounds: int) -> int:
    """How often `measure` calls `tick`."""
    return len(entries) * (rounds + 1)


def _floor(suite: Suite, entry: Entry, place: Place) -> int | None:
    if entry.contender.role != "ours":
        return None
    return floor_bytes(suite.shapes, DTYPES[entry.dtype].itemsize, entry.contender.momentum, place.cache_bytes())
