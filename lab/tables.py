"""The tables of the reproduction, from the records; as HTML for the report and as Markdown for the document."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab import results
from lab.experiments import COMPARED, SWEEP_ROWS, SWEPT, table_3_adam
from lab.presets import SCALES
from lab.results import Record
from lab.rows import ROWS, TABLE_2, TABLE_3
from lab.train import WAYS

WAY_NAMES = {"last": "last weights", "mean": "mean of the last", "decayed": "decayed to zero"}


@dataclass(frozen=True)
class Table:
    """A table with its title and what has to be known to read it."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]  # a cell may have several lines
    words: int = 1  # the first columns that are text

    def markdown(self) -> str:
        """Title, note and table."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        rows = [" | ".join(line).replace("\n", "<br>") for line in lines]
        return f"### {self.title}\n\n{self.note}\n\n" + "".join(f"| {row} |\n" for row in rows)


def number(value: float, digits: int = 2) -> str:
    """A number of the table, or a dash."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def over_seeds(records: list[Record], noise: results.Spread, way: str = "last", bleu: bool = False) -> str:
    """Mean ± half the interval over seeds, and how many seeds when it is only one."""
    if records and all(record["diverged"] for record in records):
        return "diverged"
    values = [results.test_bleu(r, way) if bleu else results.dev_loss(r, way) for r in records if not r["diverged"]]
    values = [value for value in values if math.isfinite(value)]
    half = noise.half(len(values)) if all(map(results.is_settled, records)) else math.inf
    return number(results.mean(values)) + (f" ± {half:.2f}" if values and math.isfinite(half) else "")


def count_seeds(runs: list[Record]) -> str:
    """How many seeds a setting has."""
    return str(len({record["config"]["seed"] for record in runs}))


def headline(records: list[Record], scale: str) -> Table | None:
    """Adam and Adafactor with several seeds, evaluated in three ways."""
    rows = []
    for row, warm in COMPARED.values():
        for multiplier in sorted({r["config"]["multiplier"] for r in results.select(records, scale, row=row)}):
            runs = results.select(records, scale, row=row, warmup=warm, multiplier=multiplier)
            if not runs or (scale == "quarter" and len(runs) < 2):
                continue  # single seeds of it are in the sweep's table
            cells = [f"{row}, {'warm-up' if warm else 'no warm-up'}", ROWS[row].describe(), f"×{multiplier:g}"]
            cells.append(count_seeds(runs))
            for bleu in (False, True):
                for way in WAYS:
                    cells.append(over_seeds(runs, results.noise(records, (scale,), way, bleu), way, bleu))
            rows.append([*cells, f"{runs[0]['state_bytes']:,}"])
    heads = ["run", "optimizer", "step size", "seeds"]
    heads += [f"{what}, {WAY_NAMES[way]}" for what in ("dev loss", "BLEU") for way in WAYS]
    size = SCALES[scale]
    note = (
        f"{size.steps:,} steps of up to {size.tokens:,} + {size.tokens:,} tokens, {size.test:,} test sentences, "
        f"beam 4. “Decayed” trains {size.branch} steps more. ± is half the 95 % interval of the mean over seeds, when "
        "what a seed does to all rows alike is taken out; none where too few "
        "seeds were run, and none at step sizes that are not a row's best, whose noise may be larger."
    )
    if any("ways" not in r for r in results.select(records, scale)):
        note += " Runs without the other two evaluations are older; their dev loss is of 300 sentences, not of 1,000."
    name = "a quarter of `small`'s length" if scale == "quarter" else f"`{scale}`"
    return Table(f"Adam and Adafactor at {name}", note, [*heads, "bytes of state"], rows, 2) if rows else None


DIFFERENCES = (
    ("long", "O", False, 2.5, "B", True, 5.0),
    ("small", "O", False, 3.0, "B", True, 6.0),
    ("small", "O", False, 3.0, "B", True, 3.0),
    ("small", "O", False, 3.0, "O", True, 3.0),
    ("small", "O", True, 3.0, "N", True, 3.0),
    ("quarter", "O", False, 6.0, "O", True, 6.0),
    ("mini", "O", False, 3.0, "B", True, 3.0),
)


