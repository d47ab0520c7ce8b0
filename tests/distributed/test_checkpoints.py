"""Checkpoints move between shardings and numbers of ranks, and survive a killed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import found, torchrun

LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_continues_under_another_sharding(ranks: int) -> None:
    moves: dict[str, Any] = found(["checkpoints"], ranks)["checkpoints"]
    assert len(moves) >= 5
    for name, move in moves.items():
        assert move["error"] < LIMIT[name.split(" | ")[0]], name
        assert move.get("dtypes", ["torch.float32"]) == ["torch.float32"], name
    one = moves["float32 | one device → FSDP2"]
    assert one["same keys"] and one["and back"]


def link(ranks: int, how: str, first: int, last: int, before: str, after: Path, **environment: str) -> int:
    words = ["-m", "tests.distributed.checkpoints", how, str(first), str(last), before, str(after)]
    status, output = torchrun(words, ranks, environment=environment)
    assert status == 0 or "DIE" in environment, output[-6000:]
    return status


@pytest.mark.slow
def test_a_run_moves_over_2_4_1_and_2_by_2_ranks_and_back(tmp_path: Path) -> None:
    chain = [(2, "FSDP2"), (4, "FSDP2"), (1, "FSDP2"), (4, "FSDP2 × TP"), (2, "TP"), (2, "FSDP2")]
    before = "-"
    for step, (ranks, how) in enumerate(chain):
        link(ranks, how, step, step + 1, before, tmp_path / str(step))
        before = str(tmp_path / str(step))
        assert json.loads((tmp_path / str(step) / "error.json").read_text()) < 1e-5, (ranks, how)


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    link(2, "FSDP2", 0, 2, "-", tmp_path / "first")
    assert link(2, "FSDP2", 2, 4, str(tmp_path / "first"), tmp_path / "second", DIE="1") != 0
    assert not (tmp_path / "second" / ".metadata").exists(), "an incomplete checkpoint does not look complete"
    link(2, "FSDP2", 2, 4, str(tmp_path / "first"), tmp_path / "second")
    assert json.loads((tmp_path / "second" / "error.json").read_text()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_silent_rank_leaves_the_others_with_an_error_of_torch(how: str) -> None:
    _, output = torchrun(["-m", "tests.distributed.silence", how], ranks=2)
    line = next(line for line in output.splitlines() if "RAISED" in line)
    assert "unchanged True" in line
    assert "Timed out" in line or "Connection closed" in line or "timed out" in line.lower()


def lightning(ranks: int, steps: int, save: str = "-", load: str = "-", way: str = "after") -> list[float]:
    status, output = torchrun(["-m", "tests.distributed.lightning_run", str(steps), save, load, way], ranks)
    assert status == 0, output[-6000:]
    losses: list[float] = json.loads(next(x for x in output.splitlines() if x.startswith("LOSSES ")).split(" ", 1)[1])
    return losses


@pytest.mark.slow
def test_lightning_resumes_with_fsdp_on_another_number_of_ranks_with_the_losses_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    pytest.importorskip("lightning")
    folder = str(tmp_path / "saved.ckpt")
    whole, first = lightning(2, 4), lightning(2, 2, save=folder)
    assert first == whole[:2]
    assert lightning(2, 4, load=folder) == whole[2:]
    assert lightning(4, 4, load=folder) == pytest.approx(whole[2:], rel=1e-5)
    assert lightning(2, 4, load=folder, way="inside") == whole[2:]


def in_backward(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of `tests.distributed.killed` on three ranks, and what the ranks that are left told."""
    load = words[0] if words else "-"
    status, output = torchrun(["-m", "tests.distributed.killed", str(folder), load, *words[1:]], ranks=3)
    lines = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("RESULT ", "SURVIVOR "))]
    assert lines, output[-6000:]
    return status, sorted(map(json.loads, lines), key=str)


@pytest.fixture(scope="module")
def uninterrupted_in_backward(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    status, ranks = in_backward(tmp_path_factory.mktemp("whole"))
    assert status == 0 and len(ranks) == 3
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("place", ["hook", "between"])
@pytest.mark.parametrize("failure", ["killed", "stopped"])
def test_a_rank_that_is_lost_inside_backward_leaves_errors_weights_of_whole_steps_and_an_exact_checkpoint(
    failure: str, place: str, tmp_path: Path, uninterrupted_in_backward: list[dict[str, Any]]
) -> None:
    """Lost after the gradients of a block were reduced, or between the two reductions of its step."""
    status, survivors = in_backward(tmp_path, "-", failure, place)
    assert status != 0 and len(survivors) == 2
    errors = {"killed": ("Connection closed", "Connection reset"), "stopped": ("Timed out",)}[failure]
    for survivor in survivors:
        assert any(error in survivor["raised"] for error in errors)
        stepped = [name for name, keys in survivor["changed"].items() if "step" in keys]
        assert len(stepped) == 6 and all(name.startswith("blocks.2.") for name in stepped)
        for name, keys in survivor["changed"].items():
            assert name in stepped and {"weight", "momentum_of_update"} < set(keys)
        assert survivor["again"].startswith("RuntimeError: ")  # what is left cannot be taken for a step of the whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    status, resumed = in_backward(tmp_path, str(tmp_path / "2"))
    assert status == 0
    assert [rank["bits"] for rank in resumed] == [rank["bits"] for rank in uninterrupted_in_backward]
    losses = sorted(rank["losses"][2:] for rank in uninterrupted_in_backward)
    assert sorted(rank["losses"] for rank in resumed) == losses
