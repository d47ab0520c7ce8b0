"""Each tool once, in seconds; `make test-tools` has them at length. The lab's own is `test_lab.py`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

import studies
from adafactor import Adafactor
from adafactor.cli import COMMANDS, main
from benchmarks.contenders import CONTENDERS, parameters


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert COMMANDS[name][2] in capsys.readouterr().out.replace("\n", " ")


def test_a_plan_counts_the_state_that_the_optimizer_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2"]) == 0
    said = capsys.readouterr().out
    assert "124,439,808 parameters" in said and "adafactor, bfloat16, stochastic, in backward" in said
    assert main(["plan", "gpt2", "--budget", "1MiB"]) == 1, "nothing fits"


def test_a_checkpoint_of_adamw_becomes_one_that_we_load(tmp_path: Path) -> None:
    model = nn.Linear(6, 5)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 6)).sum().backward()
    adamw.step()
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, tmp_path / "theirs.pt")
    assert main(["migrate", str(tmp_path / "theirs.pt"), str(tmp_path / "ours.pt")]) == 0
    ours = Adafactor(model.named_parameters(), beta2=0.999)
    ours.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True)["optimizer"])
    assert float(ours.state[model.weight]["step"]) == 1 and bool(ours.state[model.weight]["row"].all())


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_a_contender_of_the_benchmarks_steps(name: str) -> None:
    params = parameters([(40, 24), (7,)], "float32")
    before = [p.detach().clone() for p in params]
    CONTENDERS[name].make(params).step()
    assert not any(torch.equal(p, x) for p, x in zip(params, before, strict=True))


def test_every_study_can_be_imported() -> None:
    names = [module.name for module in pkgutil.walk_packages(studies.__path__, "studies.")]
    assert names and all(importlib.import_module(name) for name in names if not name.endswith("__main__"))
