"""Records as the numbers of tables and verdicts: one seed on one text is a pair, and pairs give an interval."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
Figure = Callable[[Record], float]

# The 97.5 % points of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
           2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)  # fmt: skip
UNIGRAM = 6.19  # the dev loss at `pattern` of a model that knows only how often each word occurs
FAILED = UNIGRAM - 0.3  # a run that ends above has learned next to nothing
SAME_LOSS = 0.05  # two rows whose losses differ by less do equally well
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
TOO_FEW = "too few runs"  # to judge by, so far


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


def of_row(records: Iterable[Record], name: str, scale: str, multiplier: float | None = None) -> list[Record]:
    """The runs of `A` (with warm-up) or `A-` (without), at one step size or at all."""
    found = select(records, scale, row=name.rstrip("-"), warmup=not name.endswith("-"))
    return [record for record in found if multiplier in (None, record["config"]["multiplier"])]


def dev_loss(record: Record, way: str = "last") -> float:
    """The dev loss of one way to evaluate; NaN where there is none."""
    found = (record if way == "last" else record.get("ways", {}).get(way, {})).get("dev_loss")
    return math.nan if found is None else float(found)


def bleu(record: Record, way: str, part: str) -> float:
    """The BLEU of one way to evaluate on the dev or the test set; NaN where there is none."""
    found = (record if way == "last" else record.get("ways", {}).get(way, {})).get("bleu", {})
    return float(found[part]["all"]) if part in found else math.nan


def test_bleu(record: Record, way: str = "last") -> float:
    """The test BLEU of one way to evaluate; NaN where there is none."""
    return bleu(record, way, "test")


def final_loss(record: Record, way: str = "last") -> float:
    """The dev loss; a diverged run counts as no better than a fresh model."""
    initial = float(record["initial_loss"])
    return initial if record["diverged"] else min(dev_loss(record, way), initial)


@dataclass(frozen=True)
class Difference:
    """One setting minus another: the mean over the pairs that both have, half its 95 % interval, and how many."""

    mean: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    def as_good(self) -> str:
        """Whether the first (lower is better) is at most the margin worse."""
        return self._verdict(self.high < SAME_LOSS, self.low > SAME_LOSS)

    def better(self) -> str:
        """Whether the first is better; what is surely no more than the margin better is not."""
        return self._verdict(self.high < 0, self.low > -SAME_LOSS)

    def alike(self) -> str:
        """Whether the two are within the margin of each other."""
        inside = self.low > -SAME_LOSS and self.high < SAME_LOSS
        return self._verdict(inside, self.low > SAME_LOSS or self.high < -SAME_LOSS)

    def _verdict(self, holds: bool, fails: bool) -> str:
        if not math.isfinite(self.mean + self.half):
            return UNDECIDED
        return HOLDS if holds else FAILS if fails else UNDECIDED

    def text(self, digits: int = 2) -> str:
        """As it stands in a table."""
        if math.isnan(self.mean):
            return "–"
        half = f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else ""
        return f"{round(self.mean, digits) + 0.0:+.{digits}f}{half}".replace("-", "−")  # no −0.00


def interval(values: Sequence[float]) -> Difference:
    """The mean of differences that belong to one seed each, with Student's interval."""
    if len(values) < 2:
        return Difference(mean(values), math.inf, len(values))
    return Difference(
        mean(values), STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values)), len(values)
    )


def paired(first: Iterable[Record], second: Iterable[Record], figure: Figure = final_loss) -> Difference:
    """First minus second in dev loss or another figure, over the pairs of one seed on one text."""
    ours, theirs = (by_pair(side) for side in (first, second))
    gaps = [figure(ours[key]) - figure(theirs[key]) for key in ours if key in theirs]
    return interval([gap for gap in gaps if math.isfinite(gap)])


def by_pair(records: Iterable[Record]) -> dict[tuple[int, str], Record]:
    """Records by what makes two of them a pair: their seed and their text's fingerprint."""
    return {(record["config"]["seed"], record["corpus"]["fingerprint"]): record for record in records}


def mean(values: Iterable[float]) -> float:
    """The mean of the numbers that are there; NaN of none."""
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else math.nan


def best_multiplier(records: list[Record], way: str = "last") -> float:
    """The step size with the lowest mean loss; NaN without runs."""
    losses: dict[float, list[float]] = defaultdict(list)
    for record in records:
        losses[record["config"]["multiplier"]].append(final_loss(record, way))
    means = {multiplier: mean(some) for multiplier, some in losses.items() if math.isfinite(mean(some))}
    return min(means, key=lambda multiplier: means[multiplier], default=math.nan)
