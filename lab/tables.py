"""The tables of the reproduction, from the records, as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from lab import results, rules, updates
from lab.claims import judge_all, pattern_losses
from lab.experiments import COMPARISON, OTHER_MODELS, UPDATES_ROWS, chosen_step_size, table_3_adam
from lab.presets import SCALES
from lab.results import Record, mean, of_row, paired
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

    def markdown(self, folded: bool = False) -> str:
        """Title, note and table; folded, a reader opens them."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        rows = "".join(f"| {' | '.join(line).replace(chr(10), '<br>')} |\n" for line in lines)
        if folded:
            first = self.note.partition(". ")[0].replace("`", "").rstrip(".")
            return (
                f'### {self.title}\n\n<details markdown="1"><summary>{first}</summary>\n\n'
                f"{self.note}\n\n{rows}\n</details>\n"
            )
        return f"### {self.title}\n\n{self.note}\n\n{rows}"


def number(value: float, digits: int = 2) -> str:
    """A number of the table, or a dash."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def over_seeds(records: list[Record], way: str = "last", bleu: bool = False) -> str:
    """The mean over seeds and, of several, the lowest and the highest."""
    if records and all(record["diverged"] for record in records):
        return "diverged"
    values = [results.test_bleu(r, way) if bleu else results.dev_loss(r, way) for r in records if not r["diverged"]]
    values, digits = [value for value in values if math.isfinite(value)], 1 if bleu else 2
    if len(values) < 2:
        return number(mean(values), digits)
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def of_claims(records: list[Record]) -> Table | None:
    """Claims, verdicts, what was measured where it decides and elsewhere, and how old the rule is."""
    rows = []
    for claim, finding in judge_all(records):
        mark = " †" if finding.is_contradicted else ""
        runs = {"none": "new runs", "all": "known runs"}.get(claim.known, f"{claim.known} known")
        rows.append(
            [
                f"{claim.title} ({claim.place})",
                f"**{finding.verdict}**",
                finding.measured,
                finding.other + mark,
                f"{claim.set}, {runs}",
            ]
        )
    heads = ["claim of the paper", "verdict", "measured", "the other scale", "rule set"]
    return Table("The claims", NOTE, heads, rows) if rows else None


NOTE = """\
The first row named minus the second in dev loss, ± half the 95 % interval of Student's t over pairs of one seed on one
text: below 0 the first is better. With fewer than three there are too few runs to judge.

- **As good** holds if the interval ends below +0.05, and does not if it begins above.
- **Better** holds if it ends below 0, and does not if it begins above −0.05.
- **With warm-up `mini` decides**: 1,200 steps of a pre-norm model, as the paper's is, of 1.2 million parameters.
- **Without warm-up `pattern` decides**: 2,000 steps of a post-norm model of 0.4 million, in which rows can fail.
- **†** marks a verdict that the other of the two contradicts, by the opposite verdict or an interval on the other side
  of 0.
- `long`, `small` and `quarter` are 16,000, 4,000 and 1,000 steps of a pre-norm model of 1.4 million, `updates` the
  first 400 of `pattern`, `pattern-broad` and `pattern-deep` two other post-norm models, selected for no row.
- **The last column** has the date of the rule, and whether the runs that judge are newer.
- No interval is corrected for the number of claims: of 25 independent ones about one would miss.

[The paper's sentences, and all rules](#the-papers-sentences-and-the-rules)."""


def of_rules() -> Table:
    """The paper's sentence behind each claim, with what decides and why; the rules before them."""
    words = [f"- **{name}**: {text}" for name, text in rules.STATED["rules"].items()]
    words += [f"- **`{name}`**: {text}" for name, text in rules.STATED["scales"].items()]
    rows, before = [], ""
    for claim in rules.claims():
        sentence = "the same sentence" if claim.sentence == before else f"“{claim.sentence}” ({claim.place})"
        scales = dict.fromkeys(pair.scale for pair in claim.pairs)
        seeds = dict.fromkeys(_seeds(pair.seeds) for pair in claim.pairs)
        pairs = dict.fromkeys(" − ".join(name for name in (pair.first, pair.second) if name) for pair in claim.pairs)
        where = ", ".join(f"`{scale}`" for scale in scales)
        rows.append([", ".join(pairs), sentence, claim.rule, where, ", ".join(seeds)])
        before = claim.sentence
    note = "What `lab/claims.json` says, in the order of the list of verdicts (“-” is without warm-up). "
    note += "A claim without a run is not in that list.\n\n" + "\n".join(words)
    return Table("The paper's sentences and the rules", note, ["rows", "sentence", "rule", "scale", "seeds"], rows)


def _seeds(seeds: tuple[int, ...]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])


