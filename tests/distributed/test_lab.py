"""The lab under torchrun: FSDP2 on two processes trains as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import records
from tests.distributed.launch import ROOT, torchrun

WORDS = ["-m", "lab", "run", "O", "--scale", "tiny", "--corpus", "generated", "--no-warmup", "--quiet"]


def record(folder: Path) -> dict[str, Any]:
    (found,) = records.read(folder / "records")
    return found


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    subprocess.run(
        [sys.executable, *WORDS, "--cache", str(alone), "--records", str(alone / "records")], cwd=ROOT, check=True
    )
    status, output = torchrun([*WORDS, "--cache", str(together), "--records", str(together / "records")], ranks=2)
    assert status == 0, output[-6000:]
    one, two = record(alone), record(together)
    assert len(one["curve"]) == len(two["curve"]) == 60
    apart = [abs(loss - same) for (_, loss), (_, same) in zip(one["curve"], two["curve"], strict=True)]
    # float32 sums in another order; the difference grows with the steps, as it does between any two machines
    assert max(apart[:10]) < 2e-4 and max(apart) < 2e-2
    assert abs(one["dev_loss"] - two["dev_loss"]) < 2e-2
    for key in ("state_bytes", "parameter_bytes", "steps"):
        assert one[key] == two[key]
