"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *chunk* is
consecutive lines, the least that a thread takes. An unfactored tensor is one line of P numbers, cut anywhere. A step
goes through phases, of which the usual one has two passes over tensor-sized data:

    G ──▶ MOMENTS ──▶ sums of G², column energy ──▶ FACTORS ──▶ R, C, ΣU² ──▶ CONCLUDE ──▶ α/clip ──▶ APPLY ──▶ X, t
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
| `intrinsics`, `elements`, `lines` | instructions; numbers; the innermost loops |
| `moments`, `energy`, `factors`, `apply`, `carry` | what is done in each phase |
| `parts` | these compiled for the types of a tensor |
| `compiling`, `machine_code` | from Python to machine code; kept on disk, loaded from there |
| `schedule` | threads: who does what when |
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from adafactor.core.factoring import statistics_dtype
from adafactor.kernels import memory_order
from adafactor.kernels.cpu import threads
from adafactor.kernels.cpu.native import compiling, machine_code, parts, schedule
from adafactor.kernels.cpu.native.elements import Dtypes
from adafactor.kernels.cpu.native.intrinsics import Array
from adafactor.kernels.cpu.native.jobs import (
    APPLY,
    COLUMN,
    CONCLUDE,
    END,
    ENERGY,
    FACTORS,
    FULL,
    JOB,
    KAHAN,
    MOMENTS,
    NEAREST,
    NONE,
    OF_GRADIENT,
    OF_UPDATE,
    OUTER,
    ROW,
    SCRATCH,
    STOCHASTIC,
    new_jobs,
)

__all__ = [
    "APPLY", "COLUMN", "CONCLUDE", "END", "ENERGY", "FACTORS", "FULL", "JOB", "KAHAN", "KINDS", "MOMENTS", "NEAREST",
    "NONE", "OF_GRADIENT", "OF_UPDATE", "OUTER", "ROW", "SMALL", "STOCHASTIC", "address_of", "assign_scratch",
    "new_jobs", "ready", "run_phases", "step_counts",
]  # fmt: skip

SMALL = 2**20  # elements up to which a tensor is one thread's alone, if there are enough for all (measured: two cores)

STORED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}
KINDS = {
    (x, g): Dtypes(STORED[x], STORED[g], STORED[statistics_dtype(x)])
    for x, g in itertools.product(STORED, STORED)
    if memory_order.stored(x, g)
}


class Control:
    """The compiled functions that lead threads from phase to phase; they depend on no types."""

    def __init__(self) -> None:
        """Load or compile them."""
        functions = schedule.plan_step, schedule.init_memory, schedule.read_counts, schedule.enter, schedule.close
        wanted = {f.__name__: partial(compiling.machine_code, f, f.__name__, arguments=1) for f in functions}
        found = machine_code.addresses(wanted, "what all steps share")
        compiled = [ctypes.CFUNCTYPE(None, ctypes.c_int64)(address) for address in found]  # each takes that of a plan
        self.plan_step, self.init_memory, self.read_counts, enter, close = compiled
        self.team = threads.Team(enter, close)


@lru_cache(maxsize=1)
def control() -> Control:
    """Return the compiled functions of `schedule`."""
    return Control()


@cache
def ready(dtypes: Dtypes) -> int:
    """Make the code ready that all dtypes share, and return the bytes of a statistic."""
    control()
    size: int = np.dtype(dtypes.stat).itemsize
    return size


def run_phases(
    jobs: Array, dtypes: Dtypes, first: int, last: int, scratch: Tensor | None = None, where: int | None = None
) -> None:
    """Take all jobs that are present through the phases from `first` up to, but without, `last`, on torch's threads.

    The jobs come with the largest first, else a large tensor may be left to one thread. A part of a step needs
    `scratch`, which `assign_scratch` has given to the jobs: their vectors stay there in between. `where` is the jobs'
    address; it takes NumPy longer to say than many a small step takes.
    """
    if scratch is None and (first, last) != (MOMENTS, END):
        raise ValueError("a part of a step needs scratch that lasts until the other parts")
    stat_size, functions = ready(dtypes), control()
    plan, at = _plan(jobs, 0, first, last, stat_size, scratch is not None, where)
    functions.plan_step(at)
    count, missing, size = plan[PLANNED]
    if missing:
        parts.assign(jobs, dtypes)
    memory = torch.empty(size // 8, dtype=torch.float64, device="cpu")
    plan[MEMORY] = memory.data_ptr()
    functions.init_memory(at)
    functions.team.run(at, count, keep=(plan, memory, jobs, scratch))


FIELDS = schedule.PLAN.names or ()
PLANNED, MEMORY = slice(FIELDS.index("threads"), FIELDS.index("bytes") + 1), FIELDS.index("memory")


def assign_scratch(jobs: Array, scratch: Tensor | Array) -> None:
    """Give every job its own piece of the scratch, one after the other; `MemoryOrder.scratch` is the size of each."""
    address = address_of(scratch)
    for job in jobs:
        b, p, s, q, k, chunks = (int(job[name]) for name in ("B", "P", "S", "Q", "K", "chunks"))
        lengths = memory_order.scratch_lengths((b, p, s, q, k), chunks, job["estimator"] != FULL)
        for name, length in zip(SCRATCH, lengths, strict=True):
            job[name] = address
            address += 8 * length


def step_counts(jobs: Array, where: int | None = None) -> Array:
    """Read the step counts t of all jobs from their state; `where` as for `run_phases`."""
    counts = torch.empty(len(jobs), dtype=torch.float64, device="cpu")
    _keep, at = _plan(jobs, counts.data_ptr(), where=where)
    control().read_counts(at)
    return counts.numpy()


def _plan(
    jobs: Array,
    counts: int,
    first: int = MOMENTS,
    last: int = END,
    stat_size: int = 0,
    own_scratch: bool = False,
    where: int | None = None,
) -> tuple[array[int], int]:
    """Make the record of a plan, and return it with its address."""
    where = address_of(jobs) if where is None else where
    given = where, len(jobs), counts, first, last, stat_size, SMALL, memory_order.CHUNK, own_scratch
    plan = array("q", (*given, torch.get_num_threads()))  # less overhead than NumPy's arrays: small models feel it
    plan.frombytes(bytes(8 * (len(FIELDS) - len(plan))))
    return plan, plan.buffer_info()[0]


def address_of(data: Tensor | Array) -> int:
    """Return where the data of a tensor or an array lie."""
    return data.data_ptr() if isinstance(data, Tensor) else data.ctypes.data