def comparison(records: list[Record], scale: str) -> Table | None:
    """Adam and Adafactor at each step size, evaluated in three ways."""
    rows = []
    for name in COMPARISON[scale]:
        runs = of_row(records, name, scale)
        best = results.best_multiplier(runs, "decayed")
        for multiplier in sorted({run["config"]["multiplier"] for run in runs}):
            found = [run for run in runs if run["config"]["multiplier"] == multiplier]
            step = f"**×{multiplier:g}**" if multiplier == best else f"×{multiplier:g}"
            cells = [f"{name.rstrip('-')}, {'no ' * name.endswith('-')}warm-up", step, str(len(found))]
            cells += [over_seeds(found, way, bleu) for bleu in (False, True) for way in WAYS]
            rows.append([*cells, f"{found[0]['state_bytes']:,}"])
    heads = ["run", "step size", "seeds"]
    heads += [f"{what}, {WAY_NAMES[way]}" for what in ("dev loss", "BLEU") for way in WAYS]
    size = SCALES[scale]
    note = (
        f"{size.steps:,} steps of up to {size.tokens:,} + {size.tokens:,} tokens, {size.test:,} test sentences, "
        f"beam 4. “Decayed” trains {size.branch:,} steps more. The mean over seeds and, in brackets, the lowest and "
        "the highest. In bold a row's step size with the lowest decayed dev loss of those that were run."
    )
    return Table(f"Adam and Adafactor at `{scale}`", note, [*heads, "bytes of state"], rows) if rows else None


# Of Adam and Adafactor: scale, and two rows with their step sizes.
Tried = tuple[str, float]  # a row and its multiple of the paper's step size
DIFFERENCES: tuple[tuple[str, tuple[Tried, Tried]], ...] = (
    ("long", (("O-", 2.5), ("B", 5.0))),
    ("small", (("O-", 3.0), ("B", 6.0))),
    ("quarter", (("O-", 3.0), ("B", 6.0))),
    ("long", (("O", 2.5), ("O-", 2.5))),
    ("small", (("O", 6.0), ("O-", 3.0))),
    ("quarter", (("O", 6.0), ("O-", 3.0))),
    ("small", (("P-", 6.0), ("O-", 3.0))),
)


def of_differences(records: list[Record]) -> Table | None:
    """Adam and Adafactor, with warm-up and without, over all pairs; text by text if there were several."""
    rows = []
    for scale, both in DIFFERENCES:
        sides = [results.by_pair(of_row(records, row, scale, multiplier)) for row, multiplier in both]
        pairs = sorted(sides[0].keys() & sides[1].keys())
        texts = {text: [pair for pair in pairs if pair[1] == text] for _, text in pairs}
        for part in (pairs, *(texts.values() if len(texts) > 1 else ())) if pairs else ():
            ours, theirs = ([side[pair] for pair in part] for side in sides)
            name = f"{_with_step(*both[0])} − {_with_step(*both[1])}" if part is pairs else "of these, one text"
            cells = [paired(ours, theirs, partial(results.final_loss, way=way)).text(3) for way in WAYS]
            cells += [paired(ours, theirs, partial(results.test_bleu, way=way)).text(1) for way in WAYS]
            rows.append([name, f"{SCALES[scale].steps:,}", ", ".join(str(seed) for seed, _ in part), *cells])
    heads = ["", "steps", "seeds", *(f"{what}, {WAY_NAMES[way]}" for what in ("dev loss", "BLEU") for way in WAYS)]
    note = (
        "Below 0 in dev loss, or above 0 in BLEU, the first is better. × is the multiple of the paper's step size. "
        "All pairs of one seed on one text count, those of the claims among them; where the text had several orders, "
        "a line for each follows."
    )
    return Table("Adafactor beside Adam", note, heads, rows) if rows else None


def _with_step(row: str, multiplier: float) -> str:
    return f"{row.rstrip('-')} ×{multiplier:g} {'without' if row.endswith('-') else 'with'} warm-up"


def table_2(records: list[Record]) -> Table | None:
    """The paper's BLEU of all rows beside our losses at `pattern`, where rows can fail, and at `mini`."""
    rows = []
    failing = {**pattern_losses(records, True), **pattern_losses(records, False)}
    for row in TABLE_2:
        names = (row.name, f"{row.name}-")
        cells = [" ".join(f"{loss:.2f}" for loss in failing.get(name, ())) or "–" for name in names]
        cells += [over_seeds(of_row(records, name, "mini")) for name in names]
        if set(cells) != {"–"}:
            rows.append([row.name, row.describe(), *(papers_score(value) for value in (row.warm, row.cold)), *cells])
    hard, easy = SCALES["pattern"], SCALES["mini"]
    note = (
        f"`pattern` is {hard.steps:,} steps of a {hard.shape.norm}-norm Transformer at ×{hard.adaptive:g}: the dev "
        f"loss of each seed; a run that ends above {results.FAILED:.2f} has learned next to nothing. `mini` is "
        f"{easy.steps:,} steps of a {easy.shape.norm}-norm Transformer at ×{easy.adaptive:g} (SGD ×1): the mean over "
        "seeds and, in brackets, the lowest and the highest."
    )
    heads = ["", "optimizer", "paper, warm-up", "paper, none"]
    heads += [f"loss at `{scale}`, {how}" for scale in ("pattern", "mini") for how in ("warm-up", "none")]
    return Table("Table 2 at `pattern` and at `mini`", note, heads, rows) if rows else None


