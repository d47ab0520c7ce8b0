"""The Triton backend: its tests in the interpreter, which need a process of their own, and what needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adafactor import Adafactor
from tests.distributed.launch import found
from tests.kernels import needs

ROOT = Path(__file__).parents[2]
FOLDERS = [f"tests/{name}" for name in ("interpreted", "step", "attack", "backward")]
needs.triton()


def start(folder: str, marker: str) -> subprocess.Popen[str]:
    """Begin to run a folder of tests in Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, folder]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], marker: str) -> None:
    """Wait for it; what it found is what this test finds."""
    output, _ = process.communicate()
    none_has_the_marker = process.returncode == 5 and marker == "slow"
    assert process.returncode == 0 or none_has_the_marker, output[-8000:]


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All folders at once: one process does not keep a machine busy."""
    running = {folder: start(folder, "not slow") for folder in FOLDERS}
    yield running
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("folder", FOLDERS)
def test_in_the_interpreter(folder: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    finish(processes[folder], "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_in_the_interpreter_at_length(folder: str) -> None:
    finish(start(folder, "slow"), "slow")


@pytest.mark.parametrize("fast", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_sharded_in_the_interpreter(fast: str) -> None:
    """On two ranks, beside the same steps on one process."""
    table = found(["interpreted"], ranks=2, TRITON_INTERPRET="1", FAST=fast)["interpreted"]
    assert len(table) == (2 if fast == "1" else 6) and all(len(row) == 6 for row in table.values())
    assert not {f"{name} {case}": e for name, row in table.items() for case, e in row.items() if not e < 1e-5}


def test_without_the_interpreter_a_tensor_on_a_cpu_is_refused_by_name() -> None:
    p = torch.ones(4, 3, requires_grad=True)
    optimizer = Adafactor([("weight", p)], backend="triton")
    p.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="cannot step weight.*it is on cpu"):
        optimizer.step()
