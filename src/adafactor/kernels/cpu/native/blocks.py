"""Tensors whose blocks, or whose elements' numbers, do not follow their memory: read and stepped block by block.

A *block* is that of an int8 momentum, or elsewhere about as many elements that are numbered one after the other. Tables
say where its elements lie. It is copied from there, goes through the loops that every stretch does, and back again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adafactor.kernels.cpu.native import jobs, momentum, squares
from adafactor.kernels.cpu.native.apply import rates_of, room_at
from adafactor.kernels.cpu.native.compiling import as_written, summing
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array, narrow, view
from adafactor.kernels.cpu.native.jobs import Job, Stretch
from adafactor.kernels.cpu.native.moments import sums_of_unfactored

COLUMNS = 8  # of the table of axes: a length, and what a step along the axis adds to each field of `Place`


class Place(NamedTuple):
    """Where a block begins: in X and what lies like it, G, 1/√R, 1/√C; its first element, its scale, its line."""

    x: int
    g: int
    row: int
    col: int
    element: int
    scale: int
    along: int  # elements of its line before it


@as_written
def place_at(job: Job, number: int) -> Place:
    """Return where a block begins; neighbours in memory have neighbouring numbers."""
    x, g, row, col, element, scale, along = 0, 0, 0, 0, job.origin, 0, 0
    for i in range(job.block_axis_count - 1, -1, -1):
        axis = view(job.block_axes, COLUMNS * i, COLUMNS, np.int64)
        index, number = number % axis[0], number // axis[0]
        x, g, row, col = x + index * axis[1], g + index * axis[2], row + index * axis[3], col + index * axis[4]
        element, scale, along = element + index * axis[5], scale + index * axis[6], along + index * axis[7]
    return Place(x, g, row, col, element, scale, along)


@as_written
def span(job: Job, chunk: int) -> tuple[int, int]:
    """Return the first block of a chunk, and the one after its last."""
    chunks = job.B * job.chunks
    return job.blocks * chunk // chunks, job.blocks * (chunk + 1) // chunks


@as_written
def gather(job: Job, at: Place, scratch: int, kind: Kind) -> tuple[Stretch, Array]:
    """Copy a block to six tiles of the scratch; return it, and 1/√R of its elements."""
    width, tile = min(job.block, job.block_line - at.along), 8 * job.block
    like_x, like_g = view(job.block_offsets, 0, width, np.int64), view(job.block_offsets, job.block, width, np.int64)
    row, second = view(scratch, 0, width, kind.stat), view(scratch + tile, 0, width, kind.stat)
    x, m = view(scratch + 2 * tile, 0, width, kind.x), view(scratch + 3 * tile, 0, width, kind.m)
    compensation, g = view(scratch + 4 * tile, 0, width, kind.x), view(scratch + 5 * tile, 0, width, kind.g)
    _take(x, view(job.x, at.x, 1, kind.x), like_x)
    _take(g, view(job.g, at.g, 1, kind.g), like_g)
    if job.momentum != jobs.NONE:
        _take(m, view(job.m, at.x, 1, kind.m), like_x)
    if job.rounding == jobs.KAHAN:
        _take(compensation, view(job.compensation, at.x, 1, kind.x), like_x)
    if job.estimator == jobs.FULL:
        _take(second, view(job.full, at.x, 1, kind.stat), like_x)
    else:
        rows = view(job.block_offsets, 2 * job.block, width, np.int64)
        cols = view(job.block_offsets, 3 * job.block, width, np.int64)
        _take(row, view(job.scratch + job.row_scale, at.row, 1, kind.stat), rows)
        _take(second, view(job.scratch + job.col_scale, at.col, 1, kind.stat), cols)
    return Stretch(x, compensation, m, at.scale, g, second, at.element, 1), row


@as_written
def scatter(job: Job, at: Place, part: Stretch, kind: Kind) -> None:
    """Copy what a step has changed of a block back to where it lies."""
    like_x = view(job.block_offsets, 0, len(part.x), np.int64)
    _put(part.x, view(job.x, at.x, 1, kind.x), like_x)
    if job.momentum != jobs.NONE:
        _put(part.m, view(job.m, at.x, 1, kind.m), like_x)
    if job.rounding == jobs.KAHAN:
        _put(part.compensation, view(job.compensation, at.x, 1, kind.x), like_x)
    if job.estimator == jobs.FULL:
        _put(part.second, view(job.full, at.x, 1, kind.stat), like_x)


@as_written
def _take(values: Array, source: Array, offsets: Array) -> None:
    for j in range(len(values)):
        values[j] = source[offsets[j]]


@as_written
def _put(values: Array, target: Array, offsets: Array) -> None:
    for j in range(len(values)):
        target[offsets[j]] = values[j]


@summing
def apply_by_blocks(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Last pass: step a chunk of X."""
    rates = rates_of(job, phase, kind.stat)
    start, stop = span(job, chunk)
    for number in range(start, stop):
        at = place_at(job, number)
        part, row = gather(job, at, scratch, kind)
        kind.step(job, part, row, rates, room_at(scratch, 6, job.block, len(part.x), kind.stat), kind)
        scatter(job, at, part, kind)


@summing
def energy_by_blocks(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """Second pass, where U is made of a momentum: sum U² of a chunk."""
    weight, u2 = narrow(job.w1, kind.stat), 0.0
    start, stop = span(job, chunk)
    for number in range(start, stop):
        part, row = gather(job, place_at(job, number), scratch, kind)
        m = momentum.load(job, part, part.m, room_at(scratch, 6, job.block, len(part.x), kind.stat).m)
        u2 += squares.energy_of(part, m, row, True, weight, kind.sum)
    jobs.set_results(job, chunk, u2, 0.0, 0.0, 0.0)


@summing
def moments_by_blocks(job: Job, phase: int, chunk: int, scratch: int, kind: Kind) -> None:
    """First pass over an unfactored tensor, where U is made of a momentum: what `moments_of_unfactored` sums."""
    u2, x2, seen = 0.0, 0.0, 0.0
    start, stop = span(job, chunk)
    for number in range(start, stop):
        part, _ = gather(job, place_at(job, number), scratch, kind)
        energy, square, total = sums_of_unfactored(job, part, scratch + 48 * job.block, kind)
        u2 += energy
        x2 += square
        seen += total
    jobs.set_results(job, chunk, u2, x2, seen, 0.0)
