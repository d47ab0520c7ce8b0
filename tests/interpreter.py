"""Triton's kernels in every process of the tests, interpreted on a CPU, and made quick enough for that.

Triton decides when a kernel's file is imported: `tests/conftest.py` imports this first. With TRITON_INTERPRET=0 kernels
are compiled as for a card, and `backend="triton"` refuses tensors on a CPU.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

# On a machine with a GPU, `pytest tests/gpu` runs the compiled kernels.
IS_FOR_A_CARD = any("tests/gpu" in word for word in sys.argv) and torch.cuda.is_available()
os.environ.setdefault("TRITON_INTERPRET", "0" if IS_FOR_A_CARD else "1")
IS_THERE = find_spec("triton") is not None and os.environ["TRITON_INTERPRET"] == "1"


def make_quick() -> None:
    """Patch the language once for a kernel; one kernel at a time, silent about infinities as a card is."""
    import numpy as np
    from triton.runtime import interpreter

    run, rewrite, lock = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.rewrite, threading.RLock()

    def run_alone(self: Any, *arguments: Any, **options: Any) -> None:
        with lock, np.errstate(all="ignore"):  # ranks are threads, and the interpreter has one program at a time
            run(self, *arguments, **options)

    def rewrite_alone(self: Any) -> Any:
        with lock:  # Python 3.11 counts the depth of a tree that it parses for all threads together
            return rewrite(self)

    interpreter.GridExecutor.__call__ = run_alone
    interpreter.InterpretedFunction.rewrite = rewrite_alone
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter patches for each function that a kernel calls, which takes most of its time."""
    import triton.language as tl

    patched: list[set[str]] = []

    class Scope:
        def __init__(self, inner: Any):
            self.inner = inner

        def restore(self) -> None:
            patched.clear()
            self.inner.restore()

    def once(function: Any) -> Scope | None:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        seen = {name for name, lang in (("tl", tl), ("core", tl.core)) if lang in modules}
        if patched and seen <= patched[0]:
            return None
        scope = patch(function)
        if patched:
            patched[0] |= seen
            return None
        patched.append(seen)
        return Scope(scope)

    return once
