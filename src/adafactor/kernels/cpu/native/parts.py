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
from adafactor.kernels.cpu.native import apply, carry, compiling, energy, factors, jobs, lines, machine_code, moments
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.intrinsics import Array

STORED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16, torch.float16: np.int16}
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
    u = stat if job["momentum"] == jobs.OF_GRADIENT else g  # the numerator of U, in the last pass
    m = {jobs.AS_COMPUTED: stat, jobs.BFLOAT16: np.uint16, jobs.INT8: np.int8}[int(job["momentum_format"])]
    tiled, rounded, is_narrow = job["K"] > 1, job["rounding"] != jobs.NEAREST, x in (np.uint16, np.int16)
    if job["measures_x"] and stat is np.float32:
        yield "measure_in_double", *_part(carry.measure_lines, x, stat, stat, in_double=True)
    if job["estimator"] == jobs.FULL:
        step = apply.apply_unfactored_rounded if rounded else apply.apply_unfactored
        yield "moments", *_part(moments.moments_of_unfactored, x, g, stat)
        yield "apply", *_part(step, x, g, stat, m=m)
        return
    yield "moments", *_part(moments.moments_of_tiles if tiled else moments.moments_of_lines, stat, g, stat)
    yield "moments_in_double", *_part(factors.moments_in_double, stat, g, stat)
    yield "factors", *_part(factors.factors, stat, stat, stat)
    if job["momentum"] == jobs.OF_GRADIENT:
        yield "blend", *_part(energy.blend_lines, stat, g, stat)
    if job["momentum"] == jobs.OF_GRADIENT or job["n_cols"] != job["Q"]:  # rows are not whole here
        yield "energy", *_part(energy.energy_of_lines, stat, g, stat, tiled)
    if stat is np.float32:
        yield "energy_in_double", *_part(energy.energy_of_lines, stat, g, stat, tiled, in_double=True)
    step = apply.apply_rounded if rounded else apply.apply_one_by_one if is_narrow else apply.apply_in_pairs
    yield "apply", *_part(step, x, u, stat, tiled, m=m)
    if job["carries_x2"]:
        yield "measure", *_part(step, x, u, stat, tiled, m=m)
        yield "correct", *_part(carry.correct_lines, x, u, stat, tiled, m=m)
    elif job["measures_x"]:
        yield "measure", *_part(carry.measure_lines, x, stat, stat)


def _part(
    function: Any, x: Any, g: Any, stat: Any, tiled: bool = False, in_double: bool = False, m: Any = None
) -> tuple[str, Any]:
    """Return the name of a part, and the function that is to be compiled."""
    row_scale = lines.scales_of_slices if tiled else lines.scale_of_line
    kind = Kind(x, g, stat, m or stat, np.float64 if in_double else stat, row_scale)

    def part(job: int, phase: int, chunk: int, scratch: int) -> None:
        function(jobs.job_at(job), phase, chunk, scratch, kind)

    ways = [way for way, wanted in (("tiles", tiled), ("in_double", in_double)) if wanted]
    ways += [] if kind.m is stat else [f"momentum_{NAMES[m]}"]
    return "_".join([function.py_func.__name__, *(NAMES[dtype] for dtype in (x, g, stat)), *ways]), part
