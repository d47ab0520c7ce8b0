"""Pages: the demo's, charts, marks in documents."""

import re
from pathlib import Path
from typing import Any

import pytest

from lab import demo, records
from lab.answer import headline
from lab.clean import Pair
from lab.corpus import Corpus, help_texts
from lab.documents import DOCS, END, begin, documents
from lab.evaluate import pack
from lab.files import put_between
from lab.presets import SCALES, Job
from lab.records import RECORDS
from lab.rows import schedule

ROOT = Path(__file__).parents[2]


def _record(row: str, texts: list[str], size: int) -> dict[str, Any]:
    way = {"dev_loss": 3.0, "bleu": {"test": {"all": 20.0 if row == "B" else 22.0, "interval": 1.2}}}
    return {
        "name": row, "config": Job(row, SCALES["demo"], row == "B").config(), "diverged": False, **way,
        "ways": {"mean": way, "decayed": way}, "curve": [[i, 8.0 / i] for i in range(1, 60)], "state_bytes": size,
        "parameter_bytes": 500, "train_seconds": 90.0, "translations": pack({"last": texts, "decayed": texts}),
    }  # fmt: skip


def test_the_demo_shows_curves_costs_the_worst_translation_and_what_longer_runs_say() -> None:
    pairs = [Pair("lo", "", f"sentence {i}", "x" * i + f" Der Satz {i} steht hier") for i in range(30)]
    good = [pair.german for pair in pairs]
    good[17] = "<nothing alike>"
    found = [_record("B", good, 1000), _record("O", good, 20)]
    said = headline(records.read(RECORDS))
    page = demo.render(found, [("Hello", {"B": "HELLO", "O": "hello"})], pairs, said)
    assert page.count("<figure><svg") == 2 and page.count("</svg></figure>".replace("</svg>", "</svg>\n")) == 2
    assert "HELLO" in page and "hello" in page and "20.0 ± 1.2 BLEU" in page and "1,000 bytes" in page
    assert "With 2.0 BLEU between them, ± 1.7, the two are further apart than noise" in page
    assert all(sentence in page for sentence in said) and 'href="../README.md"' in page
    assert "&lt;nothing alike&gt;" in page
    sentences, ranks = demo.held_out(found, pairs)
    assert len(sentences) == demo.SHOWN
    assert (ranks[0], ranks[-1]) == (1, 30)
    assert sentences[0][0] == "sentence 17"


def test_help_texts_are_short_and_of_one_domain() -> None:
    pairs = [Pair("lo", "", "a b", "c d"), Pair("deb", "", "a b", "c d"), Pair("lo", "", "a " * 13, "b")]
    found = help_texts(Corpus("debian", pairs, pairs, pairs))
    assert found.train == found.dev == found.test == pairs[:1]


def test_only_what_is_between_the_marks_changes(tmp_path: Path) -> None:
    path, marks = tmp_path / "page.md", (begin("a part"), END)
    path.write_text(f"before\n{marks[0]}old\n{END}after\n{begin('another')}{END}", encoding="utf-8")
    put_between(path, *marks, "new")
    assert path.read_text(encoding="utf-8") == f"before\n{marks[0]}\nnew\n\n{END}after\n{begin('another')}{END}"
    path.write_text(marks[0], encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        put_between(path, *marks, "new")


def test_the_documents_show_the_committed_records() -> None:
    for (document, part), text in documents(records.read(RECORDS)).items():
        page = document.read_text(encoding="utf-8")
        assert f"{begin(part)}\n{text.rstrip()}\n\n{END}" in page, "python -m lab report --documents writes it"


def test_what_was_not_run_is_not_said() -> None:
    found = records.read(RECORDS)
    scales = {record["config"]["scale"]["name"] for record in found}
    parts = [
        [r for r in found if (r["config"]["scale"]["name"] == scale) == only] for scale in scales for only in (0, 1)
    ]
    for some in ([], *parts, [record for record in found if record["config"]["seed"] < 2]):
        for text in (*documents(some).values(), *headline(some)):
            assert not re.search(r"\b(nan|inf)\b|– (behind|ahead|higher|lower)|\b0 seeds", text)


def test_the_first_pages_have_the_figures_of_the_headline() -> None:
    first, short, _ = (re.findall(r"\d\.\d+ ± \d\.\d+", words) for words in headline(records.read(RECORDS)))
    for page, figures in ((ROOT / "README.md", [first[-1], *short[:2]]), (DOCS / "index.md", [first[-1], short[0]])):
        words = " ".join(page.read_text(encoding="utf-8").split())
        assert [figure for figure in figures if figure not in words] == [], "python -m lab report --headline"


def test_the_table_of_clocks_is_that_of_the_scales() -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.count("|") == 7]
    lines = {first: ours for first, _, *ours in cells}
    for column, name in enumerate(("long", "small", "mini", "pattern")):
        scale, found = SCALES[name], {key: ours[column] for key, ours in lines.items()}
        rates = [schedule(step, scale.steps, warmup=False) for step in range(1, scale.steps + 1)]
        rho = [(2.5 if name == "long" else scale.relative) * rate for rate in rates]
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
