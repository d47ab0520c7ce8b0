"""Hold signals back while a step is half done.

Python runs a signal handler between any two of its own instructions, and a handler may raise: Ctrl-C does. In the
middle of a step in eager PyTorch that would leave X stepped and its statistics not, or the other way round; at the end
of `torch.no_grad()` it would leave gradients switched off. A compiled step alone needs none of this: it is one call,
and Python's handlers wait for its end.

To block signals in this thread would not do: the system hands them to another one, and Python runs their handlers in
this one all the same. So Python's handlers are exchanged, and only those: what the system calls stays as it was, be it
a C library's own handler, or Python's with the flags that `signal.siginterrupt` has set.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, whose enumerations take ten times as long
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = sorted(map(int, _signal.valid_signals()))
_here = threading.local()  # whether this thread is holding signals back already
_sigaction: Any = ctypes.PyDLL(None).sigaction if os.name == "posix" else lambda *_: -1
_sigaction.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
_ACTION = 256  # bytes: more than any `struct sigaction`, which is only kept here and put back
_actions = ctypes.create_string_buffer(_ACTION * (_SIGNALS[-1] + 1))
_begin = ctypes.addressof(_actions)


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
            _exchange(number, handlers[number], lambda n, frame: arrived.setdefault(n, frame))
        _here.holding = True
        yield
    finally:
        _here.holding = False
        try:
            _restore(handlers)
        finally:
            _deliver(handlers, arrived)


def _exchange(number: int, old: Any, new: Any) -> None:
    """Give Python another handler for a signal, without a change to what the system calls when it comes.

    Python may first run handlers of signals that have come, and one of them may raise, or may have set a handler for
    this signal: that one's action is the right one then.
    """
    action = _begin + _ACTION * number
    known = _sigaction(number, None, action) == 0
    if _signal.signal(number, new) is old and known:
        _sigaction(number, action, None)


def _restore(handlers: dict[int, Any]) -> None:
    """Put every handler back, even if one of them raises before the last is in its place."""
    problem: BaseException | None = None
    while True:
        try:
            for number, handler in handlers.items():
                _exchange(number, _signal.getsignal(number), handler)
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
