"""`adafactor --help` tells a newcomer what it is for, and a mistake gets one line that names what is allowed."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from adafactor.cli import COMMANDS, EXAMPLES, main

WRONG = [
    ("nonsense", "choose from 'plan', 'migrate', "),
    ("plan gpt2 --adamw quick", "choose from 'fused', 'foreach', 'loop'"),
    ("plan gpt2 --shards many", "'many' must be a whole number"),
    ("plan gpt2 --budget much", "such as 24GiB"),
    ("plan gpt2 --shards 8 --bandwidth 1GB --latency soon", "--latency: 'soon' must be a number"),
    ("plan gpt2 --shards 8 --bandwidth 1GB --latency -1", "--latency -1 must be a number of microseconds, 0 or more"),
    ("plan gpt2 --shards 8 --bandwidth fast --latency 1", "'fast' must be a size above 0 such as 24GiB"),
    ("plan gpt2 --shards 8 --bandwidth 1GB", "--shards, --bandwidth and --latency: times need all three"),
    ("plan gpt2 --bandwidth 1GB --latency 1", "--shards, --bandwidth and --latency: times need all three"),
    ("plan gpt2 --budget 8", "8 of what? Write 8GiB"),
    ("plan gpt2 --budjet 8GiB", "plan: unrecognized arguments: --budjet 8GiB (did you mean --budget?)"),
    ("--nothing", "adafactor: unrecognized arguments: --nothing"),
    ("plan ..:x", "..:x raised TypeError"),
    ("plan tests.tools.test_cli:lazy", "0.weight has no shape before a first forward pass"),
    ("plan tests.tools.test_cli:nested", "p is a nested tensor"),
    ("plan tests.tools.test_cli:raises", "raised KeyError: 'nobody knows'"),
    ("plan gpt5", "one of gpt2, "),
    ("plan", "name a model: gpt2, "),
    ("plan gpt2 --settings none", "there are adamw-float32, "),
    ("bench --suite gpt2", "run `python -m benchmarks` in a checkout of it"),
    ("migrate nowhere.pt out.pt", "nowhere.pt is not a file"),
    ("migrate in.pt out.pt --from keras", "choose from 'torch', 'transformers', "),
    ("migrate in.pt out.pt --to keras", "choose from 'torch', 'transformers', "),
]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def nested() -> nn.Module:
    module = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.p = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cpu"))
    return module


def raises() -> nn.Module:
    raise KeyError("nobody knows")


def said(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit status, and what was printed and complained of."""
    try:
        status = main(shlex.split(words))
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("words", ["", "--help"])
def test_the_command_alone_lists_what_it_can_do(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(words, capsys)
    assert status == 0 and all(f"\n  adafactor {name}" in out for name in COMMANDS)
    assert all(text in " ".join(out.split()) for _, text in COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_what_it_is_for_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = said(f"{name} --help", capsys)
    assert status == 0 and COMMANDS[name][1] in out
    lines = EXAMPLES[name].strip().splitlines()
    assert lines and all(line.strip() in out and line.split()[:2] == ["adafactor", name] for line in lines)


@pytest.mark.parametrize(("words", "allowed"), WRONG, ids=[words for words, _ in WRONG])
def test_a_mistake_gets_one_line_that_names_what_is_allowed(
    words: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(words, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("adafactor") and err.count("\n") == 1 and allowed in err


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_in_any_command_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(COMMANDS[name][0]), "run", interrupted)
    files = {"migrate": "in.pt out.pt --from torch", "run": "train.py"}.get(name, "")
    assert said(f"{name} {files}", capsys) == (130, "", f"adafactor {name}: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """The read end is closed before anything is written, which a `| head -1` does now and then."""
    read, write = os.pipe()
    os.close(read)
    child = subprocess.run([sys.executable, "-m", "adafactor", "plan", "gpt2"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (child.returncode, child.stderr) == (141, b"")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_plain_signs_are_printed_where_the_encoding_lacks_others(encoding: str) -> None:
    words = "plan gpt2 --budget 1G --batch 1 --tokens 128 --shards 2".split()
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"}
    child = subprocess.run([sys.executable, "-m", "adafactor", *words], env=environment, capture_output=True)
    out = child.stdout.decode(encoding)
    assert (child.returncode, child.stderr) == (0, b"") and "?" not in out
    rule, sign = ("─────", "−") if encoding == "utf-8" else ("-----", "-")
    assert rule in out and f" {sign}" in out


def test_a_plot_without_matplotlib_is_refused_before_anything_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert said("plan gpt2 --plot plan.png", capsys)[:2] == (2, "")
