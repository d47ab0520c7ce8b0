"""The parts of a step as machine code: which there are, and when they are compiled.

A part is one of the functions that take a chunk through a phase, compiled for certain dtypes. Parts are called by
address. So the code that leads from phase to phase knows no types, and is compiled once; none of them contains another
one's code; and what no tensor needs, as tiles without convolutions, is never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import apply, carry, compiling, energy, factors, jobs, machine_code, moments
from adafactor.kernels.cpu.native.elements import Dtypes

(
    MOMENTS_OF_LINES, MOMENTS_OF_TILES, MOMENTS_OF_UNFACTORED, MOMENTS_IN_DOUBLE, MAKE_FACTORS, BLEND,
    MEASURE_LINES, MEASURE_IN_DOUBLE, APPLY_TO_UNFACTORED, APPLY_TO_UNFACTORED_ROUNDED,
    # those that read the numerator of U
    ENERGY_OF_LINES, ENERGY_IN_DOUBLE, APPLY_TO_LINES, APPLY_TO_TILES, APPLY_ROUNDED, CORRECT_LINES,
    PARTS,
) = jobs.numbers(17)  # fmt: skip
OF_MOMENTUM = PARTS - ENERGY_OF_LINES  # added to the last ones where the numerator is the momentum of the gradient
ALL = PARTS + OF_MOMENTUM

# In the same order; with the types that a function depends on, as others share its code.
FUNCTIONS: list[tuple[Any, str]] = [
    (moments.moments_of_lines, "g stat"),
    (moments.moments_of_tiles, "g stat"),
    (moments.moments_of_unfactored, "x g stat"),
    (factors.moments_in_double, "g stat"),
    (factors.factors, "stat"),
    (energy.blend_lines, "g stat"),
    (carry.measure_lines, "x stat"),
    (carry.measure_in_double, "x"),
    (apply.apply_to_unfactored, "x g stat"),
    (apply.apply_to_unfactored_rounded, "x g stat"),
    (energy.energy_of_lines, "g stat"),
    (energy.energy_in_double, "g stat"),
    (apply.apply_to_lines, "x g stat"),
    (apply.apply_to_tiles, "x g stat"),
    (apply.apply_rounded, "x g stat"),
    (carry.correct_lines, "x g stat"),
]
ONE_BY_ONE = {APPLY_TO_LINES: apply.apply_to_lines_one_by_one, APPLY_TO_TILES: apply.apply_to_tiles_one_by_one}
NAMES = {np.float32: "float32", np.float64: "float64", np.uint16: "bfloat16", np.int16: "float16"}


class Parts:
    """The addresses of the parts for certain dtypes; 0 where one is not compiled yet."""

    def __init__(self, dtypes: Dtypes):
        """Start with none."""
        self.dtypes = dtypes
        self.addresses = np.zeros(ALL, np.int64)
        self.address, self.stat_size = self.addresses.ctypes.data, np.dtype(dtypes.stat).itemsize

    def compile(self, missing: int) -> None:
        """Load or compile the parts whose bits are set."""
        wanted = [number for number in range(len(self.addresses)) if missing >> number & 1]
        named = list(map(self._named, wanted))  # a part and its twin that reads the momentum may have one name
        functions = dict(named)
        found = machine_code.addresses(functions, f"the step for torch.{NAMES[self.dtypes.x]}")
        address = dict(zip(functions, found, strict=True))
        self.addresses[wanted] = [address[name] for name, _ in named]

    def _named(self, number: int) -> tuple[str, Callable[[], bytes]]:
        """Return the name of a part, and what compiles it."""
        x, g, stat = self.dtypes
        if number >= PARTS:
            number, g = int(number - OF_MOMENTUM), stat
        function, needed = FUNCTIONS[number]
        dtypes = Dtypes(x if "x" in needed else stat, g if "g" in needed else stat, stat)
        if dtypes.x in (np.uint16, np.int16):
            function = ONE_BY_ONE.get(number, function)
        name = "_".join([function.py_func.__name__, *(NAMES[dtype] for dtype in dtypes)])

        def part(job: int, phase: int, chunk: int, scratch: int) -> None:
            function(jobs.job_at(job), phase, chunk, scratch, dtypes)

        return name, lambda: compiling.machine_code(part, name, arguments=4)
