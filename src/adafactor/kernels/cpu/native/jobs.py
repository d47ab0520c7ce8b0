"""One tensor as a record that Python fills in by name and the loops read; its chunks, its lines and its scratch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, cast, get_type_hints

import numpy as np

from adafactor.kernels import memory_order
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, view
from adafactor.kernels.memory_order import MemoryOrder

WIDTH, RESULTS = memory_order.WIDTH, memory_order.RESULTS
TILE = WIDTH // 4  # numbers that are computed with at a time, where they are not in place
TALL = 64  # rows that are summed in the statistics' precision
TINY = 1e-30  # a mean square below which squares in float32 lose digits, or vanish


def numbers(count: int) -> list[int]:
    """Return 0, 1, … as NumPy's integers: for every one of Python's, Numba compiles what is called with it anew."""
    return cast(list[int], list(map(np.int64, range(count))))


OUTER, ROW, COLUMN, FULL = range(4)  # estimator: along P and Q, along P only, along Q only, unfactored
NONE, OF_UPDATE, OF_GRADIENT, OF_DIRECTION = range(4)  # momentum
AS_COMPUTED, BFLOAT16, INT8 = range(3)  # how the momentum is stored
NEAREST, STOCHASTIC, KAHAN = range(3)  # rounding
MOMENTS, FACTORS, ENERGY, MEASURE, CONCLUDE, APPLY, CORRECT, END = numbers(8)  # the phases of a step
CHECK = END + 1  # no phase: asks the loop of APPLY to sum two lines again (see `carry`)
FIRST, SECOND, THIRD = numbers(3)  # of a chunk's results


class Job:
    """The fields of a job. An address of 0 stands for what the tensor does not have."""

    # Geometry: B × P × S × Q × K (see `native`), and the strides of X and of G along B, P and S.
    B: int
    P: int
    S: int
    Q: int
    K: int
    xb: int
    xp: int
    xs: int
    gb: int
    gp: int
    gs: int
    rows: int  # P's per chunk
    chunks: int  # per B
    tile: int  # numbers of a line of slices that are looked at together: 2ⁱ·K, about TILE
    room: int  # numbers that are computed with elsewhere than in place, at a time
    stretch: int  # numbers of a line that are looked at together
    # Choices.
    estimator: int
    swapped: int  # P is the paper's column axis
    momentum: int
    momentum_format: int
    rounding: int
    rounds_momentum_at_random: int
    decays_by_alpha: int  # weight decay is by αₜ, so its share is only known with RMS(X)
    relative: int
    measures_x: int  # ΣX² is wanted before X is written
    ignore: int  # whether G is finite
    # Constants; of the whole tensor, where this is a shard.
    n_rows: float  # the lengths by which sums become means
    n_cols: float
    eps1: float
    eps2: float
    clip: float  # 0: no clipping
    count: float  # elements
    sign: float  # −1 to maximise
    # Addresses of X, G and the state.
    x: int
    g: int
    full: int
    m: int
    m_scales: int  # of an int8 momentum's blocks
    compensation: int
    t: int
    row_state: int  # R along P, C along Q
    col_state: int
    row_offsets: int  # where the state keeps each entry of a factor, in elements; 0: in the order of memory
    col_offsets: int
    known_mean: int  # mean(R), where only a part of R is here: first its share, then all of it; 0: it is computed
    counts_row: int  # of the copies of R on several ranks this one counts for the mean
    # Blocks of the momentum: the elements of one, and of a line, where a new one begins.
    block: int
    block_line: int
    # Where they do not lie within lines of memory, their number, and tables of where they lie (see `blocks`).
    blocks: int
    block_axes: int
    block_axis_count: int
    block_offsets: int
    # Random numbers: the keys of this step; the number of X's first element, and what is added along B, P, S, Q·K.
    key1: int
    key2: int
    origin: int
    nb: int
    np: int
    ns: int
    nq: int
    # This step: a job that is not present is passed over; the rates.
    present: int
    beta2: float
    w1: float
    w2: float
    rho: float
    share: float  # of X that weight decay takes; by α, of X/max(ε₂, RMS(X))
    # Results of this step, which is X·decay − scale·U, or X·decay − rate·M with scale·U averaged into M.
    taken: int
    finite: float  # a number that is finite if all of G² is
    u2: float
    x2: float
    # Results of the last step that was taken, this one or one before.
    is_clipped: int
    scale: float
    rate: float
    decay: float
    alpha: float
    rms_x: float
    rms_u: float
    # Carried from step to step, and what became of it in this step (see `carry`).
    carries_x2: int
    x2_confirmed: int
    heaviest_line: int
    x2_after: float
    heaviest_x2: float
    reads_x2: int
    needs_correction: int
    scale_used: float
    rate_used: float
    decay_used: float
    # For the report: counts since they were last read, and β̂₂ of the last step that was taken.
    steps: int
    clipped: int
    skipped: int
    beta2_taken: float
    # Addresses of the machine code for the phases, set by `parts`; 0: not needed.
    moments: int
    moments_in_double: int
    factors: int
    energy: int
    energy_in_double: int
    measure: int
    measure_in_double: int
    apply: int
    correct: int
    # Scratch: its address; where in it each vector begins (see `MemoryOrder.lengths`), and its end, in bytes.
    scratch: int
    row: int
    col: int
    row_scale: int
    col_scale: int
    means: int
    partial: int
    column_energy: int
    results: int
    scratch_bytes: int


def record(fields: type) -> np.dtype[Any]:
    """Return the NumPy type of a record with the fields that a class declares."""
    hints = get_type_hints(fields)
    return np.dtype([(name, np.int64 if dtype is int else np.float64) for name, dtype in hints.items()])


JOB = record(Job)
GEOMETRY = "B", "P", "S", "Q", "K", "xb", "xp", "xs", "gb", "gp", "gs", "rows", "chunks"
SCRATCH = "row", "col", "row_scale", "col_scale", "means", "partial", "column_energy", "results", "scratch_bytes"


def new_jobs(count: int) -> Array:
    """Make a table of jobs: all fields are zero but those with another default."""
    jobs = np.zeros(count, JOB)
    jobs["present"] = jobs["x2_confirmed"] = 1
    jobs["sign"] = jobs["block"] = 1
    jobs["x2_after"] = np.nan
    return jobs


def lay_out(job: Any, order: MemoryOrder) -> None:
    """Describe the geometry of a job's tensor, and its scratch: vectors, one after the other."""
    geometry = *order.sizes, *order.strides, order.rows, order.chunks
    ends = [8 * end for end in accumulate(order.lengths, initial=0)]
    for name, value in zip((*GEOMETRY, *SCRATCH), (*geometry, *ends), strict=True):
        job[name] = value
    _, p, _, q, tile = order.sizes
    line = q * tile
    while 2 * tile <= min(line, TILE):  # long enough to vectorise; and 2ⁱ slices can be filled by doubling
        tile *= 2
    job["tile"], job["room"] = tile, tile if order.factored else TILE
    job["stretch"] = WIDTH if order.sizes[4] == 1 else tile
    job["block_line"] = max(1, line if order.factored else p)


