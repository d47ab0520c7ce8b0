"""`adafactor plan` as it is read: the advice, the table in every width, the pictures, and what the docs show of it."""

from __future__ import annotations

import html
import json
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from adafactor import cli, plan
from adafactor.planning import shapes_of, show
from adafactor.planning.communication import fully_sharded
from tests.tools.test_planning import Odd

ROOT = Path(__file__).parents[2]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))


def test_a_budget_says_which_settings_fit_and_what_is_left() -> None:
    result = plan("gpt2-xl", budget="16GiB")
    fitting = {line.key for line in result.fitting}
    assert "adamw-float32" not in fitting and {"adamw-bfloat16", "adafactor-float32"} <= fitting
    line = result.line("adafactor-backward")
    assert line.left(16 * 2**30) == 16 * 2**30 - line.whole.total
    assert (
        "17 of 20 settings fit in 16.0 GiB. Take adafactor, float32 (3.79 GiB left for activations)." in result.advice
    )


def test_the_advice_ends_with_the_lines_to_write() -> None:
    assert plan("gpt2-xl", budget="4GiB").advice.split("Write:\n\n")[1].splitlines() == [
        "    model.bfloat16()",
        '    optimizer = Adafactor(model.named_parameters(), rounding="stochastic")',
        "    step_in_backward(model, optimizer)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": "3GiB"}, ["in backward, 369 MiB too large.", "With --shards 2: ", "fully_shard(model)"]),
        ({"budget": "1MiB", "shards": 2}, ["nor 1,024 times as many devices would be enough."]),
        ({"budget": "8GiB", "batch": 4, "tokens": 1024}, ["With --checkpointing: ", "gradient_checkpointing_enable()"]),
        ({"budget": "5GiB", "batch": 8, "tokens": 1024}, ["With --batch 2 --checkpointing: "]),
        ({"budget": "3GiB", "settings": ["torch-float32"], "shards": 2}, ["None of these settings can be sharded."]),
    ],
)
def test_where_nothing_fits_the_advice_says_what_is_missing_and_what_would_do(
    arguments: dict[str, Any], said: list[str]
) -> None:
    result = plan("gpt2-xl", device="cpu", **arguments)
    assert not result.fitting and all(text in result.advice for text in said), result.advice


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("1.5mib", 3 * 2**19), ("800MB", 8 * 10**8), ("8G", 2**33), (9, 9)],
)
def test_sizes_are_read_as_written(text: int | str, count: int) -> None:
    assert show.parse_size(text) == count


@pytest.mark.parametrize("text", ["24X", "GiB", "-1GiB", "0", "24 gibibytes", "1e9", True, 0])
def test_a_size_that_could_mean_two_things_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="must be a size above 0 such as 24GiB"):
        show.parse_size(text)


def test_a_bare_number_asks_back() -> None:
    with pytest.raises(ValueError, match="8 of what\\? Write 8GiB"):
        plan("gpt2", budget="8")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "–"), (999, "999 B"), (2**20, "1.00 MiB"), (10**9, "954 MiB"), (25 * 2**30, "25.0 GiB")]
)
def test_sizes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert show.format_size(count) == text


def test_bars_are_as_long_as_their_numbers() -> None:
    result = plan("bert-base", settings=["adamw-float32", "adafactor-bfloat16"])
    long, short = result.chart(width=80).splitlines()[:2]
    marks = "█▓▒░▚▞·=+"
    assert sum(long.count(mark) for mark in marks) == 80
    drawn, (first, second) = sum(short.count(mark) for mark in marks), result.lines
    assert abs(drawn - 80 * second.whole.total / first.whole.total) <= 0.5
    assert long.count("█") == long.count("▒") == long.count("░") == long.count("▚") == 20


