"""One self-contained HTML page from the records."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from lab import claims, pictures, results, tables
from lab.charts import Chart, Line, frame, ticks
from lab.experiments import BEST, COMPARED, FIGURE_ROWS, SWEEP_ROWS, SWEPT, UNTUNED
from lab.page import bars, charts, html, marked, page, section
from lab.results import FAILS, HOLDS, Record
from lab.rows import PAPER_STEPS, ROWS, TABLE_2
from lab.tables import WAY_NAMES, Table
from lab.train import WAYS

MARKS = "<!-- from the records: python -m lab report --documents -->\n", "<!-- end -->\n"
DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {"B": "c1", "O": "c0", "P": "c3", "N": "c2", "O+": "c4"}


def render(records: list[Record]) -> str:
    """The page: every section that has records, the verdicts first."""
    body = _claims(records) + "".join(map(section, tables.papers_own(records))) + section(tables.table_2(records))
    body += _headline(records) + _step_sizes(records, "quarter") + _step_sizes(records, "small")
    body += section(tables.suspects(records)) + _stability(records)
    body += _figure(records) + section(tables.table_3(records))
    body += _memory(records) + _samples(records) + _settings(records)
    return page(
        "Adafactor: the paper's experiments",
        "<p>Shazeer &amp; Stern (2018) on English–German translation, at a scale that fits two CPU cores. "
        "The paper's figures stand beside ours; the two are not on one scale, so compare their order, "
        f"not their values.</p><p>{marked(claims.answer(records)) if records else ''}</p>{body}",
    )


def documents(records: list[Record]) -> dict[Path, str]:
    """What stands between the marks of each document: the answer and the claims, the tables, the advice."""
    made = [*(tables.headline(records, scale) for scale in ("long", "small", "quarter"))]
    made += [tables.step_sizes(records, "small"), tables.table_2(records), tables.stability(records)]
    made += [tables.table_3(records)]
    first = [claims.answer(records) + "\n"]
    if tables.agreement(records, warm=False):
        first.append(f"![Table 2 of the paper beside the lab's losses, row by row]({pictures.PATTERN.name})\n")
    verdicts = claims.table(records)
    first += [verdicts.markdown()] if verdicts else []
    every = {"reproduction.md": first, "reproduction-tables.md": [table.markdown() for table in made if table]}
    every["settings.md"] = [claims.advice(records)]
    return {DOCS / name: "\n".join(parts) for name, parts in every.items()}


def _claims(records: list[Record]) -> str:
    table = claims.table(records)
    if table is None:
        return ""
    text = section(table).replace('<div class="wide">', '<div class="claims">')
    for verdict, style in ((HOLDS, "holds"), (FAILS, "fails"), (results.UNDECIDED, "open")):
        text = text.replace(f'<td class="">{verdict}</td>', f'<td><span class="{style}">{verdict}</span></td>')
    return text


def curve_line(runs: list[Record], label: str, style: str) -> Line:
    """The mean training loss over seeds, and a band from the lowest to the highest of them."""
    by_step: dict[float, list[float]] = {}
    for run in runs:
        for step, loss in run["curve"]:
            by_step.setdefault(float(step), []).append(float(loss))
    whole = {step: losses for step, losses in by_step.items() if len(losses) == len(runs)}
    points = [(step, results.mean(losses)) for step, losses in sorted(whole.items())]
    band = [(step, min(losses), max(losses)) for step, losses in sorted(whole.items())]
    return Line(label, points, style, band if len(runs) > 1 else [])


def curves(title: str, groups: dict[str, list[Record]], styles: dict[str, str]) -> str:
    """Training loss over steps, a line for each group of seeds; the first steps are above the frame."""
    lines = [curve_line(runs, name, styles[name]) for name, runs in groups.items() if runs]
    steps = max(x for line in lines for x, _ in line.points)
    late = [y for line in lines for x, y in line.points if x > steps / 10]
    low, high = frame(late)
    chart = Chart(title, "step", "training loss", (0, steps), (low, high))
    return chart.svg(lines, ticks(0, steps), ticks(low, high))


def ways_chart(records: list[Record], groups: dict[str, list[Record]], styles: dict[str, str], bleu: bool) -> str:
    """Loss or BLEU of each group in each way to evaluate, with intervals over seeds where there are any."""
    lines, value = [], results.test_bleu if bleu else results.dev_loss
    for number, (name, runs) in enumerate(groups.items()):
        points, halves = [], []
        for place, way in enumerate(WAYS):
            values = [v for r in runs if math.isfinite(v := value(r, way))]
            if values:
                points.append((place + 0.08 * (number - len(groups) / 2 + 0.5), results.mean(values)))
                scales = {r["config"]["scale"]["name"] for r in runs}
                half = results.noise(records, scales, way, bleu, of=runs).half(len(values))
                halves.append(half if all(map(results.is_settled, runs)) else math.inf)
        lines += [Line(name, points, styles[name], halves=halves, joined=False)] if points else []
    if not lines:
        return ""
    every = [y + sign * (h if math.isfinite(h) else 0) for line in lines for (_, y), h in
             zip(line.points, line.halves, strict=True) for sign in (-1, 1)]  # fmt: skip
    what = "test BLEU" if bleu else "dev loss"
    chart = Chart(what, "", what, (-0.5, 2.5), frame(every), names={float(i): WAY_NAMES[w] for i, w in enumerate(WAYS)})
    return chart.svg(lines, [0.0, 1.0, 2.0], ticks(*chart.y_range))


def _headline(records: list[Record]) -> str:
    text = ""
    for scale, multipliers, how in (
        ("long", UNTUNED, "nothing tuned"),
        ("small", BEST["small"], "each row at its best step size"),
        ("quarter", BEST["quarter"], "each row at its best step size"),
    ):
        found = {name: results.compared(records, name, scale, multiplier) for name, multiplier in multipliers.items()}
        groups = {name: runs for name, runs in found.items() if runs}
        drawn = [curves(f"Training loss, {how}", groups, COLOURS)] if groups else []
        drawn += [ways_chart(records, groups, COLOURS, bleu) for bleu in (False, True)] if groups else []
        text += section(tables.headline(records, scale), charts(drawn))
    return text + section(tables.over_the_run(records))


def _step_sizes(records: list[Record], scale: str) -> str:
    found = {name: results.select(records, scale, row=name, warmup=COMPARED[name][1]) for name in SWEPT}
    lines = [Line(f"{row}: {ROWS[row].describe()}", curve, COLOURS[row])
             for row, runs in found.items() if (curve := results.sweep_curve(runs, "decayed"))]  # fmt: skip
    points = [point for line in lines for point in line.points]
    xs = sorted({x for x, _ in points})
    drawn = ""
    if len(xs) > 1:
        label = "step size, as a multiple of the paper's (what failed is drawn on the edge)"
        top = min(y for _, y in points) + 0.8
        frames = frame([min(y, top) for _, y in points])
        chart = Chart("Dev loss, decayed to zero", label, "dev loss", (xs[0], xs[-1]), frames, log_x=True)
        drawn = chart.svg(lines, xs, ticks(*chart.y_range))
    return section(tables.step_sizes(records, scale), drawn)


def _stability(records: list[Record]) -> str:
    lines, dashes = [], {"c0": 0, "c1": 0, "c4": 0}
    for row, warm in [*((row, False) for row in SWEEP_ROWS), ("A", True)]:
        curve = results.sweep_curve(results.select(records, "hard", row=row, warmup=warm))
        if len(curve) > 1:
            style = "c4" if warm else "c0" if ROWS[row].clip else "c1"
            name = f"{row} with warm-up" if warm else f"{row}: {ROWS[row].describe()}"
            letter = ("A, warm-up" if warm else row, 3.0) if 3.0 in dict(curve) else None
            lines.append(Line(name, curve, f"{style} dash{dashes[style]}", letter=letter))
            dashes[style] += 1
    if not lines:
        return ""
    points = [point for line in lines for point in line.points]
    xs = sorted({x for x, _ in points})
    label = "step size, as a multiple of the paper's (blue: clipped; red: not; brown: A with warm-up)"
    chart = Chart("Dev loss after 500 steps", label, "dev loss", (xs[0], xs[-1]), frame([y for _, y in points]),
                  log_x=True, width=640, height=400)  # fmt: skip
    return section(tables.stability(records), chart.svg(lines, xs, ticks(*chart.y_range)))


def _figure(records: list[Record]) -> str:
    found = {row: results.select(records, "mini", row=row, warmup=True)[:1] for row in FIGURE_ROWS}
    points = {row: [(x * PAPER_STEPS / runs[0]["steps"], float(y)) for x, y in runs[0]["rms_update"]["values"]]
              for row, runs in found.items() if runs}  # fmt: skip
    if not points:
        return ""
    high = min(4.0, math.ceil(max(y for curve in points.values() for _, y in curve)))
    styles = dict(zip(FIGURE_ROWS, ("c1", "c0", "c0", "c1"), strict=True))  # as the paper: fast decay red, slow blue
    drawn = []
    for title, pair in (("As in the paper", FIGURE_ROWS[:2]), ("With the remedies", FIGURE_ROWS[2:])):
        chart = Chart(title, "training step t", "RMS(U)", (0, PAPER_STEPS), (0, high))
        lines = [Line(f"{row}: {ROWS[row].describe()}", points[row], styles[row]) for row in pair if row in points]
        drawn.append(chart.svg(lines, ticks(0, PAPER_STEPS), ticks(0, high)))
    name = next(runs[0]["rms_update"]["parameter"] for runs in found.values() if runs)
    steps = next(runs[0]["steps"] for runs in found.values() if runs)
    return (
        "<h2>Figure 1: RMS(U) of one weight matrix</h2>"
        f"<p>Before clipping, with warm-up, of <code>{escape(name)}</code>, on the paper's axes: our {steps:,} steps "
        f"are stretched to its {PAPER_STEPS:,}, as the schedule is. Above 1 an update is larger than meant.</p>"
        + charts(drawn)
    )


def _memory(records: list[Record]) -> str:
    seen: dict[str, Record] = {}
    for record in (*results.select(records, "mini"), *results.select(records, "small")):
        seen.setdefault(record["config"]["row"]["name"], record)
    kept = [row for row in TABLE_2 if row.name in seen and row.name not in ("Q10", "Q100", "Q150", "Q200", "Q300")]
    if not kept:
        return ""
    most = max(seen[row.name]["state_bytes"] for row in kept) or 1
    found = []
    for row in kept:
        size, weights = seen[row.name]["state_bytes"], seen[row.name]["parameter_bytes"]
        name = f"{row.name[0]}: {row.describe()}"
        found.append((name, f"{size:,} ({100 * size / weights:.1f} %)", size / most, "c0"))
    return f"<h2>Memory, measured</h2><p>Bytes of optimizer state, and of the weights' bytes.</p>{bars(found)}"


def _samples(records: list[Record]) -> str:
    for scale in ("small", "quarter", "mini", "tiny"):
        runs = [r for r in results.select(records, scale, seed=0) if r["bleu"].get("test", {}).get("samples")]
        runs = [r for r in runs if r["config"]["row"]["name"] in ("B", "O", "P")]
        runs = list({r["config"]["row"]["name"]: r for r in runs}.values())
        if runs:
            break
    else:
        return ""
    parts = []
    for index, sample in enumerate(runs[0]["bleu"]["test"]["samples"]):
        lines = [f"<p><b>{escape(sample['source'])}</b></p>", f"<p><i>{escape(sample['reference'])}</i></p>"]
        for r in runs:
            name = f"{r['config']['row']['name']}, {'warm-up' if r['config']['warmup'] else 'no warm-up'}"
            text = escape(r["bleu"]["test"]["samples"][index]["translation"])
            lines.append(f'<p><span class="who">{name}</span>{text}</p>')
        parts.append(f'<div class="pair">{"".join(lines)}</div>')
    title = f"<h2>The first test sentences ({scale})</h2><p>Source, reference, then each run's last weights.</p>"
    return title + "".join(parts)


def _settings(records: list[Record]) -> str:
    rows = []
    for name in sorted({record["config"]["scale"]["name"] for record in records}):
        config = next(r["config"]["scale"] for r in records if r["config"]["scale"]["name"] == name)
        shape = config["shape"]
        rows.append([
            name, f"{shape['layers']} + {shape['layers']} layers, {shape['norm']}-norm", str(shape["width"]),
            str(shape["filter"]), str(shape["heads"]), f"{shape['dropout']:g}", f"{config['vocabulary']:,}",
            f"{config['tokens']:,}", f"{config['steps']:,}", f"{config['adaptive']:g}, {config['relative']:g}",
        ])  # fmt: skip
    if not rows:
        return "<p>There are no records yet.</p>"
    heads = "scale,model,width,filter,heads,dropout,vocabulary,tokens,steps,multipliers".split(",")
    signatures = {score["signature"] for record in records for score in record["bleu"].values()}
    corpora = {f"{r['corpus']['name']} ({r['corpus']['fingerprint']})" for r in records}
    versions = {", ".join(f"{k} {v}" for k, v in record["versions"].items()) for record in records}
    commits = {str(record["commit"])[:10] for record in records}
    notes = [("sacreBLEU", signatures), ("Corpus", corpora), ("Versions", versions), ("Commits", commits)]
    text = "".join(f"<p><b>{name}</b> {escape('; '.join(sorted(found)))}</p>" for name, found in notes)
    return section(tables.times(records)) + "<h2>Settings</h2>" + html(Table("", "", heads, rows, 2)) + text