def gaps(records: list[Record]) -> dict[str, tuple[int, list[float]]]:
    """For each of `DIFFERENCES` that there are runs of: the seeds of both rows, and the mean gap in each tenth."""
    found = {}
    for scale, *settings in DIFFERENCES:
        names, sides = [], []
        for row, warm, multiplier in (settings[:3], settings[3:]):
            runs = results.select(records, scale, row=row, warmup=warm, multiplier=multiplier)
            sides.append({run["config"]["seed"]: run for run in runs})
            names.append(f"{row}{'' if warm else ' without warm-up'} ×{multiplier:g}")
        pairs = [(run, sides[1][seed]) for seed, run in sides[0].items() if seed in sides[1]]
        # another order of the text makes other batches
        both = [results.tenths(*pair) for pair in pairs if pair[0]["corpus"] == pair[1]["corpus"]]
        if both:
            means = [results.mean(tenth) for tenth in zip(*both, strict=True)]
            found[f"`{scale}`: {names[0]} − {names[1]}"] = (len(both), means)
    return found


def over_the_run(records: list[Record]) -> Table | None:
    """How the difference in training loss between two rows goes through a run, tenth by tenth."""
    rows = [
        [name, str(seeds), *(f"{value:+.2f}".replace("-", "−") for value in means)]
        for name, (seeds, means) in gaps(records).items()
    ]
    note = (
        "One seed is the same batches for all rows, so training losses can be subtracted step by step. Means over "
        "tenths of the run and over the seeds that both rows have."
    )
    heads = ["difference", "seeds", *(f"{tenth}." for tenth in range(1, 11))]
    return Table("The difference in training loss over the run", note, heads, rows) if rows else None


def step_sizes(records: list[Record], at: str) -> Table | None:
    """The step-size sweep of the compared rows at a scale."""
    found = {row: results.select(records, at, row=row, warmup=warm) for row, warm in map(COMPARED.__getitem__, SWEPT)}
    every = sorted({r["config"]["multiplier"] for runs in found.values() for r in runs})
    rows = []
    for row, runs in found.items():
        losses = dict(results.sweep_curve(runs, "decayed"))
        if len(losses) > 1:
            best = results.best_multiplier(runs, "decayed")
            cells = [number(losses.get(m, math.nan)) for m in every]
            scores = [results.mean(results.test_bleu(r, "decayed") for r in runs if r["config"]["multiplier"] == m)
                      for m in every]  # fmt: skip
            cells[every.index(best)] = f"**{losses[best]:.2f}**"
            rows.append([row, *cells, *(number(score, 1) for score in scores)])
    if not rows:
        return None
    heads = ["row", *(f"loss ×{m:g}" for m in every), *(f"BLEU ×{m:g}" for m in every)]
    scale = SCALES[at]
    note = (
        f"{scale.steps:,} steps and a decay to zero, {scale.test} test sentences; the mean over the seeds that were "
        "run, one for most. A row's best step size, in bold, has the lower dev loss beside each other one, over the "
        "seeds that both have."
    )
    return Table(f"Which step size suits which row, at `{at}`", note, heads, rows)


def suspects(records: list[Record]) -> Table | None:
    """What may explain a difference: one change at a time."""
    rows = []
    for row, warm, what in (
        ("N", True, "N: absolute steps, full second moments, warm-up"),
        ("NF", True, "… factored"),
        ("O", True, "… and relative steps"),
        ("O", False, "… and no warm-up: O"),
        ("P", False, "… and momentum: P"),
        ("NF", False, "O with absolute steps"),
        ("B", True, "B: Adam with warm-up"),
        ("B", False, "… without"),
    ):
        for run in results.select(records, "quarter", row=row, warmup=warm, seed=0):
            if run["config"]["multiplier"] not in {3.0, 6.0}:
                continue
            losses = [number(results.dev_loss(run, way)) for way in WAYS]
            bleus = [number(results.test_bleu(run, way), 1) for way in WAYS]
            rows.append([what, f"×{run['config']['multiplier']:g}", f"{run['steps']:,}", *losses, *bleus])
    heads = ["run", "step size", "steps", *(f"{what}, {WAY_NAMES[way]}" for what in ("loss", "BLEU") for way in WAYS)]
    note = "From N to O and P, and Adam's warm-up; one seed. A line with dots changes the one before it."
    changed = any(r["config"]["row"]["name"] == "NF" for r in records)
    return Table("One change at a time", note, heads, rows) if changed else None


