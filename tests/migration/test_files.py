"""Checkpoints of strangers: nothing in them is run, and the output is whole or not there."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adafactor import Adafactor
from adafactor.cli import main
from adafactor.migration import files
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
    assert main(["migrate", str(source), str(out), "--from", "torch"]) == 0
    said = capsys.readouterr()
    assert "2 parameters in 1 groups" in said.out and "ε₁" in said.err
    Adafactor(parameters(SHAPES)).load_state_dict(load(out))
    assert os.stat(out).st_mode & 0o777 == os.stat(source).st_mode & 0o777


def test_all_else_in_the_checkpoint_is_kept(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "in.pt", "optimizer"), tmp_path / "out.pt"
    assert main(["migrate", str(source), str(out), "--from", "torch", "--to", "transformers"]) == 0
    converted = load(out)
    assert converted["epoch"] == 3 and "exp_avg_sq_row" in converted["optimizer"]["state"][0]
    assert main(["migrate", str(source), str(out), "--from", "torch", "--key", "optimizer", "--force"]) == 0
    assert "row" in load(out)["optimizer"]["state"][0]


def test_safetensors_in_and_out(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    source, middle, out = checkpoint(tmp_path / "in.pt"), tmp_path / "ours.safetensors", tmp_path / "out.safetensors"
    assert main(["migrate", str(source), str(middle), "--from", "torch"]) == 0
    Adafactor(parameters(SHAPES)).load_state_dict(files.read(middle))
    assert main(["migrate", str(middle), str(out), "--from", "adafactor", "--to", "torch"]) == 0
    assert torch.equal(files.read(out)["state"][1]["variance"], load(source)["state"][1]["variance"])


def test_a_tree_in_a_safetensors_file_with_its_arguments_on_the_command_line(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    source, weights, out = tmp_path / "tree.safetensors", tmp_path / "model.pt", tmp_path / "out.pt"
    one = torch.zeros(1)
    kernel = {"v_row/dense/kernel": torch.ones(3), "v_col/dense/kernel": torch.ones(4), "v/dense/kernel": one.clone()}
    bias = {"v_row/dense/bias": one.clone(), "v_col/dense/bias": one.clone(), "v/dense/bias": torch.ones(3)}
    save_file({f"0/{key}": value for key, value in {"count": torch.tensor(7), **kernel, **bias}.items()}, source)
    torch.save(torch.nn.Linear(4, 3).state_dict(), weights)
    arguments = ["--arguments", '{"learning_rate": 0.01, "min_dim_size_to_factor": 2}', "--params", str(weights)]
    paths = ["--paths", '{"weight": ["dense/kernel", [1, 0]], "bias": "dense/bias"}']
    assert main(["migrate", str(source), str(out), "--from", "optax", *arguments, *paths]) == 0
    model = torch.nn.Linear(4, 3)
    ours = Adafactor(model.named_parameters())
    ours.load_state_dict(load(out))
    assert ours.state[model.weight]["row"].shape == (3, 1) and ours.state[model.weight]["step"] == 7


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
    elif kind == "a float8 tensor":
        entry["row_var"] = one.view(1, 1).to(torch.float8_e4m3fn)
    elif kind == "a sparse tensor":
        entry["row_var"] = one.view(1, 1).to_sparse()
    elif kind == "words for numbers":
        group |= {"eps": None, "d": [1.0]}
    elif kind == "parameters that are lists":
        group["params"] = [[0]]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    torch.save({"optimizer": {"state": {0: entry}, "param_groups": [group]}, "more": deep}, path)
    sys.setrecursionlimit(limit)
    if kind in ("JSON 100,000 deep", "a name with ²"):
        path = folder / "in.safetensors"
        groups = "[" * 100_000 if kind == "JSON 100,000 deep" else json.dumps([group])
        place = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
        text = json.dumps({"__metadata__": {"param_groups": groups}, "state/²/row_var": place}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("10¹² elements by strides of 0", "has the shape (1000000000, 1000, 1), but not as many elements"),
        ("JSON 100,000 deep", "is not a whole safetensors file (RecursionError"),
        ("a deep list", "out.pt cannot be written (RecursionError"),
        ("a name with ²", "a state for parameter '²', which is in no group"),
        ("a step of 10⁴⁰⁰", "not a number of steps"),
        ("a meta tensor", "on meta, not dense"),
        ("a float8 tensor", "is of dtype torch.float8_e4m3fn, not a floating-point tensor of 16, 32 or 64 bits"),
        ("a sparse tensor", "is torch.sparse_coo on cpu, not dense"),
        ("words for numbers", "cannot be converted (TypeError"),
        ("parameters that are lists", "has no list 'params' of numbers or names"),
    ],
)
def test_a_hostile_file_is_one_line(
    kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind in ("JSON 100,000 deep", "a name with ²"):
        pytest.importorskip("safetensors")
    path = hostile(kind, tmp_path)
    assert main(["migrate", str(path), str(tmp_path / "out.pt"), "--from", "torch"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1] and all(line.startswith("adafactor migrate: ") for line in said)
    assert not (tmp_path / "out.pt").exists()


WRONG: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "zip": b"PK\x03\x04 and no more",
    "truncated": b"",
    "in.safetensors": b"\xff" * 40,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_or_truncated_file_is_refused_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / (kind if kind.endswith("safetensors") else "in.pt"), tmp_path / "out.pt"
    if kind.endswith("safetensors"):
        pytest.importorskip("safetensors")
    whole = checkpoint(tmp_path / "whole.pt").read_bytes()
    source.write_bytes(whole[: len(whole) // 2] if kind == "truncated" else WRONG[kind])
    assert main(["migrate", str(source), str(out), "--from", "torch"]) == 2
    assert f"{source} is not a whole" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.pt", "out.pt", "--from", "torch"], "missing.pt is not a file"),
        (["in.pt"], "name out.pt or say --in-place, one of the two"),
        (["in.pt", "out.pt", "--in-place"], "name out.pt or say --in-place, one of the two"),
        ([".", "out.pt"], ". is a folder without optimizer.pt, optimizer.bin"),
        (["folder", "out.pt"], "holds several checkpoints: name one of optimizer.bin, optimizer_1.bin"),
        (["adamw.pt", "out.pt", "--from", "torch"], "this is the state of Adam or AdamW"),
        (["adamw.pt", "out.pt", "--from", "adamw", "--to", "torch"], "nothing like"),
        (["in.pt", "out.pt", "--key", "²"], "the checkpoint has no '²'"),
        (["nan.pt", "out.pt"], "'step' of parameter 0 is nan, not a number of steps"),
        (["sgd.pt", "out.pt"], "cannot be told whose state this is, which has 'lr', 'momentum', 'dampening'"),
        (["in.pt", "nowhere/out.pt", "--from", "torch"], "nowhere is not a folder"),
        (["in.pt", "in.pt", "--from", "torch"], "exists; --force replaces it"),
        (["in.pt", "out.pt", "--from", "torch", "--key", "model"], "the checkpoint has no 'model'"),
        (["in.pt", "out.pt", "--from", "transformers"], "this is the state of torch.optim.Adafactor"),
        (["two.pt", "out.pt", "--from", "torch"], "holds several optimizers (a, b): choose one with --key"),
        (["weights.pt", "out.pt", "--from", "torch"], "holds no optimizer's state dict"),
        (["in.pt", "out.pt", "--from", "torch", "--params", "in.pt"], "not a model's state dict"),
        (["in.pt", "out.pt", "--from", "torch", "--params", "weights.pt"], "has 2 parameters, params has 1"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(Path("in.pt"))
    torch.save({"a": load(Path("in.pt")), "b": load(Path("in.pt"))}, "two.pt")
    torch.save({"weight": torch.ones(3)}, "weights.pt")
    nan = load(Path("in.pt"))
    nan["state"][0]["step"] = torch.tensor(float("nan"))
    torch.save(nan, "nan.pt")
    for name, make in (("adamw.pt", torch.optim.AdamW), ("sgd.pt", torch.optim.SGD)):
        params = parameters(SHAPES)
        theirs = make(params)
        steps(theirs, params, range(2))
        torch.save(theirs.state_dict(), name)
    Path("folder").mkdir()
    for name in ("optimizer.bin", "optimizer_1.bin"):
        checkpoint(Path("folder") / name)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["migrate", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_in_place_the_old_file_is_kept_beside_the_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    source = checkpoint(folder / "optimizer.pt")
    source.chmod(0o600)
    before = source.read_bytes()
    assert main(["migrate", str(folder), "--in-place"]) == 0
    assert "from torch.optim.Adafactor; what it was is" in capsys.readouterr().out
    Adafactor(parameters(SHAPES)).load_state_dict(load(source))
    kept = folder / "optimizer.pt.before"
    assert kept.read_bytes() == before and source.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer.pt", "optimizer.pt.before"]
    assert main(["migrate", str(folder), "--in-place"]) == 2
    assert "optimizer.pt.before exists, from an earlier conversion" in capsys.readouterr().err
    assert kept.read_bytes() == before


def test_a_conversion_in_place_that_was_stopped_leaves_the_old_file_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path / "optimizer.pt")
    before = source.read_bytes()
    with monkeypatch.context() as stopped:
        stopped.setattr(os, "replace", lambda *_: os._exit)  # the last thing that happens
        main(["migrate", str(source), "--in-place"])
    assert source.read_bytes() == before
    assert main(["migrate", str(source), "--in-place"]) == 0
    assert (tmp_path / "optimizer.pt.before").read_bytes() == before and "row" in load(source)["state"][0]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.pt"
    files.write({"old": 1}, path)

    def half(value: Any, name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space left"):
        files.write({"new": 2}, path)
    assert load(path) == {"old": 1} and list(tmp_path.iterdir()) == [path]
