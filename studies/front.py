"""What README.md, docs/performance.md, docs/plan.md and docs/index.md show of records: tables, and two pictures.

    python -m studies.front

Every `results/step-*.json` is a run of `python -m benchmarks --output studies/results/step-NAME.json` on the same
machine; the largest models are those of `python -m studies.capacity`. Tables go between the marks of the documents.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import Record, Row, load
from benchmarks.tables import ratios, taken
from lab import records
from lab.files import put_between
from lab.style import INK, OURS, THEIRS, styled
from studies.capacity import search

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "performance.md"
FAST = 60e9  # bytes a second of a copy: on this machine it moves either about 43 GB/s or about 72
FEW = 3  # rounds with such a memory; a suite with fewer says nothing
ROWS = {  # of equal conditions: label → contender, dtype, setting of the capacity study
    "AdamW, fused, float32": ("adamw", "float32", "adamw-float32"),
    "adafactor, float32": ("adafactor", "float32", "adafactor-float32"),
    "AdamW, fused, float32, in backward": ("adamw-backward", "float32", "adamw-float32-backward"),
    "adafactor, float32, in backward": ("adafactor-backward", "float32", "adafactor-float32-backward"),
    "AdamW, fused, bfloat16": ("adamw", "bfloat16", "adamw-bfloat16"),
    "adafactor, bfloat16, stochastic rounding": ("adafactor-stochastic", "bfloat16", "adafactor-bfloat16"),
    "AdamW, fused, bfloat16, in backward": ("adamw-backward", "bfloat16", "adamw-bfloat16-backward"),
    "adafactor, bfloat16, stochastic rounding, in backward": (
        *("adafactor-stochastic-backward", "bfloat16", "adafactor-bfloat16-backward"),
    ),
}
SETTINGS = {  # rows of the table of ranges
    "float32": ("adafactor", "float32"),
    "float32, in backward": ("adafactor-backward", "float32"),
    "AdamW in backward, float32": ("adamw-backward", "float32"),
    "float32 momentum": ("adafactor-momentum-float32", "float32"),
    "bfloat16 momentum": ("adafactor-momentum-bfloat16", "float32"),
    "int8 momentum": ("adafactor-momentum-int8", "float32"),
    "bfloat16 weights, to nearest": ("adafactor", "bfloat16"),
    "bfloat16 weights, stochastic rounding": ("adafactor-stochastic", "bfloat16"),
    "the same, in backward": ("adafactor-stochastic-backward", "bfloat16"),
    "AdamW in backward, bfloat16": ("adamw-backward", "bfloat16"),
    "in plain PyTorch, float32": ("adafactor-eager", "float32"),
    "torch.optim.Adafactor, float32": ("torch", "float32"),
    "transformers' Adafactor, float32": ("transformers", "float32"),
}
LABELS = {  # of the picture: contender → label, where it stands beside its point
    "adamw": ("AdamW, fused", (8, 12), "right"),
    "torch": ("torch.optim.Adafactor", (20, 11), "right"),
    "transformers": ("transformers'", (11, -6), "left"),
    "adafactor-eager": ("adafactor, plain PyTorch", (11, -5), "left"),
    "adafactor": ("adafactor", (13, -5), "left"),
}
RUNS = {  # at `small`, three seeds each on one text: label, colour
    "small-B-warm-x6": ("Adam with momentum and\nwarm-up: 11.5 MB of state", "#8a8a8a"),
    "small-O-cold-x3": ("Adafactor with neither: 79 kB", "#1f4fa3"),
}


def runs() -> dict[str, Record]:
    """The records of a step, by the run's name."""
    return {
        path.stem.removeprefix("step-"): load(path)
        for path in sorted(RESULTS.glob("step-*.json"), key=lambda path: path.stem)
    }


