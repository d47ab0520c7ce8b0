"""`adafactor --help` tells a newcomer what it is for, and a mistake names what is allowed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from adafactor.cli import COMMANDS, main

WRONG = [
    ("nonsense", "choose from"),
    ("plan gpt2 --shards many", "argument --shards: invalid int value: 'many'"),
    ("plan gpt2 --budget much", "such as 24GiB"),
    ("plan gpt2 --budjet 8GiB", "unrecognized arguments: --budjet 8GiB"),
    ("plan gpt5", "or one of gpt2, "),
    ("plan", "the following arguments are required: model"),
    ("migrate nowhere.pt out.pt", "nowhere.pt is not a file"),
    ("migrate in.pt out.pt --from keras", "choose from"),
    ("migrate in.pt out.pt --to keras", "choose from"),
]


def said(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit status, and what was printed and complained of."""
    try:
        status = main(shlex.split(words))
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_what_there_is_and_each_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said("--help", capsys)
    assert status == 0 and all(text in " ".join(out.split()) for _, text, _ in COMMANDS.values())
    for name, (_, text, example) in COMMANDS.items():
        status, out, _ = said(f"{name} --help", capsys)
        assert status == 0 and text in " ".join(out.split()) and f"example: {example}" in " ".join(out.split())
        assert example.split()[:2] == ["adafactor", name]


@pytest.mark.parametrize(("words", "allowed"), WRONG, ids=[words for words, _ in WRONG])
def test_a_mistake_names_what_is_allowed(words: str, allowed: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(words, capsys)
    assert (status, out) == (2, "") and allowed in err and "Traceback" not in err


@pytest.mark.parametrize("words", ["plan gpt2 --budget 1G --batch 1 --tokens 128 --shards 2 --all", "plan --help"])
def test_nothing_but_ascii_is_printed(words: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "adafactor", *words.split()],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (child.returncode, child.stderr) == (0, b"") and child.stdout.isascii()