def papers_score(bleu: float) -> str:
    """A cell of the paper's."""
    return "diverged" if math.isnan(bleu) else f"{bleu:.1f}"


def other_models(records: list[Record]) -> Table | None:
    """Table 2's rows in two other post-norm models."""
    names = [pair.first for claim in rules.claims() for pair in claim.pairs if pair.scale == OTHER_MODELS[0]]
    rows = []
    for name in names:
        row = ROWS[name.rstrip("-")]
        cells = [" ".join(f"{results.final_loss(r):.2f}" for r in of_row(records, which, scale, m)) or "–"
                 for scale in OTHER_MODELS for m in (chosen_step_size(scale, records) or 0.0,)
                 for which in (row.name, name)]  # fmt: skip
        rows.append([row.name, papers_score(row.warm), papers_score(row.cold), *cells])
    if all(set(row[3:]) == {"–"} for row in rows):
        return None
    steps = ", ".join(f"×{chosen_step_size(scale, records):g} at `{scale}`" for scale in OTHER_MODELS
                      if chosen_step_size(scale, records))  # fmt: skip
    note = (
        "Dev losses of each seed, as at `pattern`, with 2 + 2 layers of width 128 and with 6 + 6 of width 64, at the "
        f"largest of ×1, 1.7, 3 and 5 at which B with warm-up learns: {steps}."
    )
    heads = ["", "paper, warm-up", "paper, none"]
    heads += [f"`{scale}`, {how}" for scale in OTHER_MODELS for how in ("warm-up", "none")]
    return Table("Two other models", note, heads, rows)


def of_updates(records: list[Record]) -> Table | None:
    """Large updates of rows without warm-up, and what became of the runs."""
    rows = []
    for name in UPDATES_ROWS:
        runs = of_row(records, f"{name}-", "updates")
        if runs:
            shares = " ".join(f"{100 * updates.share_large(run):.1f}" for run in runs)
            losses = [" ".join(f"{updates.training_loss(run, steps):.2f}" for run in runs)
                      for steps in (updates.START, updates.END)]  # fmt: skip
            rows.append([name, ROWS[name].describe(), papers_score(ROWS[name].cold), shares, *losses])
    note = (
        "The first 400 steps of `pattern` without warm-up, a figure for each of seeds 3 to 5: in how many per cent of "
        f"the cases RMS(U) of a matrix of the decoder's attention is above {updates.LARGE:g} in steps "
        f"{_span(updates.MIDDLE)}, before clipping; and the training loss over steps {_span(updates.START)} and "
        f"{_span(updates.END)}."
    )
    heads = ["", "optimizer", "paper, none", "large updates, %", "loss at first", "loss at the end"]
    return Table("Updates larger than desired", note, heads, rows) if rows else None


def _span(steps: tuple[int, int]) -> str:
    return f"{steps[0]} to {steps[1]}"


def table_3(records: list[Record]) -> Table | None:
    """Three embedding schemes."""
    rows = []
    for embedding, paper in TABLE_3.items():
        ours = [results.select(records, "mini", tied=False, embedding=embedding, row=row) for row in ("Adam", "O")]
        if any(ours):
            texts = {"scaled": ["1/√d", "√d"], "unit": ["1", "1"], "plain": ["1/√d", "1"]}[embedding]
            cells = [over_seeds(runs, bleu=bleu) for bleu in (False, True) for runs in ours]
            rows.append([*texts, *(f"{value:.1f}" for value in paper), *cells])
    heads = ["initial deviation", "multiplier", "paper, Adam", "paper, Adafactor", "loss, Adam", "loss, Adafactor"]
    note = (
        "Adam with warm-up (β₂ = 0.98) and Adafactor (row O) without; the softmax has a matrix of its own. Schedule "
        "and batch are those of `mini`, not the paper's."
    )
    return Table("Table 3 at `mini`", note, [*heads, "BLEU, Adam", "BLEU, Adafactor"], rows) if rows else None


def papers_own(records: list[Record]) -> list[Table]:
    """Tables 2 and 3 at the paper's own scale, its cells beside the measured ones."""
    note = (
        "BLEU of newstest2013 with beam 4: the last weights / the mean of the last tenth's / after a decay to zero. "
        "The score is sacreBLEU's, which is not the paper's tokenised one: compare rows, not single values."
    )
    rows = []
    for row in TABLE_2:
        both = [of_row(records, name, "base") for name in (row.name, f"{row.name}-")]
        pairs = zip((row.warm, row.cold), both, strict=True)
        rows.append([row.name, row.describe(), *(cell for pair in pairs for cell in _beside(*pair))])
    heads = ["", "optimizer", "paper, warm-up", "measured", "paper, none", "measured"]
    made = [Table("Table 2 at the paper's scale", note, heads, rows)] if results.select(records, "base") else []
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
    found = [mean(results.bleu(run, way, "dev") for run in runs) for way in WAYS]
    return [papers_score(paper), " / ".join(number(value, 1) for value in found)]
