"""Threads for compiled loops that release Python's lock.

Torch's own, where they can be had: after a backward pass they are awake, and wait for more by spinning on the cores
that other threads would need. Else plain Python threads: in a forked process, where OpenMP's did not survive, and
where torch was built without it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

Task = tuple[Callable[[], None], "SimpleQueue[BaseException | None]"]

PIECES = 4  # for each thread: one that comes late, or is slowed down, takes fewer of them
PROCESS = os.getpid()


def share_out(walk: Callable[..., None], arguments: tuple[Any, ...], total: int, least: int) -> None:
    """Call `walk(*arguments, first, last)` for pieces that make up [0, total), each of `least` or more."""
    count = max(1, min(PIECES * torch.get_num_threads(), total // least))
    pieces = deque((total * i // count, total * (i + 1) // count) for i in range(count))

    def work() -> None:
        with suppress(IndexError):  # there are no more pieces
            while True:
                walk(*arguments, *pieces.popleft())

    together(work, count)


def together(work: Callable[[], None], most: int) -> None:
    """Call `work()` in as many threads as torch has, or in the most that are worth it, this one among them."""
    threads = min(torch.get_num_threads(), most)
    if threads <= 1:
        work()
        return
    parallel = _openmp() if os.getpid() == PROCESS else None
    if parallel is not None:
        parallel(work, threads)
        return
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    _team(os.getpid()).put((work, done), threads - 1)
    work()
    for problem in [done.get() for _ in range(threads - 1)]:
        if problem is not None:
            raise problem


@lru_cache(maxsize=1)
def _openmp() -> Callable[[Callable[[], None], int], None] | None:
    """What runs a function on so many threads of the OpenMP that torch uses; None if there is none to be found."""
    try:
        run = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    run.argtypes, run.restype = (function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def parallel(work: Callable[[], None], threads: int) -> None:
        problems: list[BaseException] = []

        def guarded(_: int | None) -> None:
            try:
                work()
            except BaseException as problem:  # it cannot pass through OpenMP
                problems.append(problem)

        run(function(guarded), None, threads, 0)
        for problem in problems:
            raise problem

    return parallel


class Team:
    """Threads that wait for tasks; they end with the process."""

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
            work, done = self._tasks.get()
            try:
                work()
                done.put(None)
            except BaseException as problem:  # the caller raises it
                done.put(problem)


@lru_cache(maxsize=1)
def _team(process: int) -> Team:
    """The threads of this process: a forked one starts its own."""
    return Team()


@contextmanager
def announced(message: str, after: float = 1.0) -> Iterator[None]:
    """Say on stderr what is going on if it takes longer than that many seconds."""
    timer = threading.Timer(after, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
