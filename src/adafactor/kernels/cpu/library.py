"""The compiled library: which one this machine can run, its functions, and the NumPy type of its records."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
NAMES = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}  # by what torch says of the processor
CACHE_LINE = 64  # bytes
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64


class Library:
    """One build of the library, loaded."""

    def __init__(self, path: Path):
        """Load it, and ask it for the fields of a job."""
        library = ctypes.CDLL(str(path))
        self.path = path
        self.counts = _function(library.adafactor_counts, None, POINTER, INTEGER, POINTER)
        self.memory = _function(library.adafactor_memory, INTEGER, POINTER, *[INTEGER] * 4)
        self.scratch = _function(library.adafactor_scratch, INTEGER, POINTER)
        self.place = _function(library.adafactor_place, None, POINTER, INTEGER)
        self.run = _function(library.adafactor_run, None, POINTER, *[INTEGER] * 5, POINTER, POINTER)
        text = _function(library.adafactor_fields, ctypes.c_char_p)().decode()
        self.job = np.dtype([tuple(field.split(":")) for field in text.strip(",").split(",")])


@lru_cache(maxsize=1)
def library() -> Library:
    """Load the fastest library that this machine can run; raise ImportError if none was built."""
    wanted = NAMES.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))
    paths = [FOLDER / f"libadafactor_{name}.so" for name in wanted]
    found = [path for path in paths if path.exists()]
    if not found:
        raise ImportError("it was installed without its compiled part")
    try:
        return Library(found[0])
    except (OSError, AttributeError) as problem:
        raise ImportError(f"{found[0]} cannot be loaded: {problem}") from problem


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
