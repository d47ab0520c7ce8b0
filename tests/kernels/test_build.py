"""The compiled part where it is missing, and on a processor that has fewer instructions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launch import python

ROOT = Path(__file__).parents[2]
STEP = """
import torch
from adafactor import Adafactor
p = torch.ones(40, 50, requires_grad=True); p.grad = torch.ones_like(p)
optimizer = Adafactor([p], backend={backend!r})
optimizer.step(); optimizer.step()
print("stepped", p.mean().item() < 1)
"""
LIBRARY = "\nfrom adafactor.kernels.cpu.library import library; print(library().path.name)"


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_each_instruction_set_has_a_library_that_steps(capability: str) -> None:
    done = python("-c", STEP.format(backend="cpu") + LIBRARY, environment={"ATEN_CPU_CAPABILITY": capability})
    assert done.returncode == 0, done.stderr
    stepped, name = done.stdout.splitlines()
    wanted = {"default": ("baseline",), "avx2": ("avx2", "baseline"), "avx512": ("avx512", "avx2", "baseline")}
    assert stepped == "stepped True" and name in [f"libadafactor_{one}.so" for one in wanted[capability]]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_oracle_agrees_with_every_instruction_set(capability: str) -> None:
    tests = "tests/step/test_oracle.py", "tests/kernels/test_cpu.py", "tests/attack/test_ranges.py"
    done = python(
        "-m", "pytest", "-q", "--only-backend", "cpu", *tests, environment={"ATEN_CPU_CAPABILITY": capability}
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_the_compiled_part_auto_says_once_what_to_install_and_a_named_backend_raises(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src/adafactor", tmp_path / "adafactor", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    where = {"PYTHONPATH": str(tmp_path)}
    done = python("-c", STEP.format(backend="auto"), environment=where)
    assert done.stdout == "stepped True\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "install a C++17 compiler" in done.stderr
    failed = python("-c", STEP.format(backend="cpu"), environment=where)
    assert failed.returncode and 'ImportError: backend="cpu" cannot be used' in failed.stderr


@pytest.mark.slow
def test_a_build_without_a_compiler_is_a_pure_wheel(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.so", "build", "lab", "runs", "site", "*.egg-info")
    )
    command = "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(copy)
    done = python(*command, environment={"CC": "/nowhere/cc", "CXX": "/nowhere/c++"})
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
