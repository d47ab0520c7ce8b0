"""The largest tensor that is made while something runs; also what the tests of memory look with."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made while it is on."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Compare the storages of what comes out with those of what went in."""
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known]
        self.bytes = max([self.bytes, *(t.nbytes for t in new)])
        return out