def table_2(records: list[Record]) -> Table | None:
    """The paper's BLEU of all rows beside our losses at `pattern`, where rows can fail, and at `mini`."""
    rows = []
    failing = [pattern_losses(records, warm) for warm in (True, False)]
    for row in TABLE_2:
        mini = [results.select(records, "mini", row=row.name, warmup=warm) for warm in (True, False)]
        cells = [" ".join(f"{loss:.2f}" for loss in losses.get(row.name, ())) or "–" for losses in failing]
        cells += [over_seeds(runs, results.noise(records, ("mini",), of=runs)) for runs in mini]
        if set(cells) != {"–"}:
            rows.append([row.name, row.describe(), *(papers_score(value) for value in (row.warm, row.cold)), *cells])
    hard, easy = SCALES["pattern"], SCALES["mini"]
    note = (
        f"`pattern` is {hard.steps:,} steps of a {hard.shape.norm}-norm Transformer at ×{hard.adaptive:g}: the dev "
        f"loss of each seed; a run that ends above {results.FAILED:.2f} has learned next to nothing. `mini` is "
        f"{easy.steps:,} steps of a {easy.shape.norm}-norm Transformer at ×{easy.adaptive:g} (SGD ×1): the mean over "
        "seeds ± half its 95 % interval, from one deviation for all rows that learn; for those that end more than "
        f"{results.LEARNED:g} above the best it is that of all rows."
    )
    found = [agreement(records, warm) for warm in (True, False)]
    if found[0] and found[1]:
        note += (
            f" Spearman's rank correlation of rows A to P at `pattern` with the paper: {found[0]} with warm-up, "
            f"{found[1]} without. The interval is Fisher's, over rows; the mean over the seeds stands for a row."
        )
    heads = ["", "optimizer", "paper, warm-up", "paper, none"]
    heads += [f"loss at `{scale}`, {how}" for scale in ("pattern", "mini") for how in ("warm-up", "none")]
    return Table("Table 2 at `pattern` and at `mini`", note, heads, rows, 2) if rows else None


def papers_score(bleu: float) -> str:
    """A cell of the paper's."""
    return "diverged" if math.isnan(bleu) else f"{bleu:.1f}"


PATTERN_ROWS = tuple(row for row in TABLE_2 if row.step != "sgd")


def pattern_losses(records: list[Record], warm: bool) -> dict[str, list[float]]:
    """The final dev losses at `pattern`, by row in the order of the table, over the seeds."""
    runs = {row.name: results.select(records, "pattern", row=row.name, warmup=warm) for row in PATTERN_ROWS}
    return {name: [results.final_loss(run) for run in found] for name, found in runs.items() if found}


def agreement(records: list[Record], warm: bool) -> results.Correlation | None:
    """The rank correlation of the paper's BLEU and the lab's losses over rows A to P; None while rows are missing."""
    losses = pattern_losses(records, warm)
    if len(losses) < len(PATTERN_ROWS):
        return None
    papers = [row.warm if warm else row.cold for row in PATTERN_ROWS]
    return results.rank_correlation(papers, [-results.mean(losses[row.name]) for row in PATTERN_ROWS])


def stability(records: list[Record]) -> Table | None:
    """Dev loss over the step size, and the range of step sizes that do well."""
    rows = []
    lines = [(row, False) for row in SWEEP_ROWS] + [("A", True)]
    for row, warm in lines:
        runs = results.select(records, "hard", row=row, warmup=warm)
        curve = results.sweep_curve(runs)
        if len(curve) > 1:
            low, high = results.good_range(curve)
            best = min(loss for _, loss in curve)
            cells = [f"**{loss:.2f}**" if loss == best else f"{loss:.2f}" for _, loss in curve]
            name = ROWS[row].describe() + (", with warm-up" if warm else "")
            rows.append([row, name, *cells, f"×{low:.2g} to ×{high:.2g}", f"×{results.learns_up_to(curve):.2g}"])
    if not rows:
        return None
    seen = sorted({r["config"]["multiplier"] for r in results.select(records, "hard")})
    heads = ["", "optimizer", *(f"×{m:g}" for m in seen), f"within {results.NEAR:g} of the best", "learns up to"]
    shape, scale = SCALES["hard"].shape, SCALES["hard"]
    note = (
        f"No warm-up but in the last line. {scale.steps} steps of a {shape.norm}-norm Transformer, {shape.layers} + "
        f"{shape.layers} layers of width {shape.width}. Dev loss, the mean over seeds (two at ×3, one elsewhere unless "
        f"more were run). A model that knows only how often each word occurs has a loss of {results.UNIGRAM:.2f}: "
        "failed runs end there. Then two measures: from which to which step size the loss stays within "
        f"{results.NEAR:g} of the row's best, and up to which it learns (0.3 below that of word frequencies), with "
        "lines drawn between the points."
    )
    return Table("The stability sweep at `hard`", note, heads, rows, 2)