@as_written
def job_at(address: int) -> Job:
    """Return the job at an address."""
    job: Job = view(address, 0, 1, JOB)[0]
    return job


# ---- lines


class Line(NamedTuple):
    """Where a line lies: its number, and where it begins in X, in G and in 1/√C, in elements."""

    number: int
    x: int
    g: int
    col: int
    element: int  # the number of its first element in the whole tensor


class Stretch(NamedTuple):
    """A stretch of a line: all that lies along it."""

    x: Array
    compensation: Array
    m: Array
    first_scale: int  # of the momentum's first block
    g: Array
    second: Array  # 1/√C; of an unfactored tensor V̂
    element: int  # the number of its first element, and what is added to it from one to the next
    step: int


@as_written
def averages_updates(job: Job) -> bool:
    """Say whether β₁ averages U, with or without the step size."""
    return job.momentum == OF_UPDATE or job.momentum == OF_DIRECTION


@summing
def span(job: Job, chunk: int) -> tuple[int, int, int]:
    """Return a chunk's index along B, its first P, and the P after its last."""
    b = chunk // job.chunks
    start = (chunk - b * job.chunks) * job.rows
    return b, start, min(job.P, start + job.rows)


@summing
def line_at(job: Job, b: int, p: int, s: int) -> Line:
    """Return the line at p and s."""
    return Line(
        (b * job.P + p) * job.S + s,
        b * job.xb + p * job.xp + s * job.xs,
        b * job.gb + p * job.gp + s * job.gs,
        (b * job.S + s) * job.Q * job.K,
        job.origin + b * job.nb + p * job.np + s * job.ns,
    )


