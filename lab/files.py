"""Files that are whole or absent, and locks that a killed process gives back."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class LockedError(RuntimeError):
    """Another process holds the lock."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file beside `path`, then move it there in one step.

    Whoever reads `path` sees the old file or the new one, even when this process is killed in between.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda stream: stream.write(text.encode()))


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what is between two marks of a text file.

    Raises:
        ValueError: the file does not have the marks.
    """
    before, first, rest = path.read_text(encoding="utf-8").partition(begin)
    _, second, after = rest.partition(end)
    if not first or not second:
        raise ValueError(f"{path} has no place for the tables: the marks {begin.strip()} and {end.strip()}")
    write_text(path, f"{before}{begin}\n{text.rstrip()}\n\n{end}{after}")


def digest(paths: Iterable[Path]) -> str:
    """The SHA-256 of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while some := stream.read(2**20):
                found.update(some)
    return found.hexdigest()


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when the process ends in any way.

    Raises:
        LockedError: `wait` is False and another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(f"another process is working on {path.parent.name}") from None
        yield
