"""`adafactor --help` tells a newcomer what it is for, and a mistake gets one line that names what is allowed."""

from __future__ import annotations

import shlex

import pytest

from adafactor.cli import COMMANDS, EXAMPLES, main

WRONG = [
    ("nonsense", "choose from 'plan', 'migrate', "),
    ("plan gpt2 --adamw quick", "choose from 'fused', 'foreach', 'loop'"),
    ("plan gpt2 --shards many", "'many' must be a whole number"),
    ("plan gpt2 --budget much", "such as 24GiB"),
    ("plan gpt5", "one of gpt2, "),
    ("plan", "name a model: gpt2, "),
    ("plan gpt2 --settings none", "there are adamw-float32, "),
    ("bench --suite none", "there are bert, gpt2, "),
    ("bench --contender none", "there are sgd, "),
    ("bench --rounds 0", "at least 1"),
    ("migrate nowhere.pt out.pt", "nowhere.pt is not a file"),
    ("migrate in.pt out.pt --from keras", "choose from 'torch', 'transformers', "),
    ("migrate in.pt out.pt --from torch --arguments 3", "not a JSON object"),
]


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
    assert status == 0 and "adafactor plan gpt2" in out
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
