"""Pages: the demo's, charts, marks in documents, runs at work."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lab import demo, records
from lab.charts import Chart, Line, frame, ticks
from lab.clean import Pair
from lab.corpus import Corpus, help_texts
from lab.evaluate import pack
from lab.experiments import UNTUNED
from lab.files import put_between
from lab.page import marked
from lab.presets import SCALES, Job
from lab.progress import STALE, at_work, spark, table
from lab.records import RECORDS
from lab.report import DOCS, MARKS, documents, render
from lab.rows import schedule

ROOT = Path(__file__).parents[2]


def _record(row: str, texts: list[str], size: int) -> dict[str, Any]:
    way = {"dev_loss": 3.0, "bleu": {"test": {"all": 20.0 if row == "B" else 22.0, "interval": 1.2}}}
    return {
        "name": row, "config": Job(row, SCALES["demo"], row == "B").config(), "diverged": False, **way,
        "ways": {"mean": way, "decayed": way}, "curve": [[i, 8.0 / i] for i in range(1, 60)], "state_bytes": size,
        "parameter_bytes": 500, "train_seconds": 90.0, "translations": pack({"last": texts, "decayed": texts}),
    }  # fmt: skip


def test_the_demo_shows_curves_costs_and_the_worst_translation() -> None:
    pairs = [Pair("lo", "", f"sentence {i}", "x" * i + f" Der Satz {i} steht hier") for i in range(30)]
    good = [pair.german for pair in pairs]
    good[17] = "<nothing alike>"
    records = [_record("B", good, 1000), _record("O", good, 20)]
    page = demo.render(records, {"B": str.upper, "O": str.lower}, ["Hello"], pairs)
    assert page.count("<figure>") == 2
    assert "HELLO" in page and "hello" in page
    assert "20.0 ± 1.2 BLEU" in page
    assert "With 2.0 BLEU between them, ± 1.7, the two are further apart than noise" in page
    assert "&lt;nothing alike&gt;" in page
    assert 'style="width:45.00%"' in page and 'style="width:0.90%"' in page  # bytes of state as bars
    said, ranks = demo.held_out(records, pairs)
    assert len(said) == demo.SHOWN
    assert (ranks[0], ranks[-1]) == (1, 30)
    assert said[0][0] == "sentence 17"


def test_the_demo_calls_scores_level_that_differ_by_less_than_their_intervals_and_names_the_page() -> None:
    records = [_record(row, ["x"], 1) for row in "BO"]
    records[1]["ways"]["decayed"]["bleu"]["test"]["all"] = 21.6
    assert "With 1.6 BLEU between them, ± 1.7, the two are level within noise" in demo.verdict(records)
    assert "docs/reproduction.md" in demo.verdict(records)
    assert (DOCS / "reproduction.md").exists() and "make demo" in (DOCS / "reproduction.md").read_text(encoding="utf-8")
    scale = SCALES["demo"]
    assert scale.adaptive == scale.relative == SCALES["mini"].adaptive, "one multiplier for all rows, as at `mini`"


def test_help_texts_are_short_and_of_one_domain() -> None:
    pairs = [Pair("lo", "", "a b", "c d"), Pair("deb", "", "a b", "c d"), Pair("lo", "", "a " * 13, "b")]
    found = help_texts(Corpus("debian", pairs, pairs, pairs))
    assert found.train == found.dev == found.test == pairs[:1]


def test_letters_of_lines_that_meet_do_not_cover_each_other() -> None:
    chart = Chart("t", "x", "y", (0, 2), (0, 10))
    lines = [Line(name, [(0.0, 1.0), (1.0, 5.0 + 0.01 * i)], letter=(name, 1.0)) for i, name in enumerate("ABC")]
    heights = sorted(float(text.split('y="')[1].split('"')[0]) for text in chart._letters(lines))
    assert all(after - before >= 11 for before, after in zip(heights, heights[1:], strict=False))


def test_a_band_goes_there_and_back() -> None:
    chart = Chart("t", "x", "y", (0, 1), (0, 1), width=174, height=168)
    assert chart._band(Line("", [], band=[(0, 0, 1), (1, 0, 1)])).count(",") == 4


def test_a_frame_has_room_and_ticks() -> None:
    low, high = frame([3.0, 4.0])
    assert low < 3.0 and high > 4.0
    assert frame([3.0]) == (2.5, 3.5)
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]


def test_marks_are_markup_and_text_is_not() -> None:
    assert marked("a < `b` and **c**") == "a &lt; <code>b</code> and <b>c</b>"


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{MARKS[0]}old\n{MARKS[1]}after\n", encoding="utf-8")
    put_between(path, *MARKS, "new")
    assert path.read_text(encoding="utf-8") == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}after\n"
    path.write_text(MARKS[0], encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        put_between(path, *MARKS, "new")


def test_the_documents_show_the_committed_records() -> None:
    found = [record for record in records.read(RECORDS) if "rounding" not in record["config"]]
    for document, text in documents(found).items():
        page = document.read_text(encoding="utf-8")
        assert page.count(MARKS[0]) == page.count(MARKS[1]) == 1
        assert f"{MARKS[0]}\n{text}\n{MARKS[1]}" in page, f"python -m lab report --documents writes {document.name}"
    assert (DOCS / "report.html").read_text(encoding="utf-8") == render(found)


def test_the_table_of_clocks_is_that_of_the_scales() -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.count("|") == 7]
    lines = {first: ours for first, _, *ours in cells}
    for column, name in enumerate(("long", "small", "mini", "pattern")):
        scale, found = SCALES[name], {key: ours[column] for key, ours in lines.items()}
        rates = [schedule(step, scale.steps, warmup=False) for step in range(1, scale.steps + 1)]
        rho = [(UNTUNED["O"] if name == "long" else scale.relative) * rate for rate in rates]
        assert float(found["Σρ, the relative path"]) == pytest.approx(sum(rho), rel=0.02)
        assert float(found["Σρ²"]) == pytest.approx(sum(r**2 for r in rho), rel=0.02)
        assert found["largest relative step"] == f"{100 * max(rho):g} %"
        assert float(found["flat phase / window of β₂ = 0.999"]) == pytest.approx(scale.steps / 10 / 1000)
        assert float(found["window of 1 − t^−0.8 at the end / run"]) == pytest.approx(scale.steps**-0.2, abs=0.006)
        assert float(found["RMS(X₀) = 1/√width"]) == pytest.approx(scale.shape.width**-0.5, abs=0.0005)
        assert int(found["vocabulary"].replace(",", "")) == scale.vocabulary
        run = next(r for r in records.read(RECORDS, name) if r["config"]["scale"]["shape"]["tied"])
        seen = run["tokens_per_second"] * run["train_seconds"] / (scale.steps + scale.branch * ("ways" in run))
        weights = run["parameter_bytes"] / 4
        assert float(found["parameters"][:3]) * 1e6 == pytest.approx(weights, abs=5e4)
        tokens = seen * scale.steps / weights
        assert float(found["tokens of both sides, a parameter"]) == pytest.approx(tokens, rel=0.03)


def test_runs_at_work_are_those_that_said_something_and_have_no_record(tmp_path: Path) -> None:
    now = {"step": 5, "steps": 10, "loss": 4.0, "tokens_per_second": 9.0, "seconds": 60.0, "curve": [5.0, 4.0]}
    for name in ("working", "finished", "stopped"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "progress.json").write_text(json.dumps(now))
    (tmp_path / "runs" / "finished" / "record.json").write_text("{}")
    old = time.time() - 2 * STALE
    os.utime(tmp_path / "runs" / "stopped" / "progress.json", (old, old))
    assert [name for name, _ in at_work(tmp_path)] == ["working"]
    assert table(tmp_path).row_count == 1
    assert list(table(tmp_path).columns[4].cells) == ["1 min"]


def test_a_spark_falls_as_the_loss_does() -> None:
    line = spark([float(100 - i) for i in range(100)])
    assert len(line) == 40
    assert line[0] == "█" and line[-1] == "▁"
    assert list(line) == sorted(line, reverse=True)
