"""Hold signals back while a step is half done.

Python runs a signal handler between any two of its own instructions, and a handler may raise: Ctrl-C does. In the
middle of a step of plain torch that would leave X stepped and its statistics not, or the other way round; at the end of
`torch.no_grad()` it would leave gradients switched off. A compiled step alone needs none of this: it is one call, and
Python's handlers wait for its end.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, whose enumerations take ten times as long
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = sorted(map(int, _signal.valid_signals()))
_here = threading.local()  # whether this thread is holding signals back already


@contextmanager
def held_back() -> Iterator[None]:
    """Run the handlers of signals that arrive meanwhile at the end; what they raise reaches the caller."""
    if getattr(_here, "holding", False) or threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    handlers = {s: handler for s in _SIGNALS if callable(handler := _signal.getsignal(s))}
    arrived: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            _signal.signal(number, lambda n, frame: arrived.setdefault(n, frame))
        _here.holding = True
        yield
    finally:
        _here.holding = False
        try:
            _restore(handlers)
        finally:
            _deliver(handlers, arrived)


def _restore(handlers: dict[int, Any]) -> None:
    """Put every handler back, even if one of them raises before the last is in its place."""
    problem: BaseException | None = None
    while True:
        try:
            for number, handler in handlers.items():
                _signal.signal(number, handler)
            break
        except BaseException as raised:
            problem = raised
    if problem is not None:
        raise problem


def _deliver(handlers: dict[int, Any], arrived: dict[int, FrameType | None]) -> None:
    """Call the handlers of the signals that arrived, all of them; the last exception carries the others."""
    if arrived:
        number, frame = arrived.popitem()
        handler: Callable[[int, FrameType | None], Any] = handlers[number]
        try:
            handler(number, frame)
        finally:
            _deliver(handlers, arrived)
