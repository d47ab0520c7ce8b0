"""Processes that start at once, such as the ranks of a machine, compile a kernel once between them.

Triton asks its cache on disk before it compiles, but does not wait for another process that is compiling the same. So
while a process makes a launch for the first time, whoever misses a kernel takes a lock beside its files, looks again,
and keeps the lock until the kernel is there. Where there can be no lock, every process compiles for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from adafactor.kernels import cache

WHAT = "adafactor: compiling kernels for this GPU, once per version"
PATIENCE = 60.0  # seconds in which another process must have compiled a kernel
_one_thread = threading.Lock()  # Triton's setting is the whole process's


class Place:
    """A kernel's place in Triton's cache. A process that finds nothing there has its turn until it has put it there."""

    def __init__(self, key: str, place: Any, turn: ExitStack):
        """Stand before Triton's own."""
        self._key, self._place, self._turn = key, place, turn

    def get_group(self, filename: str) -> Any:
        """Return the files of a kernel; None: this process must compile it."""
        found = self._place.get_group(filename)
        if found is None:
            folder = Path(knobs.cache.dir) / self._key
            self._turn.enter_context(cache.turn([folder], "adafactor.lock", WHAT, PATIENCE, after=5.0))
            found = self._place.get_group(filename)  # another process may have compiled it meanwhile
            if found is not None:
                self._turn.close()
        return found

    def put_group(self, filename: str, group: Any) -> Any:
        """Keep the files of a kernel, and let the others have them."""
        kept = self._place.put_group(filename, group)
        self._turn.close()
        return kept

    def __getattr__(self, name: str) -> Any:
        """Leave all else to Triton's."""
        return getattr(self._place, name)


@contextmanager
def compile_in_turns() -> Iterator[None]:
    """Let what is missing in Triton's cache be compiled by one process at a time, and by one thread of it."""
    with _one_thread, ExitStack() as turn, knobs.cache.scope():
        make = knobs.cache.manager_class or FileCacheManager
        knobs.cache.manager_class = lambda key, **options: Place(key, make(key, **options), turn)
        yield