@summing
def stretch_at(job: Job, line: Line, q: int, size: int, kind: Kind) -> Stretch:
    """Return at most `size` numbers of a line, from q on."""
    width = min(size, job.Q * job.K - q)
    return Stretch(
        view(job.x, line.x + q, width, kind.x),
        view(job.compensation, line.x + q, width, kind.x),
        view(job.m, line.x + q, width, kind.m),
        first_scale(job, line.number, q),
        view(job.g, line.g + q, width, kind.g),
        view(job.scratch + job.col_scale, line.col + q, width, kind.stat),
        line.element + q * job.nq,
        job.nq,
    )


@summing
def first_scale(job: Job, line: int, q: int) -> int:
    """Return the number of the momentum's block that q is in: that of its scale."""
    per_line = -(-job.block_line // job.block)
    return line * per_line + q // job.block


@summing
def next_block(job: Job, i: int) -> int:
    """Return where the first of an unfactored momentum's blocks begins that does not begin before element i."""
    line = i // job.block_line * job.block_line
    return line + min(job.block_line, -(-(i - line) // job.block) * job.block)


@summing
def flat_at(job: Job, start: int, size: int, kind: Kind) -> Stretch:
    """Return `size` numbers of an unfactored tensor; V̂ stands in for a momentum that there is not."""
    return Stretch(
        view(job.x, start, size, kind.x),
        view(job.compensation, start, size, kind.x),
        view(job.m if job.momentum != NONE else job.full, start, size, kind.m),
        first_scale(job, start // job.block_line, start % job.block_line),
        view(job.g, start, size, kind.g),
        view(job.full, start, size, kind.stat),
        job.origin + start * job.np,
        job.np,
    )


@as_written
def thread_scratch(job: Job) -> int:
    """Return how many numbers a thread needs for a job, besides the job's own scratch.

    They are the sums and the energy of a chunk's columns, a line, eight tiles, and a stretch of a line.
    """
    return (2 * job.S + 1) * job.Q * job.K + 8 * max(job.K, job.block, TILE) + WIDTH


# ---- sums


@as_written
def elements_of(job: Job) -> int:
    """Return how many elements of the tensor are here."""
    return job.B * job.P * job.S * job.Q * job.K


@as_written
def set_results(job: Job, chunk: int, first: float, second: float, third: float, fourth: float) -> None:
    """Leave a chunk's sums for the end of the phase."""
    results = view(job.scratch + job.results, RESULTS * chunk, RESULTS, np.float64)
    results[0], results[1], results[2], results[3] = first, second, third, fourth


@as_written
def total_of(job: Job, which: int) -> float:
    """Add up one of the results over the chunks, always in the same order."""
    total, results = 0.0, view(job.scratch + job.results, 0, RESULTS * job.B * job.chunks, np.float64)
    for i in range(which, len(results), RESULTS):
        total += results[i]
    return total


@as_written
def is_accurate(job: Job, total: float) -> bool:
    """Say whether a sum of squares that was taken in float32 is right: neither overflow nor underflow took part."""
    return np.isfinite(total) and total >= TINY * elements_of(job)


@as_written
def energy_in_first_pass(job: Job) -> bool:
    """Say whether ΣU² of a factored tensor comes out of the first pass (see `energy`): if no second one is needed."""
    return job.estimator != FULL and job.energy == 0
