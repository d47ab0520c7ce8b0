"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *chunk* is
consecutive lines, the least that a thread takes. An unfactored tensor is one line of P numbers, cut anywhere. A step
goes through phases, of which the usual one has two passes over tensor-sized data:

    G ──▶ MOMENTS ──▶ sums of G², column energy ──▶ FACTORS ──▶ V̂, ΣU² ──▶ CONCLUDE ──▶ α/clip ──▶ APPLY ──▶ X, t
          first pass                                             ▲               ▲         G, X ──▶  last pass │
                                                                 │               └── ΣX² ◀─────────────────────┘
                                  ENERGY (a pass over G, where the             of the last step; MEASURE (a pass
                                  first cannot have ΣU²: `energy`)             over X), where it will not do: `carry`

and CORRECT, in the rare case that the carried ΣX² was wrong.

Sums are taken in the statistics' precision over at most `WIDTH` numbers (or `TALL` rows) and in double beyond. Chunks
do not depend on the number of threads, and their sums are added in one order, so neither does the result.

| file | what is in it |
|---|---|
| `jobs` | the record of a tensor, its chunks, its lines, its scratch |
| `intrinsics`, `elements` | instructions; numbers |
| `lines`, `squares` | the innermost loops: those that step, and those that only sum |
| `momentum` | the momentum of a stretch: read, averaged, rounded |
| `moments`, `energy`, `factors`, `apply`, `carry` | what is done in each phase |
| `blocks` | the same for tensors whose blocks do not follow their memory |
| `parts` | these compiled for the types of a tensor |
| `compiling`, `machine_code` | from Python to machine code; kept on disk, loaded from there |
| `schedule` | threads: who does what when |
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from adafactor.kernels import memory_order
from adafactor.kernels.cpu import threads
from adafactor.kernels.cpu.native import compiling, jobs, machine_code, schedule
from adafactor.kernels.cpu.native.intrinsics import Array
from adafactor.kernels.cpu.native.schedule import Plan, aligned

SMALL = 2**20  # elements up to which a tensor is one thread's alone, if there are enough for all (measured: two cores)


class Control(NamedTuple):
    """The compiled functions that lead threads from phase to phase; they depend on no types."""

    plan_step: Callable[[int], None]
    read_counts: Callable[[int, int, int], None]
    team: threads.Team


@lru_cache(maxsize=1)
def control() -> Control:
    """Load or compile the functions of `schedule`."""
    functions = (schedule.plan_step, 1), (schedule.read_counts, 3), (schedule.enter, 1), (schedule.close, 1)
    wanted = {f.__name__: partial(compiling.machine_code, f, f.__name__, count) for f, count in functions}
    found = zip(machine_code.addresses(wanted, "what all steps share"), functions, strict=True)
    plan_step, read_counts, enter, close = [
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(address) for address, (_, count) in found
    ]
    return Control(plan_step, read_counts, threads.Team(enter, close))


def run_phases(table: Array, where: int, first: int, last: int, scratch: Tensor | None = None) -> None:
    """Take all jobs that are present through the phases from `first` up to, but without, `last`, on torch's threads.

    The jobs come with the largest first, else a large tensor may be left to one thread. A part of a step needs
    `scratch`, which the jobs know: their vectors stay there in between. `where` is the table's address; it takes NumPy
    longer to say than many a small step takes.
    """
    if scratch is None and (first, last) != (jobs.MOMENTS, jobs.END):
        raise ValueError("a part of a step needs scratch that lasts until the other parts")
    limits = SMALL, memory_order.CHUNK, scratch is not None, torch.get_num_threads()
    plan = Plan(where, len(table), int(first), int(last), *limits)
    at, functions = ctypes.addressof(plan), control()
    functions.plan_step(at)
    counters = array("q", bytes(schedule.FIRST_PHASE + plan.large * jobs.END * schedule.PHASE_SIZE))
    size = schedule.CACHE_LINE + plan.large_bytes + plan.threads * plan.thread_bytes
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    plan.counters = counters.buffer_info()[0]
    plan.large_scratch = aligned(memory.data_ptr())
    plan.thread_scratch = plan.large_scratch + plan.large_bytes
    functions.team.run(at, plan.threads, keep=(plan, counters, memory, table, scratch))


def step_counts(table: Array, where: int) -> Array:
    """Read the step counts t of all jobs from their state; `where` as for `run_phases`."""
    counts = torch.empty(len(table), dtype=torch.float64, device="cpu")
    control().read_counts(where, len(table), counts.data_ptr())
    return counts.numpy()
