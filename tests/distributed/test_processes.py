"""What only processes can show: a launch by torchrun, a rank that is killed, torch without DTensors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import torchrun

ALONE = """
import sys
import torch, adafactor
assert "torch.distributed.tensor" not in sys.modules
sys.modules["torch.distributed.tensor"] = None  # importing it fails, as where torch is built without it
p = torch.ones(3, 4, requires_grad=True)
p.grad = torch.ones(3, 4)
optimizer = adafactor.Adafactor([p], backend="eager")
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
"""


def test_a_plain_step_imports_no_dtensor_and_works_where_torch_has_none() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", ALONE], check=True)


def test_two_processes_train_save_and_go_on(tmp_path: Path) -> None:
    """FSDP2 after and inside backward, state dicts from the first rank, `async_save`, ZeRO and a pipeline."""
    status, output = torchrun(["-m", "tests.distributed.processes", str(tmp_path)], ranks=2)
    assert status == 0, output[-6000:]


def results(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("RESULT "))


def test_a_rank_that_is_killed_inside_backward_leaves_no_half_step_and_an_exact_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    status, output = torchrun(["-m", "tests.distributed.killed", str(folder)], ranks=2)
    assert status != 0 and output.count("SURVIVED") == 1 and len(results(output)) == 2, output[-6000:]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    status, resumed = torchrun(["-m", "tests.distributed.killed", str(folder / "2")], ranks=2)
    assert status == 0 and results(resumed) == results(output), resumed[-6000:]


def losses(folder: Path, ranks: int, *words: str, begins: str = "step") -> dict[int, float]:
    """Of examples/fsdp2.py."""
    status, output = torchrun(["examples/fsdp2.py", "--folder", str(folder), *words], ranks)
    assert status == 0 and re.search(rf"^{begins}\b", output, re.M), output[-6000:]
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in lines}


@pytest.mark.slow
def test_the_example_continues_on_other_ranks_with_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", 1, "--steps", "40")
    moved = losses(tmp_path / "moved", 2, "--steps", "20")
    moved |= losses(tmp_path / "moved", 4, "--tp", "2", "--steps", "40", begins="continues at step 20 of 40")
    assert list(alone) == list(moved) == [10, 20, 30, 40]
    assert all(abs(alone[step] - moved[step]) < 2e-3 for step in alone)
    assert alone[40] < 3.5 < alone[10]
    lean = losses(tmp_path / "moved", 2, "--lean", "--steps", "70", begins="continues at step 40 of 70")
    assert list(lean) == [50, 60, 70] and lean[70] < moved[40] - 0.2  # bfloat16 weights that step inside backward
