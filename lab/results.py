"""Records as the numbers the tables and figures show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def select(records: Iterable[Record], scale: str, tied: bool = True, **wanted: Any) -> list[Record]:
    """The records of a scale whose configuration has the wanted values (`row` by its name)."""
    found = []
    for record in records:
        config = record["config"]
        seen = {**config, "row": config["row"]["name"], "embedding": config["scale"]["shape"]["embedding"]}
        same_scale = config["scale"]["name"] == scale and config["scale"]["shape"]["tied"] == tied
        if same_scale and all(seen[key] == value for key, value in wanted.items()):
            found.append(record)
    return sorted(found, key=lambda record: (record["config"]["seed"], record["config"]["multiplier"]))


def test_bleu(record: Record) -> float | None:
    """The test BLEU; None for a diverged run."""
    return None if record["diverged"] else float(record["bleu"]["test"]["all"])


def capped_loss(record: Record) -> float:
    """min(final loss, loss at initialisation), where a diverged run counts as no better than at the start."""
    initial = float(record["initial_loss"])
    return initial if record["dev_loss"] is None else min(float(record["dev_loss"]), initial)


def sweep_curve(records: list[Record]) -> list[tuple[float, float]]:
    """(multiplier, capped loss), the mean over seeds."""
    by_multiplier: dict[float, list[float]] = defaultdict(list)
    for record in records:
        by_multiplier[record["config"]["multiplier"]].append(capped_loss(record))
    return [(m, sum(losses) / len(losses)) for m, losses in sorted(by_multiplier.items())]


def sensitivity(curve: list[tuple[float, float]]) -> float:
    """Learning-rate sensitivity (Wortsman et al., 2023): the mean loss over the sweep minus the best."""
    losses = [loss for _, loss in curve]
    return sum(losses) / len(losses) - min(losses)
