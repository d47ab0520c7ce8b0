"""The parts of a step as machine code: which there are, and when they are compiled.

A part is one of the functions that take a unit through a phase, compiled for one kind. Parts are called by address. So
the code that leads from phase to phase knows no types, and is compiled once; none of them contains another one's code;
and what no tensor needs, as tiles without convolutions, is never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np

from adafactor.kernels.cpu.native import apply, carry, compiling, energy, factors, machine_code, moments
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.job import job_at, numbers

(
    MOMENTS_OF_LINES, MOMENTS_OF_TILES, MOMENTS_OF_WHOLE, MOMENTS_IN_DOUBLE, MAKE_FACTORS, BLEND,
    MEASURE_LINES, MEASURE_IN_DOUBLE, APPLY_TO_WHOLE, APPLY_TO_WHOLE_ROUNDED,
    # those that read the numerator of U
    ENERGY_OF_LINES, ENERGY_IN_DOUBLE, APPLY_TO_LINES, APPLY_TO_TILES, APPLY_ROUNDED, REPAIR_LINES,
    PARTS,
) = numbers(17)  # fmt: skip
OF_MOMENTUM = PARTS - ENERGY_OF_LINES  # added to the last ones where the numerator is the momentum of the gradient

FUNCTIONS: dict[int, Any] = {
    MOMENTS_OF_LINES: moments.moments_of_lines,
    MOMENTS_OF_TILES: moments.moments_of_tiles,
    MOMENTS_OF_WHOLE: moments.moments_of_whole,
    MOMENTS_IN_DOUBLE: factors.moments_in_double,
    MAKE_FACTORS: factors.factors,
    BLEND: energy.blend_lines,
    MEASURE_LINES: carry.measure_lines,
    MEASURE_IN_DOUBLE: carry.measure_in_double,
    APPLY_TO_WHOLE: apply.apply_to_whole,
    APPLY_TO_WHOLE_ROUNDED: apply.apply_to_whole_rounded,
    ENERGY_OF_LINES: energy.energy_of_lines,
    ENERGY_IN_DOUBLE: energy.energy_in_double,
    APPLY_TO_LINES: apply.apply_to_lines,
    APPLY_TO_TILES: apply.apply_to_tiles,
    APPLY_ROUNDED: apply.apply_rounded,
    REPAIR_LINES: carry.repair_lines,
}
ONE_BY_ONE = {APPLY_TO_LINES: apply.apply_to_lines_one_by_one, APPLY_TO_TILES: apply.apply_to_tiles_one_by_one}
READS = {  # the types that a part depends on, where not on all: others share its code
    MAKE_FACTORS: "stat", MEASURE_LINES: "x stat", MEASURE_IN_DOUBLE: "x", MOMENTS_OF_LINES: "g stat",
    MOMENTS_OF_TILES: "g stat", MOMENTS_IN_DOUBLE: "g stat", BLEND: "g stat", ENERGY_OF_LINES: "g stat",
    ENERGY_IN_DOUBLE: "g stat",
}  # fmt: skip

NAMES = {np.float32: "float32", np.float64: "float64", np.uint16: "bfloat16", np.int16: "float16"}


def _part(job: int, phase: int, unit: int, scratch: int) -> None:
    """Do what a part does; `this_function` and `this_kind` are among its own globals."""
    this_function(job_at(job), phase, unit, scratch, this_kind)  # type: ignore[name-defined]  # noqa: F821


def _named_part(number: int, kind: Kind) -> tuple[str, Callable[[], bytes]]:
    """Return the name of a part, and what compiles it."""
    function = FUNCTIONS[number]
    if kind.x in (np.uint16, np.int16):
        function = ONE_BY_ONE.get(number, function)
    name = "_".join([function.py_func.__name__, *(NAMES[dtype] for dtype in kind)])
    own = {"this_function": function, "this_kind": kind, "job_at": job_at}
    part = FunctionType(_part.__code__, own, name)
    return name, lambda: compiling.machine_code(part, name, arguments=4)


class Parts:
    """The addresses of the parts of one kind; 0 where one is not compiled yet."""

    def __init__(self, kind: Kind):
        """Start with none."""
        self.kind = kind
        self.addresses = np.zeros(PARTS + OF_MOMENTUM, np.int64)
        self.address, self.stat_size = self.addresses.ctypes.data, np.dtype(kind.stat).itemsize

    def compile(self, missing: int) -> None:
        """Load or compile the parts whose bits are set."""
        numbers = [number for number in range(len(self.addresses)) if missing >> number & 1]
        named = list(map(self._named, numbers))  # a part and its twin that reads the momentum may have one name
        wanted = dict(named)
        found = machine_code.addresses(wanted, f"the step for torch.{NAMES[self.kind.x]}")
        address = dict(zip(wanted, found, strict=True))
        self.addresses[numbers] = [address[name] for name, _ in named]

    def _named(self, number: int) -> tuple[str, Callable[[], bytes]]:
        x, g, stat = self.kind
        if number >= PARTS:
            number, g = int(number - OF_MOMENTUM), stat
        reads = READS.get(number, "x g stat")
        return _named_part(number, Kind(x if "x" in reads else stat, g if "g" in reads else stat, stat))


parts_of = lru_cache(maxsize=None)(Parts)
