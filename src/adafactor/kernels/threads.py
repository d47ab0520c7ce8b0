"""Threads for compiled loops that release Python's lock.

They are plain Python threads, so they live beside torch's and each other's: no process-wide thread layer that may not
be entered twice, and nothing that a forked worker could inherit half of.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import torch

Task = tuple[Callable[..., None], tuple[Any, ...], "SimpleQueue[BaseException | None]"]


def share_out(walk: Callable[..., None], arguments: tuple[Any, ...], total: int, least: int) -> None:
    """Call `walk(*arguments, first, last)` with [0, total) cut in as many parts as torch has threads."""
    parts = min(torch.get_num_threads(), total // least)
    if parts <= 1:
        walk(*arguments, 0, total)
        return
    bounds = [total * i // parts for i in range(parts + 1)]
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    team = _team(os.getpid())
    for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
        team.put((walk, (*arguments, first, last), done), parts - 1)
    walk(*arguments, 0, bounds[1])
    problems = [done.get() for _ in range(parts - 1)]
    for problem in problems:
        if problem is not None:
            raise problem


class Team:
    """Threads that wait for tasks; they end with the process."""

    def __init__(self) -> None:
        """Start with none; `put` adds what is missing."""
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._size = 0

    def put(self, task: Task, at_least: int) -> None:
        """Hand a task to whoever is free, of at least so many."""
        with self._lock:
            while self._size < at_least:
                threading.Thread(target=self._work, name="adafactor", daemon=True).start()
                self._size += 1
        self._tasks.put(task)

    def _work(self) -> None:
        while True:
            walk, arguments, done = self._tasks.get()
            try:
                walk(*arguments)
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
