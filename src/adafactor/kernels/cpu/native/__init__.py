"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *unit* is
consecutive lines, the smallest piece that a thread takes. A tensor whose second moment is kept whole is one line of P
numbers, cut anywhere. A step goes through phases, of which the usual one has two walks over tensor-sized data:

    G ──▶ MOMENTS ──▶ sums of G², column energy ──▶ FACTORS ──▶ R, C, ΣU² ──▶ CONCLUDE ──▶ α/clip ──▶ APPLY ──▶ X, t
          first walk                                             ▲               ▲         G, X ──▶  last walk │
                                                                 │               └── ΣX² ◀─────────────────────┘
                                  ENERGY (a walk over G, where the             of the last step; MEASURE (a walk
                                  first cannot have ΣU²: `energy`)             over X), where it will not do: `carry`

and REPAIR, in the rare case that the carried ΣX² was wrong.

Sums are taken in the statistics' precision over at most `WIDTH` numbers (or `TALL` rows) and in double beyond. Units do
not depend on the number of threads, and their sums are added in one order, so neither does the result.

| file | what is in it |
|---|---|
| `job` | the record of a tensor, its units, its scratch |
| `elements`, `lines` | numbers; the innermost loops |
| `moments`, `energy`, `factors`, `apply`, `carry` | what is done in each phase |
| `parts` | these compiled for the types of a tensor, and kept on disk |
| `schedule` | threads: who does what when |
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from adafactor.kernels import walk_order
from adafactor.kernels.cpu import threads
from adafactor.kernels.cpu.native import parts, schedule
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.job import (
    APPLY,
    COLUMN,
    CONCLUDE,
    END,
    ENERGY,
    FACTORS,
    FULL,
    JOB,
    KAHAN,
    MEASURE,
    MOMENTS,
    NEAREST,
    NONE,
    OF_GRADIENT,
    OF_UPDATE,
    OUTER,
    REPAIR,
    ROW,
    STOCHASTIC,
    new_jobs,
)
from adafactor.layout import statistics_dtype

__all__ = [
    "APPLY", "COLUMN", "CONCLUDE", "END", "ENERGY", "FACTORS", "FULL", "JOB", "KAHAN", "KINDS", "MEASURE", "MOMENTS",
    "NEAREST", "NONE", "OF_GRADIENT", "OF_UPDATE", "OUTER", "REPAIR", "ROW", "SMALL", "STOCHASTIC", "Kind",
    "assign_scratch", "new_jobs", "ready", "walk",
]  # fmt: skip

SMALL = (
    2**20
)  # elements up to which a tensor is one thread's alone, if there are enough for all (measured on two cores)

STORED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}
KINDS: dict[tuple[torch.dtype, torch.dtype], Kind] = {
    (x, g): Kind(STORED[x], STORED[g], STORED[statistics_dtype(x)])
    for x, g in itertools.product(STORED, STORED)
    if walk_order.stored(x, g)
}

parts.check_cache()


class Control:
    """The compiled functions that lead threads from phase to phase; they depend on no types."""

    def __init__(self) -> None:
        """Compile them, or load them from disk."""
        functions = (schedule.survey, schedule.assign, schedule.enter, schedule.close)
        compiled = [parts.compile_function(function, "void(int64)") for function in functions]
        self.survey, self.assign = compiled[0].ctypes, compiled[1].ctypes
        self.team = threads.Team(compiled[2], compiled[3])


@lru_cache(maxsize=1)
def control() -> Control:
    """Return the compiled functions of `schedule`."""
    return Control()


def ready(kind: Kind) -> parts.Parts:
    """Make the code for a kind ready, as far as every tensor needs it; `walk` adds what certain tensors need."""
    with parts.announced(kind):
        control()
        return parts.parts_of(kind)


def walk(jobs: Any, kind: Kind, first: int, last: int, orders: Any = None, scratch: Any = None) -> None:
    """Take all jobs that are present through the phases from `first` up to, but without, `last`, on torch's threads.

    A part of a step needs `scratch`, which `assign_scratch` has given to the jobs: their vectors stay there in between.
    """
    if scratch is None and (first, last) != (MOMENTS, END):
        raise ValueError("a part of a step needs scratch that lasts until the other parts")
    code = ready(kind)
    plan, order = _plan(jobs, code), np.empty(len(jobs), np.int64)
    plan["order"], plan["first"], plan["last"] = order.ctypes.data, first, last
    plan["stat_size"], plan["own_scratch"] = np.dtype(kind.stat).itemsize, scratch is not None
    at, functions = plan.ctypes.data, control()
    functions.survey(at)
    (wanted,) = plan.tolist()
    missing, large, total, large_bytes, thread_bytes = (wanted[i] for i in RESULTS)
    if missing:
        with parts.announced(kind):
            code.compile(missing)
    count = max(1, min(torch.get_num_threads(), total // walk_order.UNIT))
    memory = np.empty((large_bytes + count * thread_bytes) // 8 + 8)
    counters = np.zeros(schedule.FIRST_PHASE // 8 + large * END * schedule.PHASE_SIZE // 8, np.int64)
    plan["counters"], plan["large_scratch"] = counters.ctypes.data, memory.ctypes.data
    plan["thread_scratch"] = memory.ctypes.data + large_bytes
    if scratch is None:
        functions.assign(at)
    functions.team.run(at, count, keep=(plan, order, memory, counters, jobs, scratch))


RESULTS = [schedule.WALK.names.index(name) for name in ("missing", "large", "total", "large_bytes", "thread_bytes")]


def assign_scratch(jobs: Any, scratch: Any) -> None:
    """Give every job its own part of the scratch, one after the other; `WalkOrder.scratch` says how much each takes."""
    plan, order = _plan(jobs, None), np.arange(len(jobs))
    plan["order"], plan["large"], plan["own_scratch"] = order.ctypes.data, len(jobs), 1
    plan["large_scratch"] = scratch.data_ptr() if isinstance(scratch, torch.Tensor) else scratch.ctypes.data
    control().assign(plan.ctypes.data)


def _plan(jobs: Any, code: parts.Parts | None) -> Any:
    """Begin the record that tells the compiled functions what to do."""
    plan = np.zeros(1, schedule.WALK)
    plan["jobs"], plan["count"] = jobs.ctypes.data, len(jobs)
    plan["small_size"], plan["unit_size"], plan["threads"] = SMALL, walk_order.UNIT, torch.get_num_threads()
    if code is not None:
        plan["parts"] = code.addresses.ctypes.data
    return plan
