"""The tests of a step once more, in a process whose Triton kernels are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [f"tests/{name}" for name in ("interpreted", "step", "attack", "backward")]
RUNNING: list[subprocess.Popen[str]] = []  # what `conftest` has started


def start(marker: str) -> subprocess.Popen[str]:
    """Begin to run the folders in Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *FOLDERS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for it; what it found is what the test that asks finds."""
    output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]
