"""What files of tests share: what they cannot do without, and a Python of their own."""

from __future__ import annotations

import os
import subprocess
import sys
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


def python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own does, which says every warning."""
    return subprocess.run(
        [sys.executable, "-W", "always", *command],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
