"""Where compiled code cannot be loaded or made, `auto` steps with plain torch, and `cpu` says what is wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.attack.helpers import run_python

STEP = """
import sys, warnings
import torch
from adafactor import Adafactor
warnings.simplefilter("ignore")
p = torch.nn.Parameter(torch.ones(6, 4))
optimizer = Adafactor([p], backend=sys.argv[1])
p.grad = torch.ones(6, 4)
optimizer.step()
print("stepped to", round(p[0, 0].item(), 6))
"""


def step(backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", STEP, backend, **environment)


def assert_stepped(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0 and "stepped to 0.99" in run.stdout, run.stderr


def assert_named(run: subprocess.CompletedProcess[str], *words: str) -> None:
    """One of our errors, which names the culprit."""
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(("ImportError", "RuntimeError", "ValueError")) and any(word in last for word in words), last


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_numba_that_does_not_compile_is_named_or_not_needed(backend: str) -> None:
    run = step(backend, NUMBA_DISABLE_JIT="1")
    if backend == "cpu" and run.returncode:
        assert_named(run, "NUMBA_DISABLE_JIT")
    else:
        assert_stepped(run)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what has been compiled."""
    folder = tmp_path_factory.mktemp("numba")
    assert_stepped(step("cpu", NUMBA_CACHE_DIR=str(folder)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 100], ids=["empty", "cut off"])
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_files_that_a_power_failure_has_cut_off_do_not_stop_a_step(backend: str, kept: int, cache: Path) -> None:
    files = list(cache.rglob("*.o"))
    assert files
    whole = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}
    for file in files:
        file.write_bytes(whole[file][:kept])
    try:
        run = step(backend, NUMBA_CACHE_DIR=str(cache))
        if backend == "cpu" and run.returncode:
            assert_named(run, str(cache), "NUMBA_CACHE_DIR")
        else:
            assert_stepped(run)
    finally:
        for file, content in whole.items():
            file.write_bytes(content)
