"""Torch's own threads, by the addresses of functions that the compiled library calls.

After a backward pass they are awake, and threads of our own would have to share the cores with them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

from adafactor.kernels import PROCESS

LIBRARY = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
Loops = tuple[int | None, int | None]


def parallel_loops() -> Loops:
    """Return the addresses of `torch_parallel_for`, plain C since torch 2.10, and of `GOMP_parallel`, for older ones.

    None and None, so that one thread does all the work, where torch has neither; and in a forked process: OpenMP's
    threads did not survive, and a loop would wait for them forever.
    """
    return _find() if os.getpid() == PROCESS else (None, None)


@lru_cache(maxsize=1)
def _find() -> Loops:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARY))
    except OSError:
        return None, None
    return _address(library, "torch_parallel_for"), _address(library, "GOMP_parallel")


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
