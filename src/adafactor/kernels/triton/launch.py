"""A launch of a kernel for one parameter, the same in every step but for its first arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}
AT_MOST = {"maxnreg": 128} if torch.version.cuda else {}  # registers of a thread: two programs a multiprocessor
ALIGNMENT = 16  # bytes


class Launch:
    """A kernel, its grid and its arguments.

    Triton looks at every argument of a launch to find the compiled kernel for it, which takes longer than the launch.
    The arguments that are kept here do not change, and those that are given are aligned, so it is asked once.
    """

    def __init__(self, kernel: Any, programs: tuple[int, ...], given: int, values: Mapping[str, Any], **options: Any):
        """Launch `kernel[programs]`: so many arguments are given each time, all others by their names now."""
        self.kernel, self.programs, self.options = kernel, (*programs, 1, 1)[:3], OPTIONS | options
        self._rest = tuple(values[name] for name in kernel.arg_names[given:])
        self._direct: Any = None

    def __call__(self, *given: Tensor | None) -> None:
        """Launch it on the current stream."""
        if self._direct:
            try:
                self._direct(*given, *self._rest)
                return
            except TypeError:  # this Triton's compiled kernels want other arguments; nothing was launched
                self._direct = False
        compiled = self.kernel[self.programs](*given, *self._rest, **self.options)
        if self._direct is None and compiled is not None:  # the interpreter has none
            self._direct = compiled[self.programs]


def aligned(g: Tensor) -> Tensor:
    """Return a gradient, or a copy that lies likewise where it does not begin at a multiple of 16 bytes.

    So no kernel has a variant for those.
    """
    if g.data_ptr() % ALIGNMENT == 0:
        return g
    extent = 1 + sum((length - 1) * stride for length, stride in zip(g.shape, g.stride(), strict=True))
    return g.as_strided((extent,), (1,)).clone().as_strided(g.shape, g.stride())
