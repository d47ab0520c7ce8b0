"""examples/fsdp2.py runs, continues on another number of ranks, and in bfloat16 with steps inside backward."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun


def losses(folder: Path, ranks: int, *words: str, begins: str = "step") -> dict[int, float]:
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
