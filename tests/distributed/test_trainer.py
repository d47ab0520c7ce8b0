"""transformers' Trainer with FSDP2 and DDP: it resumes with the losses of an uninterrupted run, steps in backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

SAVED = "checkpoint-2"


def launched(ranks: int, sharding: str, way: str, folder: Path, load: str = "-") -> tuple[int, str]:
    return torchrun(["-m", "tests.distributed.trainer_run", sharding, way, str(folder), load], ranks)


def trained(ranks: int, sharding: str, way: str, folder: Path, load: str = "-") -> dict[str, Any]:
    status, output = launched(ranks, sharding, way, folder, load)
    assert status == 0, output[-6000:]
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    assert len(result["losses"]) == 4
    return result


@pytest.mark.parametrize("sharding", ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "DDP"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_also_on_another_number_of_ranks(
    sharding: str, tmp_path: Path
) -> None:
    """With two micro-batches to a step, momentum and a schedule."""
    whole = trained(2, sharding, "after", tmp_path / "whole")
    assert whole["kind"] == ("DistributedDataParallel" if sharding == "DDP" else "FSDPGPT2LMHeadModel")
    load = str(tmp_path / "whole" / SAVED)
    again = trained(2, sharding, "after", tmp_path / "again", load)
    assert again["losses"] == whole["losses"] and again["weights"] == whole["weights"]
    moved = trained(4, sharding, "after", tmp_path / "moved", load)
    assert moved["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_steps_inside_backward_end_on_the_same_bits_and_so_does_a_resumed_run(tmp_path: Path) -> None:
    after, inside, run = (trained(2, "SHARDED_STATE_DICT", way, tmp_path / way) for way in ("after", "inside", "run"))
    resumed = trained(2, "SHARDED_STATE_DICT", "inside", tmp_path / "resumed", str(tmp_path / "inside" / SAVED))
    for each in (inside, run, resumed):
        assert each["losses"] == after["losses"] and each["weights"] == after["weights"]
        assert not any(each["bytes of gradients"])
    assert all(after["bytes of gradients"])


@pytest.mark.parametrize("way", ["inside", "run"])
def test_steps_inside_backward_are_refused_under_ddp_with_the_ways_that_work(way: str, tmp_path: Path) -> None:
    status, output = launched(2, "DDP", way, tmp_path)
    assert status != 0 and "RESULT" not in output
    assert "needs a model that FSDP2 has sharded (transformers: fsdp=True)" in output


def test_accelerate_trains_with_ddp_on_cpus_whatever_is_asked_for(tmp_path: Path) -> None:
    """As the docs say. When this fails, Accelerate has FSDP2 on CPUs, and `open_gate` is no longer needed."""
    assert trained(2, "SHARDED_STATE_DICT", "closed", tmp_path)["kind"] == "DistributedDataParallel"
