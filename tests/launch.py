"""Runs programs in processes of their own, with a time limit: one, or several under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 600  # for a launch on a busy machine; a hang is a failure, not a wait


def python(
    *words: str, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python …` does, with one thread and without a network."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def torchrun(
    words: list[str], ranks: int, seconds: float = SECONDS, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """The exit status and output of `torchrun … words`; past the time limit all of its processes are killed."""
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # this tree, also where another is installed
    limits = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": here}
    limits["PYTHONFAULTHANDLER"] = "1"  # a crash in native code says where each thread was
    with subprocess.Popen(
        [*head, *words],
        cwd=ROOT,
        env={**os.environ, **limits, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise TimeoutError(f"{words} took more than {seconds} s:\n{output[-4000:]}") from None
    return process.returncode, output
