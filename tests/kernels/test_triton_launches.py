"""Triton's own launcher, down to a stand-in for NVIDIA's driver: direct launches are given what Triton would give."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import needs
from tests.launch import python

needs.triton()

COMPILER = shutil.which("cc")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each step launched."""
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("there is no C compiler, or no Linux")
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).with_name("libcuda_stub.c")
    options = "-O2 -shared -fPIC -Wl,-soname,libcuda.so.1".split()
    subprocess.run([COMPILER, *options, "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    own = {"STUB": str(folder), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    child = python("-m", "tests.kernels.launched", environment=own)
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_a_direct_launch_is_given_what_triton_gives_the_same_compiled_kernel(steps: dict[str, Any]) -> None:
    assert steps["by Triton"]["looked"] and not steps["direct"]["looked"]
    assert steps["direct"]["seen"] == steps["by Triton"]["seen"]
    assert steps["launches"] == sum(len(steps[name]["seen"]) for name in steps if name != "launches")
    kernels = {"first_pass", "columns", "conclude", "last_pass", "small_step"}
    assert {one[0] for one in steps["direct"]["seen"]} == kernels
