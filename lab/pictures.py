"""The pictures of docs/reproduction.md, for light and dark pages: the paper against the lab, and O against B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab import results, tables
from lab.results import Record
from lab.style import INK, OURS, THEIRS, styled

DOCS = Path(__file__).parents[1] / "docs"
PATTERN, OVER_THE_RUN = DOCS / "reproduction.png", DOCS / "reproduction-over-the-run.png"
COLOURS = ("#3d7fd9", "#d9863d", "#4da167", "#a06cc9")


def draw(records: list[Record]) -> list[Path]:
    """Draw every picture that there are records for, and return the files."""
    drawn = []
    if all(tables.agreement(records, warm) for warm in (True, False)):
        draw_pattern(records, PATTERN)
        drawn.append(PATTERN)
    if tables.gaps(records):
        draw_over_the_run(records, OVER_THE_RUN)
        drawn.append(OVER_THE_RUN)
    return drawn


@styled
def draw_pattern(records: list[Record], path: Path) -> None:
    """Draw rows A to P, the best of the paper without warm-up on top: its BLEU on the left, our loss on the right.

    The loss is turned round, so that right is better on both sides.
    """
    from matplotlib.figure import Figure

    rows = sorted(tables.PATTERN_ROWS, key=lambda row: row.cold)
    figure = Figure(figsize=(9, 5), layout="constrained")
    paper, lab = figure.subplots(1, 2, sharey=True)
    for warm, marker, colour in ((True, "o", THEIRS), (False, "D", OURS)):
        look: dict[str, Any] = {"color": colour, "marker": marker}
        losses, order = tables.pattern_losses(records, warm), tables.agreement(records, warm)
        label = f"{'with' if warm else 'without'} warm-up: rank correlation {order.value if order else 0:.2f}"
        paper.scatter([row.warm if warm else row.cold for row in rows], range(len(rows)), 46, label=label, **look)
        for place, row in enumerate(rows):
            values = losses[row.name]
            lab.scatter(values, [place] * len(values), 14, alpha=0.6, linewidths=0, **look)
            lab.scatter(results.mean(values), place, 46, **look)
    paper.set_yticks(range(len(rows)), [f"{row.describe()}  {row.name}" for row in rows])
    paper.set_xlabel("BLEU", fontsize=8)
    paper.set_title("The paper", fontsize=10, loc="left")
    lab.axvline(results.UNIGRAM, color=INK, lw=0.8, ls=":")
    lab.set_xlim(6.4, 4.2)
    lab.set_xlabel("dev loss (dotted: of word frequencies alone)", fontsize=8)
    lab.set_title("Here: each seed, and the mean", fontsize=10, loc="left")
    for axes in (paper, lab):
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


@styled
def draw_over_the_run(records: list[Record], path: Path) -> None:
    """Draw the training loss of O without warm-up minus that of B with it, in the mean over seeds, tenth by tenth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    against_adam = {name: gap for name, gap in tables.gaps(records).items() if "− B" in name}
    for (name, (seeds, means)), colour in zip(against_adam.items(), COLOURS, strict=False):
        label = f"{name.replace('`', '')}, {seeds} seed{'s' * (seeds > 1)}"
        axes.plot([10 * tenth + 5 for tenth in range(10)], means, color=colour, lw=2, marker="o", ms=4, label=label)
    axes.axhline(0.0, color=INK, lw=0.8)
    axes.set(xlabel="% of the run", ylabel="training loss, O − B", xlim=(0, 100))
    axes.set_title("Below zero, Adafactor without warm-up is ahead of Adam with it", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
