"""Warnings that point at the user's line, however deep in the package they are raised."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__)


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the first caller outside this package and outside torch, which calls `step` through wrappers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
