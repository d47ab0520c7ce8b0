"""`adafactor plan` as it is read: the table, and advice that trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from adafactor import Adafactor, cli, plan, step_in_backward
from adafactor.planning.show import format_size, parse_size
from tests.tools.training import OURS, Decoder

ROOT = Path(__file__).parents[2]


def test_a_budget_says_which_settings_fit_and_what_is_left() -> None:
    result = plan("gpt2-xl", budget="16GiB", device="cpu")
    fitting = {line.key for line in result.fitting}
    assert "adamw-float32" not in fitting and {"adamw-bfloat16", "adafactor-float32"} <= fitting
    assert result.advice.startswith("Take adafactor, float32 (")


@pytest.mark.parametrize("key", OURS)
def test_the_lines_to_write_run_and_are_what_the_plan_counted(key: str) -> None:
    model = Decoder(2, 16, 50)
    line = plan(model).line(key)
    names: dict[str, Any] = {"model": model, "Adafactor": Adafactor, "step_in_backward": step_in_backward}
    exec("\n".join(line.write), names)
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids, ids).loss.backward()
    names["optimizer"].step()
    assert names["optimizer"].param_groups[0]["relative"] is False  # the second way, for pretrained weights
    state = [v for state in names["optimizer"].state.values() for v in state.values()]
    assert line.bytes is not None and sum(v.nbytes for v in state) == line.bytes.optimizer
    assert sum(p.nbytes for p in model.parameters()) == line.bytes.weights


@pytest.mark.parametrize("budget", ["24GiB", "80GiB"])  # in bfloat16 with stochastic rounding, and in float32
def test_with_lora_the_lines_to_write_take_absolute_steps_since_b_starts_at_zero(budget: str) -> None:
    advice = plan("llama-8b", budget=budget, lora=4).advice
    (code,) = re.findall(r"^    (optimizer = .*)$", advice, flags=re.M)
    assert "relative=False, lr=1e-3, lr_decay=None" in code and ("stochastic" in code) == (budget == "24GiB")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": "3GiB"}, "too large for 3.00 GiB. Try --lora 16, or --shards 2."),
        ({"budget": "1MiB", "shards": 2, "lora": 8}, "Try --shards 4."),
        ({"budget": "5GiB", "batch": 8, "tokens": 1024}, "Try --checkpointing, or a smaller --batch, or --lora 16, or"),
    ],
)
def test_where_nothing_fits_the_advice_says_what_is_missing_and_what_would_help(
    arguments: dict[str, Any], said: str
) -> None:
    result = plan("gpt2-xl", device="cpu", **arguments)
    assert said in result.advice


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5mib", 3 * 2**19), ("800MB", 8 * 10**8), ("8G", 2**33), (9, 9)],
)
def test_sizes_are_read_as_written(text: int | str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["24X", "24", "GiB", "-1GiB", "0", "24 gibibytes", "1e9", True, 0])
def test_a_size_that_could_mean_two_things_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="must be a size above 0 such as 24GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (2**20, "1.00 MiB"), (-(10**9), "-954 MiB"), (25 * 2**30, "25.0 GiB")],
)
def test_sizes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(("more", "rows"), [([], 8), (["--all"], 21)])
def test_the_table_has_eight_rows_and_all_of_them_on_request(
    more: list[str], rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "llama-70b", "--budget", "80G", *more]) == 1
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert len(lines) == 1 + rows and lines[0].split()[-2:] == ["total", "left"]
    assert more or max(map(len, lines)) <= 100


@pytest.mark.parametrize(("budget", "status"), [("16G", 0), ("1G", 1)])
def test_the_exit_status_says_whether_anything_fits(
    budget: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "gpt2-xl", "--budget", budget]) == status


@pytest.mark.parametrize(
    "words",
    [["llama-9b"], ["mymodel:build"], ["llama-7b", "--shards", "0"], ["gpt2", "--budget", "24"]],
    ids=str,
)
def test_a_mistake_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("adafactor plan: ") and err.count("\n") == 1


def test_the_documents_show_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs" / "plan.md").read_text()
    shown = re.findall(r"`adafactor (plan [^`]*)`\s+prints[^\n]*\n\n```text\n(.*?)```", document, flags=re.S)
    assert shown
    for words, text in shown:
        cli.main(words.split())
        assert capsys.readouterr().out.rstrip() == text.rstrip()
