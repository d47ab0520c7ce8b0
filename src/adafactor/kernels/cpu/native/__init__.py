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
| `parts` | these compiled for the types of a tensor |
| `compiling`, `machine_code` | from Python to machine code; kept on disk, loaded from there |
| `schedule` | threads: who does what when |
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch

from adafactor.core.factoring import statistics_dtype
from adafactor.kernels import memory_order as memory_order
from adafactor.kernels.cpu import threads
from adafactor.kernels.cpu.native import compiling, machine_code, parts, schedule
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

__all__ = [
    "APPLY", "COLUMN", "CONCLUDE", "END", "ENERGY", "FACTORS", "FULL", "JOB", "KAHAN", "KINDS", "MEASURE", "MOMENTS",
    "NEAREST", "NONE", "OF_GRADIENT", "OF_UPDATE", "OUTER", "REPAIR", "ROW", "SMALL", "STOCHASTIC", "Kind",
    "address_of", "assign_scratch", "new_jobs", "ready", "step_counts", "walk",
]  # fmt: skip

SMALL = 2**20  # elements up to which a tensor is one thread's alone, if there are enough for all (measured: two cores)

STORED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}
KINDS: dict[tuple[torch.dtype, torch.dtype], Kind] = {
    (x, g): Kind(STORED[x], STORED[g], STORED[statistics_dtype(x)])
    for x, g in itertools.product(STORED, STORED)
    if memory_order.stored(x, g)
}


class Control:
    """The compiled functions that lead threads from phase to phase; they depend on no types."""

    def __init__(self) -> None:
        """Load or compile them."""
        functions = [schedule.survey, schedule.assign, schedule.count, schedule.enter, schedule.close]
        self.survey, self.assign, self.count, enter, close = self._load(functions)
        self.team = threads.Team(enter, close)

    @cached_property
    def hand_out(self) -> Any:
        """Needed only where a step is taken walk by walk."""
        return self._load([schedule.hand_out])[0]

    def _load(self, functions: list[Any]) -> list[Any]:
        wanted = {f.__name__: partial(compiling.machine_code, f, f.__name__, arguments=1) for f in functions}
        found = machine_code.addresses(wanted, "what all steps share")
        return [ctypes.CFUNCTYPE(None, ctypes.c_int64)(address) for address in found]


@lru_cache(maxsize=1)
def control() -> Control:
    """Return the compiled functions of `schedule`."""
    return Control()


@cache
def ready(kind: Kind) -> parts.Parts:
    """Make the code ready that all kinds share; `walk` adds what certain tensors need."""
    control()
    return parts.parts_of(kind)


def walk(jobs: Any, kind: Kind, first: int, last: int, scratch: Any = None, where: int | None = None) -> None:
    """Take all jobs that are present through the phases from `first` up to, but without, `last`, on torch's threads.

    A part of a step needs `scratch`, which `assign_scratch` has given to the jobs: their vectors stay there in between.
    `where` is the jobs' address; it takes NumPy longer to say than many a small step takes.
    """
    if scratch is None and (first, last) != (MOMENTS, END):
        raise ValueError("a part of a step needs scratch that lasts until the other parts")
    code, functions = ready(kind), control()
    plan, at = _plan(jobs, code.address, first, last, code.stat_size, scratch is not None, where)
    functions.survey(at)
    large, _, missing, total, large_bytes, _, thread_bytes = plan[SURVEYED]
    if missing:
        code.compile(missing)
    count = max(1, min(torch.get_num_threads(), total // memory_order.UNIT))
    counters = LINE * -(-(schedule.FIRST_PHASE + large * END * schedule.PHASE_SIZE) // LINE)
    memory = torch.empty((LINE + counters + large_bytes + count * thread_bytes) // 8, dtype=torch.float64, device="cpu")
    base = LINE * -(-memory.data_ptr() // LINE)
    plan[MEMORY] = array("q", (base, base + counters, base + counters + large_bytes))
    functions.assign(at)
    functions.team.run(at, count, keep=(plan, memory, jobs, code, scratch))


LINE = schedule.CACHE_LINE  # vectors that begin with one are loaded faster (measured: up to 10 % of a step)
FIELDS = schedule.WALK.names or ()
SURVEYED = slice(FIELDS.index("large"), FIELDS.index("thread_bytes") + 1)
MEMORY = slice(FIELDS.index("counters"), FIELDS.index("thread_scratch") + 1)


def assign_scratch(jobs: Any, scratch: Any) -> None:
    """Give every job its own part of the scratch, one after the other; `MemoryOrder.scratch` is the size of each."""
    _keep, at = _plan(jobs, address_of(scratch))
    control().hand_out(at)


def step_counts(jobs: Any, where: int | None = None) -> Any:
    """Read the step counts t of all jobs from their state; `where` as for `walk`."""
    counts = torch.empty(len(jobs), dtype=torch.float64, device="cpu")
    _keep, at = _plan(jobs, counts.data_ptr(), where=where)
    control().count(at)
    return counts.numpy()


def _plan(
    jobs: Any,
    data: int,
    first: int = MOMENTS,
    last: int = END,
    stat_size: int = 0,
    own_scratch: bool = False,
    where: int | None = None,
) -> tuple[array[int], int]:
    """Make the record that tells the compiled functions what to do, and return it with its address.

    It begins as `schedule.WALK`, and the order of the jobs comes behind it.
    """
    where = address_of(jobs) if where is None else where
    given = (where, len(jobs), data, first, last, stat_size, SMALL, torch.get_num_threads(), memory_order.UNIT)
    plan = array("q", (*given, own_scratch))  # less overhead than NumPy's arrays, of which small models feel every one
    plan.frombytes(bytes(8 * (len(FIELDS) + len(jobs) - len(plan))))
    address, _ = plan.buffer_info()
    plan[FIELDS.index("order")] = address + schedule.WALK.itemsize
    return plan, address


def address_of(data: Any) -> int:
    """Return where the data of a tensor or an array lie."""
    address: int = data.data_ptr() if isinstance(data, torch.Tensor) else data.ctypes.data
    return address
