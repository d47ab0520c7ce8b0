"""Triton's interpreter patches the language for every function that a kernel calls; once for a kernel is enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's function that patches, made to do so once for the kernel that is running."""
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
