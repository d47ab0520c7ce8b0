"""`adafactor warm`: what it compiles is there for a later process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adafactor import cli

STEP = """
import torch
from adafactor import Adafactor
p = torch.ones(6, 4, dtype=torch.bfloat16, requires_grad=True); p.grad = torch.ones_like(p)
Adafactor([p], backend="cpu").step()
print("stepped")
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_after_it_a_training_compiles_nothing(tmp_path: Path) -> None:
    warm = run("-m", "adafactor", "warm", "--dtype", "bfloat16", folder=tmp_path)
    assert warm.returncode == 0, warm.stderr
    assert "bfloat16" in warm.stdout and str(tmp_path) in warm.stdout
    step = run("-c", STEP, folder=tmp_path)
    assert step.stdout == "stepped\n" and step.stderr == ""


def test_it_says_what_it_made_ready_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    assert cli.main(["warm", "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "float32" in said and "compiled functions" in said


def test_a_dtype_that_there_is_not_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["warm", "--dtype", "int8"])
    said = capsys.readouterr().err
    assert "int8" in said and "bfloat16" in said