def test_a_plot_is_a_picture_of_every_line_that_can_be_sharded(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    result = plan("gpt2", budget="2GiB", shards=2)
    result.plot(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        result.plot(tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    drawn = [line for line in result.lines if line.device is not None]  # the others cannot be sharded
    assert len(drawn) > 5 and all(f">{html.escape(line.label, quote=False)}<" in text for line in drawn)


def test_the_command_takes_a_preset_or_ones_own_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"{__name__}:model"
    assert cli.main(["plan", "llama-7b", own, "--shards", "2"]) == 0
    out = capsys.readouterr().out
    assert "| llama-7b | 6,738,415,616 |" in out and f"| {own} | 36 |" in out
    assert "llama-7b: 6,738,415,616 parameters in 291 tensors, cut among 2 devices." in out
    assert shapes_of(own) == [(4, 6), (4,), (4,), (4,)]
    for module in ("rich.console", "rich"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["plan", own, "--budget", "1KiB", "--settings", "adamw-float32"]) == 0
    assert "1 of 1 settings fit in 1.00 KiB. Take AdamW, float32 (432 B left" in capsys.readouterr().out


def test_the_command_draws_in_a_terminal_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plan", "gpt2", "--budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out and "adafactor, bfloat16, kahan" in out and "Not counted: activations" in out


@pytest.mark.parametrize("width", [80, 100, 120, 140])
@pytest.mark.parametrize("more", ["", "--budget 16G", "--batch 2 --tokens 512 --budget 100M"])
def test_no_line_is_wider_than_the_terminal(
    width: int, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cli.main(["plan", "gpt2-xl", *more.split()])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("    ")) <= width  # but for code
    is_wide = width >= (140 if "--batch" in more else 120)  # then each part has a column of its own
    assert "statistics" in lines[2] if is_wide else "optimizer" in lines[2]


def test_the_parts_of_a_narrow_table_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan(Odd(), budget=10**6, batch=1, tokens=3)
    monkeypatch.setattr(show, "format_size", str)
    rows = [row for row in show.table(result, 60)[1:] if len(row) > 1]  # the others are names of optimizers
    for line, row in zip(result.lines, rows, strict=True):
        parts, total = row[1:5], row[5]
        assert sum(map(int, parts)) == int(total) == line.whole.total


def test_json_has_every_number_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "gpt2", "bert-base", "--json", "--budget", "600M", "--shards", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, result = found["plans"][0], plan("gpt2", budget="600M", shards=2)
    assert (
        [plan["model"] for plan in found["plans"]]
        == [sent["model"] for sent in found["traffic"]]
        == ["gpt2", "bert-base"]
    )
    assert first == json.loads(json.dumps(result.as_dict()))
    kahan = next(line for line in first["settings"] if line["key"] == "adafactor-kahan")
    assert first["budget"] - kahan["left"] == kahan["device"]["total"] < kahan["whole"]["total"]
    assert kahan["write"][-1] == 'optimizer = Adafactor(model.named_parameters(), rounding="kahan")'
    assert first["fitting"] == [line.key for line in result.fitting]


@pytest.mark.parametrize(("budget", "status"), [("16G", 0), ("1G", 1)])
def test_the_exit_status_says_whether_anything_fits(
    budget: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "gpt2-xl", "--budget", budget]) == status
    assert ("Nothing fits in 1.00 GiB" in capsys.readouterr().out) == bool(status)


def test_the_command_without_a_model_shows_the_traffic_of_four(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--shards", "8", "64"]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("| llama-") for line in out.splitlines()) == 8
    assert out.startswith("Computed, not measured: ") and " ms |" not in out


def test_with_lora_the_traffic_is_that_of_the_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for more in ([], ["--lora", "16"]):
        assert cli.main(["plan", "llama-7b", "--settings", "adafactor-bfloat16", "--shards", "8", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["traffic"][0])
    whole, adapters = found
    assert whole["parameters"] == sum(map(prod, shapes_of("llama-7b"))) and adapters["model"] == whole["model"]
    assert adapters["parameters"] == 39_976_960  # 16·(in + out) of 32 layers' seven matrices
    assert 50 * adapters["gradients_sent"] < whole["gradients_sent"]


def test_inside_backward_each_wrapped_module_has_its_own_two_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan llama-70b --settings adafactor-bfloat16 --shards 64 --bandwidth 50GB --latency 10"
    assert cli.main([*words.split(), "--json"]) == 0
    [sent] = json.loads(capsys.readouterr().out)["traffic"]
    assert (sent["collectives"], sent["collectives_in_backward"]) == (2, 2 * (80 + 1))
    hops, messages = 2 * 6 * 10e-6, 63 * 81 * 10e-6  # of a tree of 64 ranks, and of the rings of the gradients
    seconds = 2 * fully_sharded(shapes_of("llama-70b"), 64).bytes / 50e9
    assert sent["optimizer_seconds"] == pytest.approx(seconds + 2 * hops)
    assert sent["optimizer_seconds_in_backward"] == pytest.approx(seconds + 162 * hops)
    assert sent["gradients_seconds"] == pytest.approx(sent["gradients_sent"] / 50e9 + messages)
    assert cli.main(words.split()) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| llama-70b |") and row.endswith("| 2 | 162 | 2,829.1 ms | 2.2 ms | 21.4 ms |")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["llama-9b"],
        ["llama-7b", "--shards", "0"],
        ["gpt2", "--budget", "24"],
        ["gpt2", "bert-base", "--plot", "x.png"],
    ],
    ids=str,
)
def test_a_mistake_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("adafactor plan: ") and err.count("\n") == 1


def test_the_documents_show_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    document = (ROOT / "docs" / "plan.md").read_text()
    shown = re.findall(r"`adafactor (plan [^`]*)`\s+prints[^\n]*\n\n```text\n(.*?)```", document, flags=re.S)
    assert shown
    for words, text in shown:
        cli.main(words.split())
        assert capsys.readouterr().out.rstrip() == text.rstrip()


def test_the_documents_have_the_times_that_the_command_computes(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(text: str) -> list[dict[str, str]]:
        heads, _, *others = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        return [dict(zip(heads, cells, strict=True)) for cells in others]

    document = (ROOT / "docs" / "plan.md").read_text()
    shown = rows(document[document.index("| model | ranks |") :].partition("\n\n")[0])
    cli.main("plan --shards 8 64 1024 --bandwidth 50GB --latency 10".split())
    computed = {(row["model"], row["ranks"]): row for row in rows(capsys.readouterr().out.partition("\n\n")[2])}
    assert len(shown) == 3
    for row in shown:
        assert row.items() <= computed[row["model"], row["ranks"]].items()
