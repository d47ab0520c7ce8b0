"""Progress of what takes long, on stderr: on a terminal a line that changes and goes, elsewhere one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, after: float) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text about what comes next, behind `what`.

    Where stderr is no terminal, only one text is shown: the first that comes after so many seconds.
    """
    start, shown = time.monotonic(), 0
    terminal = sys.stderr is not None and sys.stderr.isatty()  # None: a program without a console

    def tell(text: str) -> None:
        nonlocal shown
        line = f"{what}: {text}"
        if terminal:
            line = line[:118]
            print(f"\r{line:<{shown}}", end="", file=sys.stderr, flush=True)
            shown = max(shown, len(line))
        elif not shown and time.monotonic() - start >= after:
            say(f"{line} ...")
            shown = 1

    try:
        yield tell
    finally:
        if terminal and shown:
            print(f"\r{'':<{shown}}\r", end="", file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Print a line to stderr, if there is one."""
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
