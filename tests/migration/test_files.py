"""Checkpoints of strangers: nothing in them is run, and the output is whole or not there."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adafactor import Adafactor
from adafactor.cli import main
from tests.migration.peers import parameters, steps

SHAPES: list[tuple[int, ...]] = [(4, 3), (5,)]


def checkpoint(path: Path, wrap: str | None = None) -> Path:
    params = parameters(SHAPES)
    theirs = torch.optim.Adafactor(params)
    steps(theirs, params, range(3))
    torch.save(theirs.state_dict() if wrap is None else {"epoch": 3, wrap: theirs.state_dict()}, path)
    return path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_a_file_is_converted_and_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = checkpoint(tmp_path / "in.pt"), tmp_path / "out.pt"
    assert main(["migrate", str(source), str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: 2 parameters in 1 group, from torch.optim.Adafactor\n" and "ε₁" in said.err
    Adafactor(parameters(SHAPES)).load_state_dict(load(out))


def test_all_else_in_the_checkpoint_is_kept(tmp_path: Path) -> None:
    source, out, third = checkpoint(tmp_path / "in.pt", "optimizer"), tmp_path / "out.pt", tmp_path / "third.pt"
    assert main(["migrate", str(source), str(out), "--from", "torch", "--to", "transformers"]) == 0
    converted = load(out)
    assert converted["epoch"] == 3 and "exp_avg_sq_row" in converted["optimizer"]["state"][0]
    assert main(["migrate", str(source), str(third), "--from", "torch", "--key", "optimizer"]) == 0
    assert "row" in load(third)["optimizer"]["state"][0]


class Bomb:
    """A pickle that runs a command when it is loaded by pickle."""

    def __init__(self, path: Path):
        """Take the file that proves it."""
        self.path = path

    def __reduce__(self) -> Any:
        """What pickle would call."""
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "legacy"])
def test_a_malicious_pickle_is_not_run(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, proof = tmp_path / "in.pt", tmp_path / "out.pt", tmp_path / "proof"
    if how == "pickle":
        source.write_bytes(pickle.dumps({"state": {}, "param_groups": [Bomb(proof)]}))
    else:
        torch.save({"state": {0: Bomb(proof)}}, source, _use_new_zipfile_serialization=how == "torch.save")
    assert main(["migrate", str(source), str(out), "--from", "torch"]) == 2
    assert "nothing else is read from a checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]


def hostile(kind: str, folder: Path) -> Path:
    """A small file that asks for much."""
    path, one = folder / "in.pt", torch.ones(1)
    group = {"params": [0], "beta2_decay": -0.8, "d": 1.0, "eps": (None, 1e-3), "weight_decay": 0.0, "lr": 0.1}
    entry: dict[str, Any] = {"step": 3.0, "row_var": one.view(1, 1), "col_var": one.view(1, 1)}
    deep: Any = []
    for _ in range(20_000 if kind == "a deep list" else 0):
        deep = [deep]
    if kind == "10¹² elements by strides of 0":
        entry |= {"row_var": one.expand(10**9, 1000, 1), "col_var": one.expand(10**9, 1, 1000)}
    elif kind == "a step of 10⁴⁰⁰":
        entry["step"] = 10**400
    elif kind == "a meta tensor":
        entry["row_var"] = torch.empty(10**6, 1, device="meta")
    elif kind == "a sparse tensor":
        entry["row_var"] = one.view(1, 1).to_sparse()
    elif kind == "words for numbers":
        group |= {"eps": None, "d": [1.0]}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    torch.save({"optimizer": {"state": {0: entry}, "param_groups": [group]}, "more": deep}, path)
    sys.setrecursionlimit(limit)
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("10¹² elements by strides of 0", "has the shape (1000000000, 1000, 1), but not as many elements"),
        ("a deep list", "out.pt cannot be written (RecursionError"),
        ("a step of 10⁴⁰⁰", "not a number of steps"),
        ("a meta tensor", "on meta, not dense"),
        ("a sparse tensor", "is torch.sparse_coo on cpu, not dense"),
        ("words for numbers", "cannot be converted (TypeError"),
    ],
)
def test_a_hostile_file_is_one_line(
    kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hostile(kind, tmp_path)
    assert main(["migrate", str(path), str(tmp_path / "out.pt"), "--from", "torch"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1] and all(line.startswith("adafactor migrate: ") for line in said)
    assert not (tmp_path / "out.pt").exists()


BROKEN = {"empty": b"", "text": b"hello", "zip": b"PK\x03\x04 and no more", "truncated": b""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["folder", "out.pt"],
            "folder is a folder: name the file with the optimizer in it, such as folder/optimizer.pt",
        ),
        *(([f"{name}.pt", "out.pt", "--from", "torch"], f"{name}.pt is not a whole") for name in BROKEN),
        (["sgd.pt", "out.pt"], "cannot be told whose state this is, which has 'lr', 'momentum', 'dampening'"),
        (["in.pt", "nowhere/out.pt", "--from", "torch"], "nowhere is not a folder"),
        (["in.pt", "in.pt", "--from", "torch"], "in.pt exists: nothing is overwritten"),
        (["in.pt", "out.pt", "--from", "torch", "--key", "model"], "the checkpoint has no 'model'"),
        (["two.pt", "out.pt", "--from", "torch"], "holds several optimizers (a, b): choose one with --key"),
        (["weights.pt", "out.pt", "--from", "torch"], "holds no optimizer's state dict"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("in.pt"))
    torch.save({"a": load(Path("in.pt")), "b": load(Path("in.pt"))}, "two.pt")
    torch.save({"weight": torch.ones(3)}, "weights.pt")
    torch.save(torch.optim.SGD(parameters(SHAPES)).state_dict(), "sgd.pt")
    Path("folder").mkdir()
    for name, content in BROKEN.items():
        Path(f"{name}.pt").write_bytes(content)
    half = Path("in.pt").read_bytes()
    Path("truncated.pt").write_bytes(half[: len(half) // 2])
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["migrate", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "in.pt")

    def half(value: Any, name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    assert main(["migrate", str(source), str(tmp_path / "out.pt")]) == 2
    assert list(tmp_path.iterdir()) == [source]
