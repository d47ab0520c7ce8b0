"""The parts of a step as machine code: which there are, when they are compiled, and where they are kept on disk.

A part is one of the functions that take a unit through a phase, compiled for one kind. Parts are called by address. So
the code that leads from phase to phase knows no types, and is compiled once; none of them contains another one's code;
and what no tensor needs, as tiles without convolutions, is never compiled (measured on one core: 25 s for float32 with
everything in one function, 14 s with parts; 35 s and 14 s for bfloat16; 6 s of these are shared by all kinds).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from adafactor import equations
from adafactor.kernels import walk_order
from adafactor.kernels.cpu import threads
from adafactor.kernels.cpu.native import apply, carry, energy, factors, moments
from adafactor.kernels.cpu.native.elements import Kind
from adafactor.kernels.cpu.native.job import job_at
from adafactor.warn import warn

(
    MOMENTS_OF_LINES, MOMENTS_OF_TILES, MOMENTS_OF_WHOLE, MOMENTS_IN_DOUBLE, MAKE_FACTORS, BLEND,
    MEASURE_LINES, MEASURE_IN_DOUBLE, APPLY_TO_WHOLE, APPLY_TO_WHOLE_ROUNDED,
    # those that read the numerator of U
    ENERGY_OF_LINES, ENERGY_IN_DOUBLE, APPLY_TO_LINES, APPLY_TO_TILES, APPLY_ROUNDED, REPAIR_LINES,
    PARTS,
) = range(17)  # fmt: skip
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
READS = {  # the types that a part depends on, where not on all: others share its code
    MAKE_FACTORS: "stat", MEASURE_LINES: "x stat", MEASURE_IN_DOUBLE: "x", MOMENTS_OF_LINES: "g stat",
    MOMENTS_OF_TILES: "g stat", MOMENTS_IN_DOUBLE: "g stat", BLEND: "g stat", ENERGY_OF_LINES: "g stat",
    ENERGY_IN_DOUBLE: "g stat",
}  # fmt: skip

FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(walk_order.__file__), Path(equations.__file__)]
VERSION = sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()[:16]
NAMES = {np.float32: "float32", np.float64: "float64", np.uint16: "bfloat16", np.int16: "float16"}


class Cache(FunctionCache):
    """Numba's cache on disk, except that damaged files are replaced and a full disk is no reason to stop."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code; None if there is none, or none that can be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as problem:  # whatever unpickling makes of a damaged file
            for file in Path(self.cache_path).glob(self._impl.filename_base + ".*"):
                file.unlink(missing_ok=True)
            _warn_once(
                f"compiled code could not be read from the cache {self.cache_path}", "it is compiled anew", problem
            )
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save compiled code, if that is possible."""
        try:
            super().save_overload(sig, data)
        except OSError as problem:
            what = f"compiled code could not be saved to the cache {self.cache_path} (NUMBA_CACHE_DIR names another)"
            _warn_once(what, "it is kept in memory only", problem)


@cache
def _said(what: str) -> list[None]:
    return [None]


def _warn_once(what: str, then: str, problem: Exception) -> None:
    """Warn of the first of many files that have the same trouble."""
    if _said(what):
        _said(what).clear()
        warn(f"{what}; {then} ({problem!r})")


def compile_function(function: Callable[..., None], signature: str) -> Any:
    """Compile a function that is called by address, or load it from disk; returns it as Python calls it (by ctypes)."""
    # Numba looks at the age of one file only: the name says what all of them contain.
    function.__qualname__ = f"{function.__qualname__}_{VERSION}"
    options = {"nopython": True, "nogil": True, "error_model": "numpy"}
    compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
    compiled._cache = Cache(function)
    compiled.compile()
    call: Any = compiled.ctypes
    call.owner = compiled  # the code lives as long as this
    return call


def _part(job: int, phase: int, unit: int, scratch: int) -> None:
    """Do what a part does; `this_function` and `this_kind` are among its own globals."""
    this_function(job_at(job), phase, unit, scratch, this_kind)  # type: ignore[name-defined]  # noqa: F821


@cache
def _compiled_part(number: int, kind: Kind) -> Any:
    """Compile a part."""
    function = FUNCTIONS[number]
    if number == APPLY_TO_LINES and kind.x in (np.uint16, np.int16):
        function = apply.apply_one_by_one
    own = {"this_function": function, "this_kind": kind, "job_at": job_at}
    part = FunctionType(_part.__code__, own, "part")
    part.__qualname__ = "_".join([function.py_func.__name__, *(NAMES[dtype] for dtype in kind)])
    part.__module__ = __name__
    return compile_function(part, "void(int64, int64, int64, int64)")


class Parts:
    """The addresses of the parts of one kind; 0 where one is not compiled yet."""

    def __init__(self, kind: Kind):
        """Start with none."""
        self.kind = kind
        self.addresses = np.zeros(PARTS + OF_MOMENTUM, np.int64)
        self.address, self.stat_size = self.addresses.ctypes.data, np.dtype(kind.stat).itemsize

    def compile(self, missing: int) -> None:
        """Compile the parts whose bits are set."""
        for number in range(len(self.addresses)):
            if missing >> number & 1 and not self.addresses[number]:
                self.addresses[number] = threads.address_of(self._compile(number))

    def _compile(self, number: int) -> Any:
        x, g, stat = self.kind
        if number >= PARTS:
            number, g = number - OF_MOMENTUM, stat
        reads = READS.get(number, "x g stat")
        return _compiled_part(number, Kind(x if "x" in reads else stat, g if "g" in reads else stat, stat))


parts_of = lru_cache(maxsize=None)(Parts)


def check_cache() -> None:
    """Raise RuntimeError if there is no folder to keep compiled code in."""
    FunctionCache(_part)


def announced(kind: Kind) -> Any:
    """Say on stderr that code is compiled for a kind, if that takes long."""
    name = NAMES[kind.x]
    return threads.announced(
        f"adafactor: making the loops for torch.{name} ready (compiled once on a machine; it may take a minute) ..."
    )
