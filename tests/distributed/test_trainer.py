"""transformers' Trainer, sharded: resumed with the losses of an uninterrupted run, or in backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import torchrun

pytestmark = pytest.mark.slow

SHARDED = "SHARDED_STATE_DICT"


def launched(ranks: int, *words: object) -> Any:
    """What `trainer_run` printed, which describes the words."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    status, output = torchrun(["-m", "tests.distributed.trainer_run", *map(str, words)], ranks)
    if status:
        raise RuntimeError(output[-6000:])
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT ")).split(" ", 1)[1])


@pytest.mark.parametrize("sharding", [SHARDED, "FULL_STATE_DICT", "DDP"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_also_on_another_number_of_ranks(
    sharding: str, tmp_path: Path
) -> None:
    """With two micro-batches to a step, momentum and a schedule."""
    whole = launched(2, sharding, "after", tmp_path / "whole", "-")
    assert whole["kind"] == ("DistributedDataParallel" if sharding == "DDP" else "FSDPGPT2LMHeadModel")
    load = tmp_path / "whole" / "checkpoint-2"
    assert launched(2, sharding, "after", tmp_path / "again", load) == whole
    moved = launched(4, sharding, "after", tmp_path / "moved", load)
    assert moved["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_steps_inside_backward_end_on_the_same_bits_and_so_does_a_resumed_run(tmp_path: Path) -> None:
    ways = ("after", "inside", "run")
    after, inside, run = (launched(2, SHARDED, way, tmp_path / way, "-") for way in ways)
    load = tmp_path / "inside" / "checkpoint-2"
    assert inside == run == launched(2, SHARDED, "inside", tmp_path / "resumed", load)
    assert inside == {**after, "in backward": True} and not after["in backward"]


@pytest.mark.parametrize("way", ["inside", "run"])
def test_steps_inside_backward_are_refused_under_ddp_with_the_ways_that_work(way: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"needs a model that FSDP2 has sharded \(transformers: fsdp=True\)"):
        launched(2, "DDP", way, tmp_path, "-")
