"""What `studies.capacity` found: its JSON, the tables and the picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adafactor.planning import SETTINGS
from adafactor.planning.show import format_size
from lab import style
from studies.capacity.limited import Trial

BASE, PEERS, OURS = "adamw-float32", ("torch-bfloat16", "transformers-bfloat16"), "adafactor-backward"
MOMENTUM = tuple(f"adafactor-stochastic-momentum{format}" for format in ("", "-bfloat16", "-int8"))
CONTENDERS = (BASE, "adamw-bfloat16", *PEERS, "adafactor-float32", "adafactor-stochastic", *MOMENTUM, OURS)
TARGETS = {"AdamW in float32": ((BASE,), 5.0), "the best other Adafactor": (PEERS, 1.7)}


@dataclass
class Found:
    """The largest model of one setting within a limit."""

    limit: int
    best: Trial
    tried: list[tuple[int, bool]]


@dataclass
class Record:
    """Everything that was found, with the machine."""

    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    step: Trial | None = None  # of billions of parameters

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        path.with_suffix(".part").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)

    def best(self, limit: int, key: str) -> Found | None:
        """That setting's, if it was searched."""
        return next((f for f in self.found if (f.limit, f.best.key) == (limit, key)), None)


def load(path: Path) -> Record:
    """From JSON."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        found = [Found(f["limit"], Trial(**f["best"]), [(w, fit) for w, fit in f["tried"]]) for f in read["found"]]
        step = Trial(**read["step"]) if read["step"] else None
        return Record(read["machine"], read["versions"], found, step)
    except (KeyError, TypeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path} is not a record of studies.capacity ({wrong})") from wrong


def limits_of(record: Record) -> list[int]:
    """In the record, the smallest first."""
    return sorted({f.limit for f in record.found})


def ratio(record: Record, limit: int, keys: tuple[str, ...]) -> float | None:
    """How many times the parameters of the best of `keys` our best setting trains; None if one is missing."""
    found = [record.best(limit, key) for key in (OURS, *keys)]
    if any(f is None for f in found):
        return None
    ours, *theirs = (f.best.parameters for f in found if f is not None)
    return ours / max(theirs)


def markdown(record: Record) -> str:
    """The table of every limit, and how far the targets are met."""
    parts = []
    for limit in limits_of(record):
        heads = [format_size(limit), "parameters", "× AdamW float32", "width × layers", "resident", "loss", "s a step"]
        rows = [_row(best, record.best(limit, BASE)) for best in bests(record, limit)]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)))
        for name, (keys, wanted) in TARGETS.items():
            if (reached := ratio(record, limit, keys)) is not None:
                verdict = "met" if reached >= wanted else "MISSED"
                parts.append(f"{reached:.2f} times the parameters of {name} (target {wanted}: {verdict}).")
    if (step := record.step) is not None:
        parts.append(
            f"One step of {step.parameters:,} parameters ({SETTINGS[step.key].label}): {step.seconds[0]:.0f} s, "
            f"{format_size(step.peak_bytes)} resident, loss {step.losses[0]:.2f} → {step.losses[-1]:.2f}."
            if step.fits
            else f"One step of {step.parameters:,} parameters: {step.reason}."
        )
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    parts.append(f"{record.machine.get('processor', '')}, {record.machine.get('cores', '')} cores; {versions}.")
    return "\n\n".join(parts)


def _row(best: Trial, base: Found | None) -> list[str]:
    return [
        SETTINGS[best.key].label,
        f"{best.parameters / 1e6:,.0f} M",
        f"{best.parameters / base.best.parameters:.2f}" if base else "–",
        f"{best.width} × {best.layers}",
        format_size(best.peak_bytes),
        f"{best.losses[0]:.2f} → {best.losses[-1]:.2f}",
        f"{best.seconds[-1]:.1f}",
    ]


def bests(record: Record, limit: int) -> list[Trial]:
    """The largest models of a limit, in the order of the contenders."""
    return [found.best for found in (record.best(limit, key) for key in CONTENDERS) if found is not None]


@style.styled
def draw(record: Record, path: Path) -> None:
    """Bars of the parameters that fit, a panel for each limit."""
    from matplotlib.figure import Figure

    limits = limits_of(record)
    if not limits:
        raise ValueError("there is nothing to draw: the record has no search yet")
    figure = Figure(figsize=(8, 0.7 + 2.3 * len(limits)), layout="constrained")
    for limit, axes in zip(limits, figure.subplots(len(limits), squeeze=False)[:, 0], strict=True):
        labels = [SETTINGS[best.key].label for best in bests(record, limit)]
        values = [best.parameters / 1e6 for best in bests(record, limit)]
        colours = [style.OURS if label.startswith("adafactor,") else style.THEIRS for label in labels]
        bars = axes.barh(labels, values, color=colours, height=0.7)
        axes.bar_label(bars, [f"{value:,.0f} M" for value in values], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(values))
        axes.set_title(f"Parameters that train within {format_size(limit)}", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
