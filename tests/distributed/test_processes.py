"""What only processes can show: a launch by torchrun, a rank that is killed, checkpoints of another launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun


def test_two_processes_train_save_and_go_on(tmp_path: Path) -> None:
    """FSDP2 after and inside backward, state dicts from the first rank, `async_save`, ZeRO and a pipeline."""
    status, output = torchrun(["-m", "tests.distributed.processes", str(tmp_path)], ranks=2)
    assert status == 0, output[-6000:]


def run(folder: Path, *words: str, ranks: int = 2) -> tuple[int, str]:
    return torchrun(["-m", "tests.distributed.killed", str(folder), *words], ranks)


def results(output: str) -> list[list[float]]:
    return sorted(json.loads(line.split(" ", 1)[1]) for line in output.splitlines() if line.startswith("RESULT "))


@pytest.mark.parametrize(
    ("signal", "place"),
    [
        ("SIGKILL", "between"),
        pytest.param("SIGKILL", "hook", marks=pytest.mark.slow),
        pytest.param("SIGSTOP", "between", marks=pytest.mark.slow),
        pytest.param("SIGSTOP", "hook", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_inside_backward_leaves_no_half_step_and_an_exact_checkpoint(
    signal: str, place: str, tmp_path: Path
) -> None:
    """Lost after the gradients of a block were reduced, or between the two reductions of its step."""
    status, output = run(tmp_path / "lost", "-", signal, place)
    assert status != 0 and output.count("SURVIVED") == 1, output[-6000:]
    folder = tmp_path / "lost"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    status, resumed = run(folder, str(folder / "2"))
    assert status == 0, resumed[-6000:]
    status, whole = run(tmp_path / "whole", "-")
    assert len(results(whole)) == 2 and results(resumed) == results(whole)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_with_four_and_one(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    status, output = run(folder, "-")
    assert status == 0, output[-6000:]
    (_, expected, _), _ = results(output)
    for ranks in (4, 1):
        status, output = run(tmp_path / str(ranks), str(folder / "3"), ranks=ranks)
        assert status == 0 and len(results(output)) == ranks, output[-6000:]
        assert results(output)[0][1] == pytest.approx(expected, rel=1e-5)


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
