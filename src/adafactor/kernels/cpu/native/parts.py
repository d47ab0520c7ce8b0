"""The parts of a step as machine code: which of them a tensor needs, and when they are compiled.

A part is one of the functions that take a chunk through a phase, compiled for certain dtypes. A job has the addresses
of its parts. So the code that leads from phase to phase knows no types, and is compiled once; none of them contains
another one's code; and what no tensor needs, as tiles without convolutions, is never compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import apply, carry, compiling, energy, factors, jobs, machine_code, moments
from adafactor.kernels.cpu.native.elements import Dtypes
from adafactor.kernels.cpu.native.intrinsics import Array

NAMES = {np.float32: "float32", np.float64: "float64", np.uint16: "bfloat16", np.int16: "float16"}


def assign(table: Array, dtypes: Dtypes) -> None:
    """Load or compile the parts of the jobs that are present and have none, and give them the addresses."""
    without = [job for job in table if job["present"] and not job["apply"]]
    needed = [list(_needed(job, dtypes)) for job in without]
    wanted = {
        name: partial(compiling.machine_code, part, name, arguments=4) for parts in needed for _, (name, part) in parts
    }
    found = machine_code.addresses(wanted, f"the step for torch.{NAMES[dtypes.x]}")
    addresses = dict(zip(wanted, found, strict=True))
    for job, parts in zip(without, needed, strict=True):
        for field, (name, _) in parts:
            job[field] = addresses[name]


def _needed(job: Any, dtypes: Dtypes) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Go through the parts that a job may need, with the fields for their addresses.

    A part that depends on fewer types is compiled for the statistics' in place of the others.
    """
    x, g, stat = dtypes
    u = stat if job["momentum"] == jobs.OF_GRADIENT else g  # the numerator of U
    tiled, rounded, narrow = job["K"] > 1, job["rounding"] != jobs.NEAREST, x in (np.uint16, np.int16)
    if job["measures_x"] and stat is np.float32:
        yield "measure_in_double", _part(carry.measure_in_double, x, stat, stat)
    if job["estimator"] == jobs.FULL:
        step = apply.apply_to_unfactored_rounded if rounded else apply.apply_to_unfactored
        yield "moments", _part(moments.moments_of_unfactored, x, g, stat)
        yield "apply", _part(step, x, g, stat)
        return
    yield "moments", _part(moments.moments_of_tiles if tiled else moments.moments_of_lines, stat, g, stat)
    yield "moments_in_double", _part(factors.moments_in_double, stat, g, stat)
    yield "factors", _part(factors.factors, stat, stat, stat)
    if job["momentum"] == jobs.OF_GRADIENT or job["n_cols"] != job["Q"]:
        yield "energy", _part(energy.energy_of_lines, stat, u, stat)
    if stat is np.float32:
        yield "energy_in_double", _part(energy.energy_in_double, stat, u, stat)
    if job["momentum"] == jobs.OF_GRADIENT:
        yield "blend", _part(energy.blend_lines, stat, g, stat)
    if rounded:
        step = apply.apply_rounded
    elif narrow:
        step = apply.apply_to_tiles_one_by_one if tiled else apply.apply_to_lines_one_by_one
    else:
        step = apply.apply_to_tiles if tiled else apply.apply_to_lines
    yield "apply", _part(step, x, u, stat)
    if job["carries_x2"]:
        yield "measure", _part(step, x, u, stat)
        yield "correct", _part(carry.correct_lines, x, u, stat)
    elif job["measures_x"]:
        yield "measure", _part(carry.measure_lines, x, stat, stat)


def _part(function: Any, x: Any, g: Any, stat: Any) -> tuple[str, Any]:
    """Return the name of a part, and the function that is to be compiled."""
    dtypes = Dtypes(x, g, stat)

    def part(job: int, phase: int, chunk: int, scratch: int) -> None:
        function(jobs.job_at(job), phase, chunk, scratch, dtypes)

    return "_".join([function.py_func.__name__, *(NAMES[dtype] for dtype in dtypes)]), part
