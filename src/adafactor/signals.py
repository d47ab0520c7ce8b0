"""Hold signals back while a step is half done.

Python runs a signal handler between any two of its own instructions, and a handler may raise: Ctrl-C does. In the
middle of a step of plain torch that would leave X stepped and its statistics not, or the other way round. A compiled
step needs none of this: it is one call, and Python's handlers wait for its end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = sorted(signal.valid_signals())


@contextmanager
def held_back() -> Iterator[None]:
    """Run the handlers of signals that arrive meanwhile at the end; what they raise reaches the caller."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    handlers = {s: handler for s in _SIGNALS if callable(handler := signal.getsignal(s))}
    arrived: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            signal.signal(number, lambda n, frame: arrived.setdefault(n, frame))
        yield
    finally:
        try:
            _restore(handlers)
        finally:
            _deliver(handlers, arrived)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    """Put every handler back, even if one of them raises before the last is in its place."""
    problem: BaseException | None = None
    while True:
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            break
        except BaseException as raised:
            problem = raised
    if problem is not None:
        raise problem


def _deliver(handlers: dict[signal.Signals, Any], arrived: dict[int, FrameType | None]) -> None:
    """Call the handlers of the signals that arrived, all of them; the last exception carries the others."""
    if arrived:
        number, frame = arrived.popitem()
        handler: Callable[[int, FrameType | None], Any] = handlers[signal.Signals(number)]
        try:
            handler(number, frame)
        finally:
            _deliver(handlers, arrived)
