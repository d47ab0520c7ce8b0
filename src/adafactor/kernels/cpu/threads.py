"""Threads for compiled functions. No Python runs in them, so no signal handler does, and nothing can raise there.

Torch's own threads, where they can be had: after a backward pass they are awake, and wait for more by spinning on the
cores that other threads would need. Else plain Python threads: in a forked process, where OpenMP's did not survive,
where torch's library is not called that or has no such entry (Windows, macOS), and with ADAFACTOR_THREADS=plain.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from adafactor.kernels import PROCESS


class Team:
    """Threads that run a compiled function together.

    `enter(address)` is the function that every thread runs; one thread that comes, or all of them, do all the work.
    `close(address)` waits until no thread is inside, and lets none in any more.
    """

    def __init__(self, enter: Any, close: Any):
        """Take the compiled functions."""
        self._call, self._wait = enter, close
        self._address = address_of(enter)

    def run(self, address: int, count: int, keep: object) -> None:
        """Run the function in so many threads, this one among them; `keep` is what must not be freed meanwhile."""
        if count <= 1:
            self._call(address)
            return
        parallel = _openmp()
        if parallel is not None:
            parallel(self._address, address, count, 0)
            return
        try:
            _pool.put((self._call, address, keep), count - 1)
            self._call(address)
        finally:  # whatever a signal handler raised, above or while waiting, comes after this
            self._wait(address)


def address_of(function: Any) -> int:
    """Return the address of a function that ctypes can call."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _openmp() -> Callable[..., None] | None:
    """Return OpenMP's function that runs a function in parallel; None if it cannot be used in this process."""
    return None if _forked or os.environ.get("ADAFACTOR_THREADS") == "plain" else _gomp()


@lru_cache(maxsize=1)
def _gomp() -> Callable[..., None] | None:
    """Find `GOMP_parallel` of the OpenMP runtime that torch has loaded; None if torch was built without it."""
    try:
        run: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return run  # type: ignore[no-any-return]


Task = tuple[Callable[[int], None], int, object]


class Pool:
    """Plain threads that wait for tasks; they end with the process."""

    def __init__(self) -> None:
        """Start with none; `put` adds what is missing."""
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._size = 0

    def put(self, task: Task, times: int) -> None:
        """Hand a task to so many threads."""
        with self._lock:
            while self._size < times:
                threading.Thread(target=self._work, name="adafactor", daemon=True).start()
                self._size += 1
        for _ in range(times):
            self._tasks.put(task)

    def _work(self) -> None:
        while True:
            call, address, _keep = self._tasks.get()
            call(address)
            del _keep


_pool, _forked = Pool(), os.getpid() != PROCESS


def _after_fork() -> None:
    """Begin anew in a child, which has none of its parent's threads."""
    global _pool, _forked
    _pool, _forked = Pool(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
