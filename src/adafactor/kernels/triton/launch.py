"""A launch of a kernel for one parameter, the same in every step but for its first arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}
AT_MOST = {"maxnreg": 128} if torch.version.cuda else {}  # registers of a thread: two programs a multiprocessor


class Launch:
    """A kernel, its grid and its arguments.

    Triton looks at every argument of a launch to find the compiled kernel for it, which takes longer than the launch.
    The arguments that are kept here do not change, so it is asked once. Of the gradient alone something may change that
    a kernel is compiled for: whether it begins at a multiple of 16 bytes.
    """

    def __init__(self, kernel: Any, programs: tuple[int, ...], given: int, values: Mapping[str, Any], **options: Any):
        """Launch `kernel[programs]`: so many arguments are given each time, all others by their names now."""
        self.kernel, self.programs = kernel, (*programs, 1, 1)[:3]
        self.constants = [repr(values[name]) for name in kernel.arg_names if name.isupper()]
        self._rest = tuple(values[name] for name in kernel.arg_names[given:])
        self.options = OPTIONS | options
        self._direct: dict[bool, Any] = {}  # by whether the gradient is aligned; the compiled kernel, or None: not so

    def __call__(self, is_aligned: bool, *given: Tensor | None) -> None:
        """Launch it on the current stream."""
        if direct := self._direct.get(is_aligned):
            try:
                direct(*given, *self._rest)
                return
            except TypeError:  # this Triton's compiled kernels want other arguments; nothing was launched
                self._direct[is_aligned] = None
        compiled = self.kernel[self.programs](*given, *self._rest, **self.options)
        if compiled is not None and is_aligned not in self._direct:  # the interpreter has none
            self._direct[is_aligned] = compiled[self.programs]
