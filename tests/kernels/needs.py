"""What a file of tests cannot do without."""

from __future__ import annotations

import pytest

from adafactor import kernels


def triton() -> None:
    """Skip a file where there is no Triton, or one that is too old."""
    try:
        kernels.check("triton")
    except ImportError as problem:
        pytest.skip(str(problem), allow_module_level=True)
