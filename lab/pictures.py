"""The pictures of docs/reproduction.md, for light and dark pages: the paper against the lab, and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lab import results, updates
from lab.answer import is_pattern_whole
from lab.claims import pattern_losses
from lab.experiments import ADAPTIVE
from lab.results import Record, of_row
from lab.rows import ROWS
from lab.style import INK, OURS, THEIRS, styled

DOCS = Path(__file__).parents[1] / "docs"
PATTERN, UPDATES = DOCS / "reproduction.png", DOCS / "reproduction-updates.png"
# Of the figure on updates: rows and their colours; those that are clipped at 1 are blue.
SHOWN = {"A": "#c94f4f", "C": "#d9863d", "I": "#a06cc9", "H": "#3d7fd9", "N": "#62b0c9"}
STRETCH = 20  # steps of a point of that figure


def draw(records: list[Record]) -> list[Path]:
    """Draw every picture that there are records for, and return the files."""
    drawn = []
    if is_pattern_whole(records):
        draw_pattern(records, PATTERN)
        drawn.append(PATTERN)
    if results.select(records, "updates"):
        draw_updates(records, UPDATES)
        drawn.append(UPDATES)
    return drawn


@styled
def draw_pattern(records: list[Record], path: Path) -> None:
    """Draw rows A to P, the best of the paper without warm-up on top: its BLEU on the left, our loss on the right.

    The loss is turned round, so that right is better on both sides.
    """
    from matplotlib.figure import Figure

    rows = sorted((ROWS[name] for name in ADAPTIVE), key=lambda row: row.cold)
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    paper, lab = figure.subplots(1, 2, sharey=True)
    for warm, marker, colour in ((True, "o", THEIRS), (False, "D", OURS)):
        look: dict[str, Any] = {"color": colour, "marker": marker}
        losses = pattern_losses(records, warm)
        label = f"{'with' if warm else 'without'} warm-up"
        paper.scatter([row.warm if warm else row.cold for row in rows], range(len(rows)), 46, label=label, **look)
        for place, row in enumerate(rows):
            values = losses[row.name if warm else f"{row.name}-"]
            lab.scatter(values, [place] * len(values), 14, alpha=0.6, linewidths=0, **look)
            lab.scatter(results.mean(values), place, 46, **look)
    paper.set_yticks(range(len(rows)), [f"{row.describe()}  {row.name}" for row in rows])
    paper.set_xlabel("BLEU", fontsize=8)
    paper.set_title("The paper", fontsize=10, loc="left")
    lab.axvline(results.UNIGRAM, color=INK, lw=0.8, ls=":")
    lab.set_xlim(6.4, 4.2)
    lab.set_xlabel("dev loss; dotted: word frequencies", fontsize=8)
    lab.set_title("Here, seeds and mean", fontsize=10, loc="left")
    for axes in (paper, lab):
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


@styled
def draw_updates(records: list[Record], path: Path) -> None:
    """Draw how many updates of the decoder's attention are larger than desired, and beside it the training losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in SHOWN.items():
        runs = of_row(records, f"{name}-", "updates")
        if not runs:
            continue
        large = np.mean([updates.of_attention(run) > updates.LARGE for run in runs], axis=(0, 2))  # (steps,)
        loss = np.mean([[value for _, value in run["curve"]] for run in runs], axis=0)
        steps = np.arange(len(large)).reshape(-1, STRETCH).mean(1) + 1
        look: dict[str, Any] = {"color": colour, "lw": 1.8, "label": f"{name}: {ROWS[name].describe()}"}
        left.plot(steps, 100 * large.reshape(-1, STRETCH).mean(1), **look)
        right.plot(steps, loss.reshape(-1, STRETCH).mean(1), **look)
    right.axhline(results.UNIGRAM, color=INK, lw=0.8, ls=":")
    right.set_ylim(5.3, 7.0)
    left.set_title(f"RMS(U) above {updates.LARGE:g}, before clipping, %", fontsize=10, loc="left")
    right.set_title("Training loss (dotted: of word frequencies)", fontsize=10, loc="left")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.set_xlabel("step, without warm-up")
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