def equal(steps: list[Record], capacity: Record) -> str:
    """AdamW and ours in equal conditions: state, time of a step of GPT-2 small in each run, largest model."""
    lines = [["", "state", "step, × AdamW", "largest GPT in 4 GiB"], ["---"] * 4]
    for label, (contender, dtype, setting) in ROWS.items():
        found = [(r, row) for r in steps if (row := r.first(suite="gpt2", contender=contender, dtype=dtype))]
        times = [median(ratios(record, row)) for record, row in found]
        best = capacity.first(setting=setting, limit=4 << 30)
        cells = [state(found[0][1]["state_bytes"]) if found else "–", span(times)]
        lines.append([label, *cells, f"{best['parameters'] / 1e6:,.0f} M" if best else "–"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ranges(steps: list[Record]) -> str:
    """For each setting the least and the greatest median over the suites, × fused AdamW, by how fast memory was."""
    lines = [["", f"memory below {FAST / 1e9:.0f} GB/s", "above"], ["---"] * 3]
    for label, (contender, dtype) in SETTINGS.items():
        found = [(record, row) for record in steps for row in record.find(contender=contender, dtype=dtype)]
        lines.append([label, *(span(medians(found, fast)) for fast in (False, True))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def medians(found: list[tuple[Record, Row]], fast: bool) -> list[float]:
    """Return the median of each suite over all runs' rounds in which memory was fast, or was not."""
    suites: dict[str, list[float]] = {}
    for record, row in found:
        copy = record.first(suite=row["suite"], dtype=row["dtype"], contender="copy")
        assert copy is not None, "a copy is timed in every round"
        of_rounds = zip(ratios(record, row), copy["bytes_per_second"], strict=True)
        suites.setdefault(row["suite"], []).extend(ratio for ratio, speed in of_rounds if (speed > FAST) == fast)
    return [median(times) for times in suites.values() if len(times) >= FEW]


def span(values: list[float]) -> str:
    """Least to greatest, in two digits."""
    if not values:
        return "–"
    ends = [f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def state(count: int) -> str:
    """Megabytes for people."""
    return f"{count / 1e6:,.{1 if count < 1e7 else 0}f} MB"


def tables() -> dict[str, str]:
    """What stands between the marks of the documents, by the mark's name."""
    steps = list(runs().values())
    return {"equal": equal(steps, load(search.RECORD)), "ranges": ranges(steps), "conditions": conditions(steps)}


def conditions(steps: list[Record]) -> str:
    """Each run's date, how fast memory was in it, and how busy the processor."""
    lines = [["run", "a copy moved, GB/s", "load average"], ["---"] * 3]
    for record in steps:
        copies = [row for row in record.rows if row["contender"] == "copy"]
        speeds = [speed / 1e9 for row in copies for speed in row["bytes_per_second"]]
        loads = [load for row in copies for load in row["load"]]
        lines.append(
            [record.about["date"], f"{min(speeds):.0f} to {max(speeds):.0f}", f"{min(loads):.1f} to {max(loads):.1f}"]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def marks(name: str) -> tuple[str, str]:
    """The lines that a table is between."""
    return f"<!-- {name}: python -m studies.front -->\n", f"<!-- end of {name} -->\n"


def points() -> dict[str, tuple[float, float]]:
    """Megabytes besides weights and gradients, and milliseconds, of each contender in float32."""
    record = runs()["epyc"]
    rows = [row for row in record.find(suite="gpt2", dtype="float32") if row["contender"] in LABELS]
    return {
        row["contender"]: ((row["state_bytes"] + row["extra_bytes"]) / 1e6, 1e3 * median(taken(record, row)))
        for row in rows
    }


@styled
def draw(path: Path) -> None:
    """Two logarithmic axes, of which less is better on both; legible at 400 pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(1.5, 4000), ylim=(20, 1200))
    for name, (megabytes, milliseconds) in points().items():
        label, offset, side = LABELS[name]
        ours, bold = name.startswith("adafactor"), name in ("adafactor", "adamw")
        figures = f": {megabytes:,.{0 if megabytes > 10 else 1}f} MB, {milliseconds:.0f} ms" if bold else ""
        axes.scatter(megabytes, milliseconds, s=190 if name == "adafactor" else 60, color=OURS if ours else THEIRS)
        how: dict[str, Any] = {"textcoords": "offset points", "ha": side, "color": OURS if ours else INK}
        axes.annotate(label + figures, (megabytes, milliseconds), offset, fontsize=13, **how)
    axes.set_xlabel("MB of state and temporaries", fontsize=14)
    axes.set_title("ms a step: GPT-2 small in float32", fontsize=14, loc="left")
    for axis, ticks in ((axes.xaxis, [3, 10, 30, 100, 300, 1000]), (axes.yaxis, [30, 100, 300, 1000])):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_ticks(ticks)
        axis.set_ticks([], minor=True)
    axes.tick_params(labelsize=13)
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def draw_losses(path: Path) -> None:
    """One line for each kind of run: training losses, in the mean over the seeds; legible at 400 pixels."""
    from matplotlib.figure import Figure

    found = list(records.read(records.RECORDS, "small"))
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, (label, colour) in RUNS.items():
        curves = [record["curve"] for record in found if record["name"].startswith(f"{run}-s")]
        losses = [mean(loss for _, loss in at) for at in zip(*curves, strict=True)]
        axes.plot([step for step, _ in curves[0]], losses, label=label, color=colour, linewidth=2.2)
    axes.set(ylim=(2.8, 7), xlim=(0, 4000), xticks=[0, 1000, 2000, 3000, 4000], yticks=[3, 4, 5, 6, 7])
    axes.set_xlabel("step", fontsize=14)
    axes.set_title("training loss: translating English into German", fontsize=14, loc="left")
    axes.tick_params(labelsize=13)
    axes.legend(frameon=False, fontsize=13)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    """Write the tables where a document has their marks, and draw."""
    for document in (README, PAGE):
        for name, text in tables().items():
            if marks(name)[0] in document.read_text(encoding="utf-8"):
                put_between(document, *marks(name), text)
    draw(ROOT / "docs" / "front.png")
    draw_losses(ROOT / "docs" / "losses.png")


if __name__ == "__main__":
    main()
