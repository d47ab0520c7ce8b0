"""`adafactor plan`: what the shapes say, checked against optimizers that were made."""

from __future__ import annotations

import pytest
import torch

from adafactor import Adafactor, cli
from adafactor.planning import PRESETS, llama, plan_shards, shapes_of
from adafactor.traffic import fully_sharded


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4))


def test_the_state_is_that_of_an_optimizer_that_was_made() -> None:
    shapes = list(llama(2, 16, 40, 8, 50, tied=False))
    optimizer = Adafactor([torch.zeros(shape, requires_grad=True) for shape in shapes])
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert plan_shards("small", shapes, 4).state_bytes == held


def test_a_ring_sends_an_all_reduce_twice_and_a_reduce_scatter_once() -> None:
    shapes = [(8, 6), (5,)]
    line = plan_shards("two", shapes, 4)
    assert line.optimizer_sent == 2 * fully_sharded(shapes, 4).bytes * 3 // 4
    assert line.gradients_sent == 2 * 53 * 3 // 4
    assert plan_shards("two", shapes, 1).share == 0


@pytest.mark.parametrize(("name", "billions"), [("llama-1b", 1.24), ("llama-7b", 6.74), ("llama-70b", 70.55)])
def test_the_presets_have_their_models_size(name: str, billions: float) -> None:
    assert plan_shards(name, shapes_of(name), 8).parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert name in PRESETS


def test_the_command_takes_a_preset_or_ones_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "llama-7b", f"{__name__}:model", "--shards", "2"]) == 0
    out = capsys.readouterr().out
    assert "| llama-7b | 6,738,415,616 |" in out and f"| {__name__}:model | 36 |" in out


@pytest.mark.parametrize("words", [["llama-8b"], ["llama-7b", "--shards", "0"]], ids=str)
def test_a_mistake_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith("adafactor plan: ")
