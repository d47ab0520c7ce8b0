"""Runs a program of this folder in a process of its own, with a time limit, and reads what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # on a busy machine; a hang is a failure, not a wait


def found(program: str, *words: object, **environment: str) -> dict[str, Any]:
    """What a program prints in its last line, as JSON."""
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{program}", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
