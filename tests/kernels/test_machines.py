"""Other machines, as far as they can be had here: plain threads, a processor without AVX; what is said meanwhile."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from adafactor.kernels.progress import progress, say

machine_code = pytest.importorskip("adafactor.kernels.cpu.native.machine_code", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
STEPS = """
import hashlib, torch
from adafactor import Adafactor
torch.set_num_threads(3)
torch.manual_seed(0)
shapes = (700, 300), (300, 700), (200_000,), (20, 30), (7,)
params = [torch.randn(shape).requires_grad_() for shape in shapes]
optimizer = Adafactor(params, backend="cpu")
for _ in range(3):
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest())
import threading
print(sum(thread.name == "adafactor" for thread in threading.enumerate()))
"""
GENERIC = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=3600,
    )


def test_plain_threads_take_the_same_step_bit_for_bit() -> None:
    """As on Windows and macOS, whose torch has no OpenMP that we can call."""
    plain, torchs = run("-c", STEPS, ADAFACTOR_THREADS="plain"), run("-c", STEPS)
    assert plain.returncode == torchs.returncode == 0, plain.stderr + torchs.stderr
    (bits, threads), (expected, none) = plain.stdout.split(), torchs.stdout.split()
    assert bits == expected
    assert (threads, none) == ("2", "0"), "one of the two did not take the threads that it should"


@pytest.mark.slow
def test_everything_holds_with_plain_threads() -> None:
    tests = ("tests/kernels/test_native.py", "tests/kernels/test_cpu.py", "tests/step/test_training.py")
    done = run("-m", "pytest", "-q", "-m", "not slow", *tests, ADAFACTOR_THREADS="plain")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_the_oracle_agrees_with_code_for_a_processor_that_has_only_what_all_have(tmp_path: Path) -> None:
    """No AVX, no fused multiply-add: nothing is assumed but 64-bit addresses and atomic additions."""
    where = {"NUMBA_CACHE_DIR": str(tmp_path), **GENERIC}
    done = run(
        "-m", "pytest", "-q", "-m", "not slow", "tests/step/test_oracle.py", "tests/kernels/test_cpu.py", **where
    )
    assert done.returncode == 0, done.stdout[-3000:]
    code = b"".join(file.read_bytes() for file in tmp_path.rglob("*.o"))
    assert code, "nothing was compiled there"


def test_code_for_one_processor_is_not_taken_for_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home on several machines; an image that is built on one and run on another."""
    keys = []
    for name, features in ((None, None), ("generic", ""), ("generic", "+avx2")):
        monkeypatch.setattr(machine_code.config, "CPU_NAME", name)
        monkeypatch.setattr(machine_code.config, "CPU_FEATURES", features)
        machine_code.key.cache_clear()
        keys.append(machine_code.key())
    machine_code.key.cache_clear()
    assert len(set(keys)) == 3


STRANGE = """
from numba.core.codegen import CPUCodeLibrary
del CPUCodeLibrary.serialize_using_object_code
import torch
from adafactor import Adafactor
p = torch.ones(4, 5, requires_grad=True); p.grad = torch.ones_like(p)
Adafactor([p]).step()
print("stepped", p.mean().item() < 1)
"""


def test_with_a_numba_that_has_changed_inside_plain_torch_steps_and_says_why() -> None:
    done = run("-W", "always", "-c", STRANGE)
    assert done.stdout == "stepped True\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "serialize_using_object_code" in done.stderr


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO], ids=["a terminal", "a file"])
def test_progress_is_one_line_on_a_terminal_and_two_in_a_file(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = stream()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "_load", lambda name, code: None)
    code = {name: partial(bytes, 9) for name in ("first", "second", "third")}
    machine_code._compile(code, "the step")
    text = said.getvalue()
    if said.isatty():
        assert text.count("\n") == 1 and "\r" in text and "2 of 3 (second)" in text
    else:
        assert text.count("\n") == 2 and "\r" not in text
    assert text.splitlines()[-1].strip("\r ").startswith("adafactor: compiled the step in")
    assert text.endswith(f"kept in {tmp_path / 'adafactor'}\n")
    machine_code._compile(code, "the step")
    assert said.getvalue() == text, "what is found needs no word"


def test_without_a_console_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress("the step", after=0.0) as tell:
        tell("first")
    say("done")


USER = """
import ctypes, numpy as np, numba
from tests.faults import compile_one
from adafactor.kernels.cpu.native import compiling
from adafactor.kernels.cpu.native.intrinsics import view
def ours(address):
    values = view(address, 0, 4, np.float64)
    values[0] = min(values[1], values[2]) + max(values[1], 3.0) + abs(values[3])
compiling.machine_code(ours, "ours", arguments=1)
@numba.njit(nogil=True, error_model="numpy")
def users(values):
    return min(values[1], values[2]) + max(values[1], 3.0) + abs(values[3]) + values[1:3].sum()
print(users(np.array([0.0, 1.0, 2.0, -5.0])), type(users).__name__, users.overloads != {})
"""


def test_what_a_user_compiles_afterwards_is_not_affected() -> None:
    """Our way to compile is ours alone: it leaves Numba as it was."""
    done = run("-c", USER)
    assert done.stdout == "12.0 CPUDispatcher True\n", done.stderr
