"""What files of tests cannot do without."""

from __future__ import annotations

from pathlib import Path

import pytest

from adafactor import kernels

ROOT = Path(__file__).parents[2]


def triton() -> None:
    """Skip a file where there is no Triton, or one that is too old."""
    try:
        kernels.check("triton")
    except ImportError as problem:
        pytest.skip(str(problem), allow_module_level=True)
