"""The report, and the parts of docs/ that are written from the records."""

from __future__ import annotations

from pathlib import Path

from lab import advice, answer, claims, pictures, results, tables
from lab.answer import listed, span
from lab.presets import SCALES
from lab.results import FAILED, Record, dev_loss, of_row, test_bleu
from lab.tables import Table

END = "<!-- end -->\n"
DOCS = Path(__file__).parents[1] / "docs"


def begin(part: str) -> str:
    """The mark before a part of a document that is written from the records."""
    return f"<!-- {part}, from the records: python -m lab report --documents -->\n"


def report(records: list[Record]) -> str:
    """One Markdown page of all that the records say."""
    made = [tables.of_claims(records), *tables.papers_own(records), *_every_table(records)]
    return "\n".join(
        [f"# What the records say\n\n{answer.answer(records)}\n", *(table.markdown() for table in made if table)]
    )


def documents(records: list[Record]) -> dict[tuple[Path, str], str]:
    """What stands in each part of each document."""
    picture = f"![Table 2 of the paper beside the lab's losses, row by row]({pictures.PATTERN.name})\n"
    verdicts = tables.of_claims(records)
    page, settings = DOCS / "reproduction.md", DOCS / "settings.md"
    return {
        (page, "the answer"): f"{answer.answer(records)}\n\n{picture if answer.is_pattern_whole(records) else ''}",
        (page, "the claims"): verdicts.markdown() if verdicts else "",
        (page, "why"): WHY if results.select(records, "updates") else "",
        (page, "differences"): differences(records),
        (page, "the tables"): "\n".join(table.markdown(folded=True) for table in _every_table(records)),
        (settings, "pre-training"): advice.pre_training(records),
        (settings, "no warm-up"): advice.no_warm_up(records),
    }


def _every_table(records: list[Record]) -> list[Table]:
    found = [*(tables.comparison(records, scale) for scale in ("long", "small", "quarter"))]
    found += [tables.table_2(records), tables.other_models(records), tables.of_updates(records)]
    return [table for table in (*found, tables.table_3(records), tables.of_rules()) if table]


WHY = f"""\
## Why rows fail without warm-up

![How many updates are larger than desired, and the training loss, over the first 400 steps]({pictures.UPDATES.name})

The paper's account (§5): a slow second moment is out of date while the model changes fast, so that updates are larger
than desired; clipped, they do no harm. The figure counts, for matrices of the decoder's attention, how often RMS(U) is
above 3 ([as a table](#updates-larger-than-desired)). What would speak for the account was fixed before the runs; its
verdict is in the list above.
"""


def differences(records: list[Record]) -> str:
    """O beside B in figures, and what else the runs of the two have shown."""
    table = tables.of_differences(records)
    remarks = [_near_the_edge, _depth, _overfitting, _small_embeddings]
    lines = "".join(f"- {text}\n" for remark in remarks if (text := remark(records)))
    return (f"{table.markdown()}\n" if table else "") + lines


def _near_the_edge(records: list[Record]) -> str:
    cold, warm = (of_row(records, name, "small", 6.0) for name in ("O-", "O"))
    if not cold or not warm:
        return ""
    best = results.best_multiplier(of_row(records, "O-", "small"), "decayed")
    return (
        f"**O is near its edge.** In 4,000 steps without warm-up, in a pre-norm model, ×{best:g} is the best of the "
        f"step sizes that were run. At ×6 it ends at {span([dev_loss(run, 'decayed') for run in cold])} "
        f"({span([test_bleu(run, 'decayed') for run in cold], 1)} BLEU), with warm-up at "
        f"{span([dev_loss(run, 'decayed') for run in warm])}, on other orders of the text."
    )


def _depth(records: list[Record]) -> str:
    runs = of_row(records, "A160-", "deep")
    return (
        "**Depth and a short memory did not make A fail.** A pre-norm model of 6 + 6 layers of width 64 learns without "
        "warm-up in row A with β₂ = 0.99375, so that the flat phase is ten times as long as the window, as in the "
        f"paper: dev loss {span([dev_loss(run) for run in runs])} after 16,000 steps at five times the paper's step "
        f"({claims.count(len(runs))})."
    ) if runs else ""  # fmt: skip


def _overfitting(records: list[Record]) -> str:
    found = []
    for scale, dropout in (("small", "without dropout"), ("long", "with it")):
        runs = [run for name in ("B", "O", "O-") for run in of_row(records, name, scale)]
        gaps = [dev_loss(run) - run["train_loss"] for run in runs if dev_loss(run) < FAILED - 2]  # those that learned
        found += [f"by {span(gaps)} in {SCALES[scale].steps:,} steps {dropout}"] if gaps else []
    return f"**The runs overfit.** Their dev loss is above the training loss {listed(found)}." if found else ""


def _small_embeddings(records: list[Record]) -> str:
    losses = [dev_loss(run) for run in results.select(records, "mini", False, embedding="plain")]
    told = "**With small embeddings nothing has learned** in Table 3's 1,200 steps: dev losses of"
    return f"{told} {span(losses)} ({len(losses)} runs)." if losses else ""
