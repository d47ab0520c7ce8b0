"""The parts of a step as machine code: which of them a tensor needs.

A part is one of the functions that take a chunk through a phase, compiled for a certain kind. A job has the addresses
of its parts. So the code that leads from phase to phase knows no types, and is compiled once; none of them contains
another one's code; and what no tensor needs, as tiles without convolutions, is never compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from adafactor.core.factoring import statistics_dtype
from adafactor.kernels.cpu.native import (
    apply,
    blocks,
    carry,
    compiling,
    energy,
    factors,
    jobs,
    lines,
    machine_code,
    moments,
    momentum,
)
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array

STORED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}
# The functions of a kind, unless a tensor needs others.
USUAL = lines.scale_of_line, momentum.beside_gradient, lines.descend, apply.step_in_place
NAMES = {np.float32: "float32", np.float64: "float64", np.uint16: "bfloat16", np.int16: "float16", np.int8: "int8"}


def assign(table: Array, x: torch.dtype, g: torch.dtype) -> None:
    """Load or compile the parts of jobs whose X and G have these types, and write down their addresses."""
    types = STORED[x], STORED[g], STORED[statistics_dtype(x)]
    needed = [list(_needed(job, *types)) for job in table]
    wanted = {name: partial(compiling.machine_code, part, name, arguments=4) for job in needed for _, name, part in job}
    addresses = dict(zip(wanted, machine_code.addresses(wanted, f"the step for {x}"), strict=True))
    for job, parts in zip(table, needed, strict=True):
        for field, name, _ in parts:
            job[field] = addresses[name]


def _needed(job: Any, x: Any, g: Any, stat: Any) -> Iterator[tuple[str, str, Any]]:
    """Go through the parts that a job may need, with the fields for their addresses.

    A part that depends on fewer types is compiled for the statistics' in place of the others.
    """
    m = {jobs.AS_COMPUTED: stat, jobs.BFLOAT16: np.uint16, jobs.INT8: np.int8}[int(job["momentum_format"])]
    by_blocks, of_gradient = job["blocks"] > 0, job["momentum"] == jobs.OF_GRADIENT
    reads_blocks = by_blocks and of_gradient and m is np.int8  # before the last pass
    alone, whole = Kind(stat, stat, stat, stat, stat, *USUAL), Kind(x, g, stat, m, stat, *USUAL)
    if job["rounding"] != jobs.NEAREST:
        whole = whole._replace(step=apply.step_rounded)
    if of_gradient:
        whole = whole._replace(operands=momentum.of_gradient)
    if job["measures_x"] and stat is np.float32:
        yield "measure_in_double", *_part(carry.measure_lines, alone._replace(x=x, sum=np.float64))
    if job["estimator"] == jobs.FULL:
        first = blocks.moments_by_blocks if reads_blocks else moments.moments_of_unfactored
        last = blocks.apply_by_blocks if by_blocks else apply.apply_unfactored
        yield "moments", *_part(first, alone._replace(x=x, g=g, m=m if of_gradient else stat))
        yield "apply", *_part(last, whole._replace(descend=lines.descend_unfactored))
        return
    read, second = alone._replace(g=g), energy.energy_of_lines
    yield "moments", *_part(moments.moments_of_lines if job["K"] == 1 else moments.moments_of_tiles, read)
    yield "moments_in_double", *_part(factors.moments_in_double, read)
    yield "factors", *_part(factors.factors, alone)
    if of_gradient:
        read = read._replace(m=m)
    if reads_blocks:
        read, second = read._replace(x=x), blocks.energy_by_blocks
    elif job["K"] > 1:
        read = read._replace(row_scale=lines.scales_of_slices)
    if of_gradient or job["n_cols"] != job["Q"]:  # rows are not whole here
        yield "energy", *_part(second, read)
    if stat is np.float32:
        yield "energy_in_double", *_part(second, read._replace(sum=np.float64))
    step = apply.apply_one_by_one if x in (np.uint16, np.int16) else apply.apply_in_pairs
    if by_blocks:
        step = blocks.apply_by_blocks
    elif job["K"] > 1:
        whole = whole._replace(row_scale=lines.scales_of_slices)
    yield "apply", *_part(step, whole)
    if job["carries_x2"]:
        yield "measure", *_part(step, whole)
        yield "correct", *_part(carry.correct_lines, whole)
    elif job["measures_x"]:
        yield "measure", *_part(carry.measure_lines, alone._replace(x=x))


def _part(function: Any, kind: Kind) -> tuple[str, Any]:
    """Return the name of a part, and the function that is to be compiled."""

    def part(job: int, phase: int, chunk: int, scratch: int) -> None:
        function(jobs.job_at(job), phase, chunk, scratch, kind)

    ways = [NAMES[dtype] for dtype in (kind.x, kind.g, kind.stat)]
    ways += [] if kind.m is kind.stat else [f"momentum_{NAMES[kind.m]}"]
    ways += [] if kind.sum is kind.stat else ["in_double"]
    ways += [way.__name__ for way in kind[5:] if way not in USUAL]
    return "_".join([function.__name__, *ways]), part
