"""Files that a process leaves for the next ones: machine code, and what the self-test found on a card.

They are run, or relied on. So nothing is read that somebody else could have written: the file, all folders above it and
all links on the way belong to this user or to root, and nobody else can write to them. A folder above may be like /tmp,
where everybody adds files and nobody can take away another's. Elsewhere nothing is kept, and one warning says why.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from adafactor.core.warn import warn
from adafactor.kernels.progress import progress


def users_folder() -> Path:
    """Return the user's own folder for such files. Without a home it is not absolute, so nothing is kept there."""
    if sys.platform == "win32":
        place = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        place = "~/Library/Caches"
    else:
        place = os.environ.get("XDG_CACHE_HOME", "")
        place = place if os.path.isabs(place) else "~/.cache"  # as its specification says
    return Path(os.path.expanduser(place)) / "adafactor"


def trusted(folder: Path, make: bool = False) -> Path:
    """Return a folder, with links resolved, that nobody else can put files into; an OSError says why it is none."""
    if not folder.is_absolute():
        raise PermissionError(errno.EPERM, "it is not an absolute path")
    mode = 0o700 if folder == users_folder() else 0o755  # elsewhere code may be compiled for all users of an image
    try:
        folder = _walk(folder, mode if make else None)
    except RecursionError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    _check(folder.lstat(), folder)
    return folder


def _walk(place: Path, mode: int | None) -> Path:
    """Resolve links one by one, so that each of them and each folder on the way is checked; make what is missing."""
    if place != place.parent:
        place = _walk(place.parent, mode) / place.name
    if mode is not None and not os.path.lexists(place):
        with suppress(FileExistsError):  # another process has been faster
            place.mkdir(mode)
    _check(place.lstat(), place, sticky=True)
    return _walk(place.parent / os.readlink(place), mode) if place.is_symlink() else place


def _check(status: os.stat_result, place: Path, sticky: bool = False) -> None:
    """Raise unless only this user and root can change what is there; `sticky` is for folders above."""
    if sys.platform == "win32":  # has no such owners, and keeps users' folders apart by itself
        return
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"{place} belongs to another user")
    by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    is_safe = stat.S_ISLNK(status.st_mode) or (sticky and status.st_mode & stat.S_ISVTX)
    if (by_group or status.st_mode & stat.S_IWOTH) and not is_safe:
        raise PermissionError(errno.EPERM, f"others can write to {place}")


def _is_own_group(gid: int) -> bool:
    """Has the user this group to himself? Many systems give one of the user's name, and let it write."""
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}


def _open(folder: Path, name: str, mode: str) -> BinaryIO:
    """Open a file, but not a link, in a trusted folder; what is checked is what has been opened."""
    no_link = getattr(os, "O_NOFOLLOW", 0)
    file = open(folder / name, mode, opener=lambda path, flags: os.open(path, flags | no_link, 0o600))
    try:
        _check(os.fstat(file.fileno()), folder / name)
    except OSError:
        file.close()
        raise
    return file  # type: ignore[return-value]


def read(folder: Path, name: str) -> bytes | None:
    """Return what was kept under this name; None if there is nothing that can be trusted."""
    try:
        with _open(trusted(folder), name, "rb") as file:
            return file.read()
    except OSError:
        return None


def write(folders: Sequence[Path], name: str, content: bytes, what: str) -> Path | None:
    """Keep a file in the first folder where that can be done, whole or not at all; return the folder.

    Where there is none, one warning says `what` that leads to, and why it is so.
    """
    problems = []
    for folder in folders:
        try:
            place = trusted(folder, make=True)
            number, unfinished = tempfile.mkstemp(dir=place, prefix=f"{name}-", suffix=".new")
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(content)
                os.chmod(unfinished, 0o644)
                os.replace(unfinished, place / name)
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError as problem:
            problems.append(f"{folder}: {problem.strerror}")
        else:
            return folder
    warn_once(what, "; ".join(problems))
    return None


def warn_once(what: str, details: str) -> None:
    """Warn of the first of many files that have the same trouble."""
    if what not in warned():
        warned().add(what)
        warn(f"{what} ({details})")


@lru_cache(maxsize=1)
def warned() -> set[str]:
    """Return what this process has warned of."""
    return set()


# ---- one process at a time


@contextmanager
def turn(
    folders: Sequence[Path], name: str, what: str, patience: float, after: float = 0.0
) -> Iterator[Callable[[str], None]]:
    """Let no other process do the same meanwhile, where there is a folder for a lock; show how far it is.

    The system takes the lock from a process that has ended, however it did; one that was stopped keeps it. So whoever
    has the lock touches it when something new begins, and the others wait no longer than so many seconds for that.
    """
    file, last, end = _lock_file(folders, name), -1, 0.0
    try:
        with progress(what, after) as tell:
            while file is not None and not _locked(file):
                tell("waiting for another process")
                if (touched := os.fstat(file.fileno()).st_mtime_ns) != last:
                    last, end = touched, time.monotonic() + patience
                idle = f"another process holds {file.name} and does nothing; this one goes on alone"
                if time.monotonic() > end or idle in warned():
                    warn_once(idle, f"it was waited for {patience:g} s")
                    break
                time.sleep(0.05)

            def begin(text: str) -> None:
                with suppress(OSError):
                    if file is not None:
                        os.utime(file.name)
                tell(text)

            yield begin
    finally:
        if file is not None:
            file.close()


def _lock_file(folders: Sequence[Path], name: str) -> BinaryIO | None:
    for folder in folders:
        with suppress(OSError):
            return _open(trusted(folder, make=True), name, "ab")
    return None


def _locked(file: BinaryIO) -> bool:
    """Try to lock a file; it is unlocked when it is closed. True also where a file system knows no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True
