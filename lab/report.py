"""One self-contained HTML page from the records."""

from __future__ import annotations

import math
from html import escape

from lab import results
from lab.charts import Chart, Line, ticks
from lab.experiments import FIGURE_ROWS, SWEEP_ROWS
from lab.presets import SCALES
from lab.results import Record
from lab.style import STYLE
from lab.table import ROWS, TABLE_2, TABLE_3

Cells = list[str]


def render(records: list[Record]) -> str:
    """The page: every section that has records, in the order of the paper."""
    sections = (_headline, _table_2, _sweep, _figure, _table_3, _memory, _samples, _settings)
    body = "".join(section(records) for section in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Adafactor: the paper's experiments</title><style>{STYLE}</style></head><body>"
        "<h1>Adafactor: the paper's experiments</h1>"
        "<p>Shazeer &amp; Stern (2018) on English–German translation, at a scale that fits two CPU cores. "
        "The paper's figures stand beside ours; the two are not on one scale, so compare their order, "
        "not their values.</p>"
        f"{body}</body></html>\n"
    )


def _table(heads: Cells, rows: list[Cells], words: int = 1) -> str:
    """A table; the first `words` columns are text, the others numbers."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = []
    for row in rows:
        cells = (f'<td class="{"" if i < words else "n"}">{cell}</td>' for i, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _number(value: float | None, digits: int = 1) -> str:
    return "diverged" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _seeds(records: list[Record], value: str) -> str:
    """A figure of each seed; a dash where nothing was run."""
    if value == "bleu":
        return " / ".join(_number(results.test_bleu(record)) for record in records) or "–"
    return " / ".join(_number(record[value], 2) for record in records) or "–"


def _headline(records: list[Record]) -> str:
    rows = []
    for scale in ("small", "demo", "offline", "tiny"):
        for record in results.select(records, scale):
            config, test = record["config"], record["bleu"].get("test")
            domains = ", ".join(f"{name} {score:.1f}" for name, score in test["domains"].items()) if test else ""
            name = f"{config['row']['name']} at {scale}, {'warm-up' if config['warmup'] else 'no warm-up'}"
            rows.append([
                name, ROWS[config["row"]["name"]].describe(), str(config["seed"]),
                _number(results.test_bleu(record)), domains, _number(record["dev_loss"], 3),
                f"{record['state_bytes']:,}", f"{record['tokens_per_second']:,}",
                f"{record['train_seconds'] / 60:.1f}",
            ])  # fmt: skip
    if not rows:
        return ""
    heads = [
        "run",
        "optimizer",
        "seed",
        "test BLEU",
        "per domain",
        "dev loss",
        "state bytes",
        "tokens/s",
        "minutes",
    ]
    return "<h2>Adam and Adafactor</h2>" + _table(heads, rows, words=2)


def _table_2(records: list[Record]) -> str:
    rows = []
    for row in TABLE_2:
        warm = results.select(records, "mini", row=row.name, warmup=True)
        cold = results.select(records, "mini", row=row.name, warmup=False)
        if warm or cold:
            rows.append([
                row.name[0], row.describe(), _number(row.warm), _number(row.cold),
                *(_seeds(runs, value) for value in ("bleu", "dev_loss") for runs in (warm, cold)),
            ])  # fmt: skip
    if not rows:
        return ""
    heads = [
        "",
        "optimizer",
        "paper, warm-up",
        "paper, none",
        "BLEU, warm-up",
        "BLEU, none",
        "loss, warm-up",
        "loss, none",
    ]
    scale = SCALES["mini"]
    return (
        "<h2>Table 2: all optimizers, with and without warm-up</h2>"
        f"<p>{scale.steps} steps of {scale.tokens} + {scale.tokens} tokens. Test BLEU (beam 4) and dev loss; "
        f"a second seed after the stroke. The paper's step size is multiplied by {scale.adaptive:g} "
        f"(absolute) and {scale.relative:g} (relative steps), which suits the smaller model; SGD has the "
        "paper's. The paper's text gives 23.6 and 23.4 for A and B with warm-up where its table, used here, "
        "has 25.6 and 25.4.</p>" + _table(heads, rows, words=2)
    )


def _sweep(records: list[Record]) -> str:
    curves = {row: results.sweep_curve(results.select(records, "hard", row=row, warmup=False)) for row in SWEEP_ROWS}
    curves = {row: curve for row, curve in curves.items() if len(curve) > 1}
    if not curves:
        return ""
    every = [point for curve in curves.values() for point in curve]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    charts = []
    for row, curve in curves.items():
        chart = Chart(f"Row {row}", "step size, as a multiple of the paper's", "dev loss", (min(xs), max(xs)),
                      (math.floor(min(ys)), math.ceil(max(ys))),
                      log_x=True, width=300, height=220)  # fmt: skip
        lines = [Line("row A", curves["A"], "faint")] if row != "A" and "A" in curves else []
        lines.append(Line(ROWS[row].describe(), curve, "c0"))
        charts.append(chart.svg(lines, sorted(set(xs)), ticks(*chart.y_range)))
    warm = results.sweep_curve(results.select(records, "hard", row="A", warmup=True))
    table = [
        [
            row,
            ROWS[row].describe(),
            *(f"{loss:.2f}" for _, loss in curve),
            f"{results.sensitivity(curve):.2f}",
        ]
        for row, curve in [*curves.items(), *([("A", warm)] if len(warm) > 1 else [])]
    ]
    if len(warm) > 1:
        table[-1][1] += ", with warm-up"
    heads = ["", "optimizer", *(f"×{x:g}" for x in sorted(set(xs))), "sensitivity"]
    shape, steps = SCALES["hard"].shape, SCALES["hard"].steps
    return (
        "<h2>Stability: which row survives how large a step</h2>"
        f"<p>No warm-up. A {shape.norm}-norm model of {shape.layers} + {shape.layers} layers, width "
        f"{shape.width}, {steps} steps. Dev loss at the end, at most that of a fresh model, the mean over seeds. "
        "Sensitivity is the mean over the sweep of that loss minus the row's best "
        "(Wortsman et al., 2023): lower is more stable.</p>"
        f'<div class="charts">{"".join(charts)}</div>' + _table(heads, table, words=2)
    )


def _figure(records: list[Record]) -> str:
    found = {row: results.select(records, "mini", row=row, warmup=True)[:1] for row in FIGURE_ROWS}
    points = {
        row: [(float(x), float(y)) for x, y in runs[0]["rms_update"]["values"]] for row, runs in found.items() if runs
    }
    if not points:
        return ""
    steps = max(x for curve in points.values() for x, _ in curve)
    high = min(4.0, math.ceil(max(y for curve in points.values() for _, y in curve)))
    charts = []
    for title, pair in (("As in the paper", FIGURE_ROWS[:2]), ("With the remedies", FIGURE_ROWS[2:])):
        chart = Chart(title, "step", "RMS(U)", (0, steps), (0, high))
        lines = [
            Line(f"{row}: {ROWS[row].describe()}", points[row], f"c{i}") for i, row in enumerate(pair) if row in points
        ]
        charts.append(chart.svg(lines, ticks(0, steps), ticks(0, high)))
    name = next(runs[0]["rms_update"]["parameter"] for runs in found.values() if runs)
    return (
        "<h2>Figure 1: RMS(U) of one weight matrix</h2>"
        f"<p>Before clipping, with warm-up, of <code>{escape(name)}</code>. "
        "Above 1 an update is larger than meant.</p>"
        f'<div class="charts">{"".join(charts)}</div>'
    )


def _table_3(records: list[Record]) -> str:
    rows = []
    for embedding, (adam, adafactor) in TABLE_3.items():
        ours = [results.select(records, "mini", tied=False, embedding=embedding, row=row) for row in ("Adam", "O")]
        if any(ours):
            texts = {"scaled": ("1/√d", "√d"), "unit": ("1", "1"), "plain": ("1/√d", "1")}[embedding]
            rows.append([*texts, _number(adam), _number(adafactor), *(_seeds(runs, "bleu") for runs in ours),
                         *(_seeds(runs, "dev_loss") for runs in ours)])  # fmt: skip
    if not rows:
        return ""
    heads = ["initial σ", "multiplier", "paper, Adam", "paper, Adafactor", "BLEU, Adam", "BLEU, Adafactor",
             "loss, Adam", "loss, Adafactor"]  # fmt: skip
    return "<h2>Table 3: three embedding schemes, softmax untied</h2>" + _table(heads, rows, words=2)


def _memory(records: list[Record]) -> str:
    seen: dict[str, Record] = {}
    for record in (*results.select(records, "mini"), *results.select(records, "small")):
        seen.setdefault(record["config"]["row"]["name"], record)
    kept = [row for row in TABLE_2 if row.name in seen and row.name not in ("Q10", "Q100", "Q150", "Q200", "Q300")]
    if not kept:
        return ""
    rows = []
    for row in kept:
        size, weights = seen[row.name]["state_bytes"], seen[row.name]["parameter_bytes"]
        bar = f'<span class="bar" style="width:{4 * size / weights:.3f}em"></span>'
        rows.append([row.name[0], row.describe(), f"{size:,}", f"{100 * size / weights:.2f} %", bar])
    heads = ["", "optimizer", "bytes of state", "of the weights", ""]
    return "<h2>Memory, measured</h2>" + _table(heads, rows, words=2)


def _samples(records: list[Record]) -> str:
    for scale in ("small", "demo", "mini", "offline", "tiny"):
        runs = [r for r in results.select(records, scale, seed=0) if r["bleu"].get("test", {}).get("samples")]
        runs = [r for r in runs if r["config"]["row"]["name"] in ("B", "N", "O")]
        if runs:
            break
    else:
        return ""
    parts = []
    for index, sample in enumerate(runs[0]["bleu"]["test"]["samples"]):
        lines = [f"<b>{escape(sample['source'])}</b>", f"<i>{escape(sample['reference'])}</i>"]
        lines += [
            f"{r['config']['row']['name']}{'' if r['config']['warmup'] else ' (no warm-up)'}: "
            f"{escape(r['bleu']['test']['samples'][index]['translation'])}" for r in runs
        ]  # fmt: skip
        parts.append(f"<li>{'<br>'.join(lines)}</li>")
    title = f"<h2>Sample translations ({scale})</h2><p>Source, reference, then each run's.</p>"
    return f"{title}<ul>{''.join(parts)}</ul>"


def _settings(records: list[Record]) -> str:
    rows = []
    for name in sorted({record["config"]["scale"]["name"] for record in records}):
        config = next(r["config"]["scale"] for r in records if r["config"]["scale"]["name"] == name)
        shape = config["shape"]
        rows.append([
            name, f"{shape['layers']} + {shape['layers']} layers, {shape['norm']}-norm", str(shape["width"]),
            str(shape["filter"]), str(shape["heads"]), f"{shape['dropout']:g}", str(config["vocabulary"]),
            str(config["tokens"]), str(config["steps"]), f"{config['adaptive']:g}, {config['relative']:g}",
        ])  # fmt: skip
    if not rows:
        return "<p>There are no records yet.</p>"
    heads = [
        "scale",
        "model",
        "width",
        "filter",
        "heads",
        "dropout",
        "vocabulary",
        "tokens",
        "steps",
        "multipliers",
    ]
    signatures = {score["signature"] for record in records for score in record["bleu"].values()}
    corpora = {f"{r['corpus']['name']} ({r['corpus']['fingerprint']})" for r in records}
    versions = {", ".join(f"{k} {v}" for k, v in record["versions"].items()) for record in records}
    commits = {str(record["commit"])[:10] for record in records}
    notes = [("sacreBLEU", signatures), ("Corpus", corpora), ("Versions", versions), ("Commits", commits)]
    text = "".join(f"<p><b>{name}</b> {escape('; '.join(sorted(found)))}</p>" for name, found in notes)
    return "<h2>Settings</h2>" + _table(heads, rows, words=2) + text
