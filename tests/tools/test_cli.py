"""A mistake at the command line names what is allowed, and every console can show what is printed."""

from __future__ import annotations

import shlex

import pytest

from adafactor.cli import main
from tests.launch import python

WRONG = [
    ("nonsense", "choose from"),
    ("plan gpt2 --shards many", "argument --shards: invalid int value: 'many'"),
    ("plan gpt2 --budget 24", "such as 24GiB"),
    ("plan gpt5", "or one of gpt2, "),
    ("plan", "the following arguments are required: model"),
    ("migrate nowhere.pt out.pt", "nowhere.pt is not a file"),
    ("migrate in.pt out.pt --from keras", "choose from"),
]


@pytest.mark.parametrize(("words", "allowed"), WRONG, ids=[words for words, _ in WRONG])
def test_a_mistake_names_what_is_allowed(words: str, allowed: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(shlex.split(words))
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and allowed in err.splitlines()[-1]


def test_nothing_but_ascii_is_printed() -> None:
    words = "plan gpt2 --budget 1G --batch 1 --tokens 128 --shards 2 --all".split()
    child = python("-m", "adafactor", *words, environment={"PYTHONIOENCODING": "ascii"})
    assert (child.returncode, child.stderr) == (0, "") and child.stdout.isascii()