def table_3(records: list[Record]) -> Table | None:
    """Three embedding schemes."""
    rows = []
    for embedding, paper in TABLE_3.items():
        ours = [results.select(records, "mini", tied=False, embedding=embedding, row=row) for row in ("Adam", "O")]
        if any(ours):
            texts = {"scaled": ["1/√d", "√d"], "unit": ["1", "1"], "plain": ["1/√d", "1"]}[embedding]
            cells = [over_seeds(runs, results.noise(records, ("mini",), bleu=bleu, tied=False, of=runs), bleu=bleu)
                     for bleu in (False, True) for runs in ours]  # fmt: skip
            rows.append([*texts, *(f"{value:.1f}" for value in paper), *cells, "/".join(map(count_seeds, ours))])
    heads = ["initial deviation", "multiplier", "paper, Adam", "paper, Adafactor", "loss, Adam", "loss, Adafactor"]
    note = "Adam with warm-up (β₂ = 0.98) and Adafactor (row O) without; the softmax has a matrix of its own."
    return (
        Table("Table 3 at `mini`", note, [*heads, "BLEU, Adam", "BLEU, Adafactor", "seeds"], rows, 2) if rows else None
    )


def papers_own(records: list[Record]) -> list[Table]:
    """Tables 2 and 3 at the paper's own scale, its cells beside the measured ones."""
    note = (
        "BLEU of newstest2013 with beam 4: the last weights / the mean of the last tenth's / after a decay to zero. "
        "The score is sacreBLEU's, which is not the paper's tokenised one: compare rows, not single values."
    )
    rows = []
    for row in TABLE_2:
        both = [results.select(records, "base", row=row.name, warmup=warm) for warm in (True, False)]
        pairs = zip((row.warm, row.cold), both, strict=True)
        rows.append([row.name, row.describe(), *(cell for pair in pairs for cell in _beside(*pair))])
    heads = ["", "optimizer", "paper, warm-up", "measured", "paper, none", "measured"]
    made = [Table("Table 2 at the paper's scale", note, heads, rows, 2)] if results.select(records, "base") else []
    rows = []
    for embedding, paper in TABLE_3.items():
        both = [results.select(records, "base3", tied=False, embedding=embedding, row=row)
                for row in (table_3_adam("base3"), "O")]  # fmt: skip
        if any(both):
            rows.append([embedding, *(cell for pair in zip(paper, both, strict=True) for cell in _beside(*pair))])
    heads = ["embedding", "paper, Adam", "measured", "paper, Adafactor", "measured"]
    return made + ([Table("Table 3 at the paper's scale", note, heads, rows)] if rows else [])


def _beside(paper: float, runs: list[Record]) -> list[str]:
    """The paper's BLEU, and those of the dev set that were measured."""
    if not runs or all(run["diverged"] for run in runs):
        return [papers_score(paper), "diverged" if runs else "–"]
    found = [results.mean(results.bleu(run, way, "dev") for run in runs) for way in WAYS]
    return [papers_score(paper), " / ".join(number(value, 1) for value in found)]


def times(records: list[Record]) -> Table | None:
    """What each experiment took."""
    rows = []
    for scale in ("long", "small", "quarter", "wide", "mini", "hard", "pattern"):
        runs = [r for r in records if r["config"]["scale"]["name"] == scale]
        if runs:
            wall = sum(r["train_seconds"] + r["evaluate_seconds"] for r in runs)
            timed = [r["cpu_seconds"] for r in runs if "cpu_seconds" in r]
            cells = [str(len(runs)), f"{wall / 3600:.1f}", f"{sum(timed) / 3600:.1f} of {len(timed)} runs"]
            rows.append([f"`{scale}`", *cells, f"{sum(timed) / len(timed) / 60:.1f}" if timed else "–"])
    note = (
        "One thread a run, two runs at a time, on a machine with other work: the wall time is no measure of speed. "
        "CPU time is recorded since the runs with three evaluations."
    )
    heads = ["scale", "runs", "wall time, hours", "CPU time, hours", "CPU minutes a run"]
    return Table("What it took", note, heads, rows) if rows else None
