"""Runs the programs of this folder in processes of their own, under a time limit, and reads what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # on a busy machine; a hang is a failure, not a wait


def start(program: str, *words: object, path: str = "", **environment: str) -> subprocess.Popen[str]:
    """Start `python -m tests.faults.program words …`; adafactor is taken from `path` if that is given."""
    places = [path, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.faults.{program}", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> dict[str, Any]:
    """What a program prints in its last line, as JSON; past the time limit all of its processes are killed."""
    try:
        output, problems = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise TimeoutError(f"{process.args!r} took more than {seconds} s") from None
    assert process.returncode == 0, f"exit status {process.returncode}\n{output[-2000:]}\n{problems[-4000:]}"
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def found(program: str, *words: object, path: str = "", **environment: str) -> dict[str, Any]:
    """Run a program to its end."""
    return finish(start(program, *words, path=path, **environment))


def kill(process: subprocess.Popen[str]) -> None:
    """End a program and what it has started, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
