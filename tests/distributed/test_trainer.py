"""transformers' Trainer and Lightning, sharded: resumed with the losses of an uninterrupted run, or in backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import torchrun

pytestmark = pytest.mark.slow

SHARDED = "SHARDED_STATE_DICT"


def launched(program: str, ranks: int, *words: object) -> Any:
    """What one of them printed; the words are those that the program describes."""
    for package in ("transformers", "accelerate") if program == "trainer_run" else ("lightning",):
        pytest.importorskip(package)
    status, output = torchrun(["-m", f"tests.distributed.{program}", *map(str, words)], ranks)
    if status:
        raise RuntimeError(output[-6000:])
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT ")).split(" ", 1)[1])


@pytest.mark.parametrize("sharding", [SHARDED, "FULL_STATE_DICT", "DDP"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_also_on_another_number_of_ranks(
    sharding: str, tmp_path: Path
) -> None:
    """With two micro-batches to a step, momentum and a schedule."""
    whole = launched("trainer_run", 2, sharding, "after", tmp_path / "whole", "-")
    assert whole["kind"] == ("DistributedDataParallel" if sharding == "DDP" else "FSDPGPT2LMHeadModel")
    load = tmp_path / "whole" / "checkpoint-2"
    assert launched("trainer_run", 2, sharding, "after", tmp_path / "again", load) == whole
    moved = launched("trainer_run", 4, sharding, "after", tmp_path / "moved", load)
    assert moved["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_steps_inside_backward_end_on_the_same_bits_and_so_does_a_resumed_run(tmp_path: Path) -> None:
    ways = ("after", "inside", "run")
    after, inside, run = (launched("trainer_run", 2, SHARDED, way, tmp_path / way, "-") for way in ways)
    load = tmp_path / "inside" / "checkpoint-2"
    assert inside == run == launched("trainer_run", 2, SHARDED, "inside", tmp_path / "resumed", load)
    assert inside == {**after, "in backward": True} and not after["in backward"]


@pytest.mark.parametrize("way", ["inside", "run"])
def test_steps_inside_backward_are_refused_under_ddp_with_the_ways_that_work(way: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"needs a model that FSDP2 has sharded \(transformers: fsdp=True\)"):
        launched("trainer_run", 2, "DDP", way, tmp_path, "-")


def test_lightning_resumes_with_fsdp_on_another_number_of_ranks_and_steps_inside_backward(tmp_path: Path) -> None:
    folder = tmp_path / "saved.ckpt"
    whole = launched("lightning_run", 2, 4, "-", "-", "after")
    assert launched("lightning_run", 2, 2, folder, "-", "after") == whole[:2]
    for way in ("after", "inside"):
        assert launched("lightning_run", 2, 4, "-", folder, way) == whole[2:]
    assert launched("lightning_run", 4, 4, "-", folder, "after") == pytest.approx(whole[2:], rel=1e-5)
