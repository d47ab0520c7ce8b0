"""`adafactor warm`: what it compiles is there for a later process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adafactor import cli
from adafactor.cli.warm import CARDS
from tests.kernels import needs

STEP = """
import torch
from adafactor import Adafactor
p = torch.ones(6, 4, dtype=torch.bfloat16, requires_grad=True); p.grad = torch.ones_like(p)
Adafactor([p], backend="cpu").step()
print("stepped")
"""


# Two tensors in place of all that the check steps; the launches of a step for sm_90, but for what a driver would do.
FILL = """
from adafactor.check.selftest import TensorSpec
from adafactor.cli import main, warm
warm.TENSORS = (TensorSpec((16, 512)), TensorSpec((48,)))
words = "warm --device sm_90 --dtype float32 --momentum none update --momentum-dtype int8 float32"
raise SystemExit(main(words.split()))
"""
LAUNCH = """
import torch
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from adafactor import Adafactor
from adafactor.kernels import triton as backend
from adafactor.kernels.triton import executor

CompiledKernel.run = property(lambda kernel: lambda *_: print(kernel.metadata.target.arch, kernel.name))
CompiledKernel.function, CompiledKernel.launch_metadata = None, lambda *_: None
target = lambda: GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_target=target, get_current_device=lambda: 0, get_current_stream=lambda _: 7
))
backend.INTERPRETED, executor.SHARED_MEMORY = True, 233472
params = [torch.ones(shape, requires_grad=True) for shape in ((900, 512), (160,), (20, 512))]
for keywords in ({}, {"beta1": 0.9, "momentum_dtype": "int8"}):
    optimizer = Adafactor(params, backend="triton", lr=1e-3, **keywords)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
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


@pytest.mark.slow
def test_what_is_compiled_for_a_card_is_what_a_step_there_launches(tmp_path: Path) -> None:
    """With other tensors of the same kinds, in another process: every launch finds its kernel in the cache."""
    needs.triton()
    warm = run("-c", FILL, folder=tmp_path)
    assert warm.returncode == 0, warm.stderr
    assert f"kernels for sm_90 are in {tmp_path}" in warm.stdout
    assert "float32, momentum update in int8, rounding nearest" in warm.stdout
    assert warm.stdout.count("momentum none") == 1
    before = sorted(tmp_path.rglob("*"))
    assert any(file.suffix == ".cubin" for file in before)
    step = run("-c", LAUNCH, folder=tmp_path)
    assert step.returncode == 0, step.stderr
    launched = step.stdout.splitlines()
    assert {"90 first_pass", "90 fold", "90 last_pass"} <= set(launched) and len(launched) >= 2 * 5
    assert sorted(tmp_path.rglob("*")) == before, "something was compiled anew"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "sm_91"], "'sm_91' (choose from 'sm_80', 'sm_86', "),
        (["--device", "cuda"], "'cuda' (choose from 'sm_80', "),
        (["--model", "gpt2"], "--model is for --device"),
        (["--device", "sm_90", "--model", "gpt5"], "'gpt5' must be module:function"),
    ],
)
def test_a_card_or_model_that_there_is_not_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "gpt5" in words:
        needs.triton()
    try:
        status = cli.main(["warm", *words])
    except SystemExit as end:
        status = int(end.code or 0)
    err = capsys.readouterr().err
    assert status == 2 and said in err and err.count("\n") == 1


def test_the_cards_are_those_that_the_kernels_are_compiled_for_in_the_tests() -> None:
    needs.triton()
    from tests.kernels.triton_ahead import SHARED, TARGETS

    ahead = {name: (target.arch, SHARED[name]) for name, target in TARGETS.items() if target.backend == "cuda"}
    assert ahead == CARDS
