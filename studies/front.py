"""The pictures of the first pages, from committed records: what a step costs, and losses of the lab's runs.

python -m studies.front
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

from lab import records
from lab.style import INK, OURS, THEIRS, styled

ROOT = Path(__file__).parents[1]
RECORD, PICTURE = ROOT / "studies" / "results" / "epyc-2-cores.json", ROOT / "docs" / "front.png"
LABELS = {  # contender: label, where it stands beside its point
    "adamw-fused": ("torch.optim.AdamW, fused", (-8, 0), "right"),
    "torch-loop": ("torch.optim.Adafactor", (-8, 6), "right"),
    "transformers": ("transformers", (8, -7), "left"),
    "timm": ("timm", (-9, 2), "right"),
    "pytorch-optimizer": ("pytorch_optimizer", (6, -17), "right"),
    "optax": ("optax under jit", (9, -4), "left"),
    "eager": ("adafactor, eager PyTorch", (8, -4), "left"),
    "cpu": ("adafactor", (10, -4), "left"),
}

LOSSES = ROOT / "docs" / "losses.png"
RUNS = {  # at `small`, three seeds each on one text: label, colour
    "small-B-warm-x6": ("Adam with momentum and warm-up: 11.5 MB of state", "#8a8a8a"),
    "small-O-cold-x3": ("Adafactor with neither: 79 kB", "#1f4fa3"),
}


def points() -> dict[str, tuple[float, float]]:
    """Megabytes besides weights and gradients, and milliseconds, of each contender in float32."""
    suites = json.loads(RECORD.read_text(encoding="utf-8"))["suites"]
    timings = next(suite for suite in suites if suite["name"] == "gpt2")["timings"]
    return {
        t["contender"]: ((t["state_bytes"] + t["extra_bytes"]) / 1e6, 1e3 * median(t["seconds"]))
        for t in timings
        if t["dtype"] == "float32" and t["contender"] in LABELS
    }


@styled
def draw(path: Path) -> None:
    """Two logarithmic axes, of which less is better on both."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(1.5, 2500), ylim=(40, 1200))
    for name, (megabytes, milliseconds) in points().items():
        label, offset, side = LABELS[name]
        ours = name in ("eager", "cpu")
        colour = OURS if ours else THEIRS
        axes.scatter(megabytes, milliseconds, s=190 if name == "cpu" else 60, color=colour, zorder=3)
        axes.annotate(
            f"{label}: {megabytes:,.{0 if megabytes > 10 else 1}f} MB, {milliseconds:.0f} ms"
            if name in ("cpu", "adamw-fused")
            else label,
            (megabytes, milliseconds),
            offset,
            textcoords="offset points",
            ha=side,
            fontsize=11 if name == "cpu" else 9,
            fontweight="bold" if name == "cpu" else "normal",
            color=colour if ours else INK,
        )
    axes.set_xlabel("MB that a step needs besides weights and gradients (state and temporaries)")
    axes.set_ylabel("ms a step")
    axes.set_title("One float32 step of GPT-2 small on two CPU cores: left and down is better", fontsize=10, loc="left")
    for axis, ticks in ((axes.xaxis, [3, 10, 30, 100, 300, 1000]), (axes.yaxis, [50, 100, 200, 500, 1000])):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_ticks(ticks)
        axis.set_ticks([], minor=True)
    axes.grid(zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def curve(run: str) -> tuple[list[int], list[float]]:
    """Steps, and training losses in the mean over the seeds."""
    curves = [
        record["curve"] for record in records.read(records.RECORDS, "small") if record["name"].startswith(f"{run}-s")
    ]
    return [step for step, _ in curves[0]], [mean(loss for _, loss in at) for at in zip(*curves, strict=True)]


def draw_losses(path: Path) -> None:
    """One line for each kind of run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for run, (label, colour) in RUNS.items():
        axes.plot(*curve(run), label=label, color=colour, linewidth=2)
    axes.set(xlabel="step", ylabel="training loss", ylim=(2.8, 7), xlim=(0, 4000))
    axes.set_title("A Transformer of 1.4 M parameters learns to translate English into German", fontsize=10, loc="left")
    axes.legend(frameon=False)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(PICTURE)
    draw_losses(LOSSES)
