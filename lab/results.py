"""Records as the numbers the tables and figures show: means and intervals over seeds, and what follows from them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.experiments import BEST, COMPARED

Record = dict[str, Any]

# The 97.5 % points of Student's t for 1, 2, … degrees of freedom, and the normal's for more than these.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
           2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04)  # fmt: skip
LEAST_FREEDOM = 2  # degrees; a deviation from one is luck
UNIGRAM = 6.19  # the dev loss at `hard` and `pattern` of a model that knows only how often each word occurs
FAILED = UNIGRAM - 0.3  # a run that ends above has learned next to nothing
NEAR = 0.1  # of the best loss: which step sizes count as good
LEARNED = 0.5  # of the best setting's loss: runs that end further off are unsteady, and have noise of their own
SAME_LOSS = 0.05  # two rows whose losses differ by less do equally well


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


def setting(record: Record) -> Hashable:
    """All of a run's configuration but its seed."""
    config = record["config"]
    shape = config["scale"]["shape"]
    return (config["scale"]["name"], shape["embedding"], shape["tied"], config["row"]["name"], config["warmup"],
            config["multiplier"])  # fmt: skip


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


@dataclass(frozen=True)
class Spread:
    """How much a figure changes from seed to seed, when what a seed does to all settings alike is taken out."""

    deviation: float
    freedom: int

    def half(self, count: int, settings: int = 1) -> float:
        """Half the 95 % interval of a mean over `count` seeds or, of two settings, of the difference of their means."""
        if self.freedom < LEAST_FREEDOM or count < 1:
            return math.inf
        student = STUDENT[self.freedom - 1] if self.freedom <= len(STUDENT) else 1.96
        return student * self.deviation * math.sqrt(settings / count)


def spread(values: Mapping[Any, float]) -> Spread:
    """The residual deviation of (setting, seed) → value about setting effects plus seed effects (least squares).

    One seed is the same batches and the same start for all settings, so it moves them together: what is left is
    the noise of a difference. It is taken over all settings at once: two seeds of one do not give a deviation.
    """
    counts: dict[Hashable, int] = defaultdict(int)
    for name, _ in values:
        counts[name] += 1
    kept = {key: value for key, value in values.items() if counts[key[0]] > 1 and math.isfinite(value)}
    settings = sorted({name for name, _ in kept}, key=repr)
    seeds = sorted({seed for _, seed in kept})
    if not kept:
        return Spread(math.nan, 0)
    design = np.zeros((len(kept), len(settings) + len(seeds)))
    for line, (name, seed) in enumerate(kept):
        design[line, settings.index(name)] = design[line, len(settings) + seeds.index(seed)] = 1
    target = np.array(list(kept.values()))
    solution, _, rank, _ = np.linalg.lstsq(design, target, rcond=None)
    freedom = len(kept) - int(rank)
    rest = float(np.square(target - design @ solution).sum())
    return Spread(math.sqrt(rest / freedom) if freedom else math.nan, freedom)


@dataclass(frozen=True)
class Difference:
    """One setting minus another: the mean over the seeds both have, half its interval, and how many seeds that is."""

    mean: float
    half: float
    seeds: int

    def as_good(self, margin: float) -> str:
        """Whether the first (lower is better) is at most `margin` worse."""
        if not math.isfinite(self.mean + self.half):
            return UNDECIDED
        return HOLDS if self.mean + self.half < margin else FAILS if self.mean - self.half > margin else UNDECIDED

    def better(self, margin: float) -> str:
        """Whether the first is better; what is surely no more than the margin better is not."""
        if not math.isfinite(self.mean + self.half):
            return UNDECIDED
        if self.mean + self.half < 0:
            return HOLDS
        return FAILS if self.mean - self.half > -margin else UNDECIDED

    def __str__(self) -> str:
        """As it stands in a table."""
        if math.isnan(self.mean):
            return "–"
        half = f" ± {self.half:.2f}" if math.isfinite(self.half) else ""
        return f"{round(self.mean, 2) + 0.0:+.2f}{half}".replace("-", "−")  # no −0.00


HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided at this scale"


def difference(
    first: list[Record], second: list[Record], noise: Spread, way: str = "last", bleu: bool = False
) -> Difference:
    """First minus second in dev loss or, as `bleu`, second minus first in BLEU: lower is better for the first."""
    value = test_bleu if bleu else dev_loss
    ours, theirs = ({r["config"]["seed"]: value(r, way) for r in side} for side in (first, second))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    pairs = [pair for pair in pairs if math.isfinite(sum(pair))]
    if not pairs:
        return Difference(math.nan, math.inf, 0)
    mean = sum(a - b for a, b in pairs) / len(pairs)
    return Difference(-mean if bleu else mean, noise.half(len(pairs), settings=2), len(pairs))


def paired(first: list[Record], second: list[Record], way: str) -> Difference:
    """First minus second in dev loss, seed by seed, with Student's interval of these differences alone."""
    ours, theirs = ({r["config"]["seed"]: final_loss(r, way) for r in side} for side in (first, second))
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    if len(gaps) < 2:
        return Difference(mean(gaps), math.inf, len(gaps))
    half = STUDENT[len(gaps) - 2] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Difference(mean(gaps), half, len(gaps))


def final_loss(record: Record, way: str = "last") -> float:
    """The dev loss; a diverged run counts as no better than a fresh model."""
    initial = float(record["initial_loss"])
    return initial if record["diverged"] else min(dev_loss(record, way), initial)


@dataclass(frozen=True)
class Correlation:
    """A rank correlation with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write it as it stands in a text."""
        return f"{self.value:.2f} (95 % interval {self.low:.2f} to {self.high:.2f})".replace("-", "−")


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> Correlation:
    """Spearman's coefficient, equals sharing their rank, with Fisher's interval for it (Fieller and others, 1957)."""
    value = float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])
    if abs(value) > 1 - 1e-12 or len(first) < 4:
        return Correlation(value, -1.0 if len(first) < 4 else value, 1.0 if len(first) < 4 else value)
    half = 1.96 * math.sqrt(1.06 / (len(first) - 3))
    return Correlation(value, *(math.tanh(math.atanh(value) + sign * half) for sign in (-1, 1)))


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places].astype(np.float64)


def tenths(first: Record, second: Record) -> list[float]:
    """First minus second in training loss, the means over the ten tenths of a run of both."""
    steps, theirs = first["config"]["scale"]["steps"], dict(map(tuple, second["curve"]))
    parts: list[list[float]] = [[] for _ in range(10)]
    for step, loss in first["curve"]:
        if step in theirs:
            parts[min(9, (step - 1) * 10 // steps)].append(loss - theirs[step])
    return [mean(part) for part in parts]


def is_settled(record: Record) -> bool:
    """Whether a run's step size is its row's best, where step sizes were swept: a larger one has its own noise."""
    config = record["config"]
    best = BEST.get(config["scale"]["name"])
    return best is None or (config["row"]["name"], config["warmup"], config["multiplier"]) in {
        (*COMPARED[name], multiplier) for name, multiplier in best.items()
    }


def compared(records: list[Record], name: str, scale: str, multiplier: float) -> list[Record]:
    """The runs of a name of the comparison at a step size."""
    row, warm = COMPARED[name]
    return select(records, scale, row=row, warmup=warm, multiplier=multiplier)


def noise(
    records: list[Record],
    scales: Iterable[str],
    way: str = "last",
    bleu: bool = False,
    tied: bool = True,
    of: Iterable[Record] = (),
) -> Spread:
    """The spread of the dev loss or the BLEU over the seeds of these scales.

    Of one model: Table 3's, whose softmax is not tied to the embedding, has its own. Only of settled runs, and of those
    that learned about as much as the best, unless one of the runs `of` which it is has not.
    """
    value = test_bleu if bleu else dev_loss
    found = [r for name in set(scales) for r in select(records, name, tied) if not r["diverged"]]
    found = [r for r in found if is_settled(r)]
    good = learners(found)
    if all(setting(r) in good for r in of):
        found = [r for r in found if setting(r) in good]
    return spread({(setting(r), r["config"]["seed"]): value(r, way) for r in found})


def learners(records: list[Record]) -> set[Hashable]:
    """The settings whose runs end, in the mean, near the best of their scale."""
    losses: dict[str, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        losses[record["config"]["scale"]["name"]][setting(record)].append(dev_loss(record))
    means = [{name: mean(values) for name, values in scale.items()} for scale in losses.values()]
    return {name for scale in means for name, loss in scale.items() if loss <= min(scale.values()) + LEARNED}


def mean(values: Iterable[float]) -> float:
    """The mean of the numbers that are there; NaN of none."""
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else math.nan


def sweep_curve(records: list[Record], way: str = "last") -> list[tuple[float, float]]:
    """(multiplier, dev loss), the mean over seeds; a diverged run counts as no better than a fresh model."""
    by_multiplier: dict[float, list[float]] = defaultdict(list)
    for record in records:
        by_multiplier[record["config"]["multiplier"]].append(final_loss(record, way))
    return [(m, mean(losses)) for m, losses in sorted(by_multiplier.items()) if math.isfinite(mean(losses))]


def best_multiplier(records: list[Record], way: str = "last") -> float:
    """The step size whose loss is the lower one beside every other, over the seeds that both have; NaN: none is."""
    losses: dict[float, dict[int, float]] = defaultdict(dict)
    for record in records:
        if math.isfinite(loss := final_loss(record, way)):
            losses[record["config"]["multiplier"]][record["config"]["seed"]] = loss

    def gap(one: float, other: float) -> float:
        return mean(loss - losses[other][seed] for seed, loss in losses[one].items() if seed in losses[other])

    return next((m for m in sorted(losses) if not any(gap(m, other) > 0 for other in losses)), math.nan)


def good_range(curve: list[tuple[float, float]], near: float = NEAR) -> tuple[float, float]:
    """The step sizes about the best whose loss is within `near` of it, lines drawn between the points (log step size).

    How bad a failed run is does not enter: a mean over the sweep is ruled by where failures end, so it calls that
    row the most sensitive whose best run is best.
    """
    best = min(range(len(curve)), key=lambda i: curve[i][1])
    limit = curve[best][1] + near

    def end(direction: int) -> float:
        at = best
        while 0 <= at + direction < len(curve) and curve[at + direction][1] <= limit:
            at += direction
        if not 0 <= at + direction < len(curve):
            return curve[at][0]
        (x0, y0), (x1, y1) = curve[at], curve[at + direction]
        return float(x0 * (x1 / x0) ** ((limit - y0) / (y1 - y0)))

    return end(-1), end(1)


def learns_up_to(curve: list[tuple[float, float]], limit: float = FAILED) -> float:
    """The largest step size whose loss is below the limit, lines drawn between the points; NaN if none is."""
    below = [i for i, (_, loss) in enumerate(curve) if loss <= limit]
    if not below:
        return math.nan
    if below[-1] == len(curve) - 1:
        return curve[-1][0]
    (x0, y0), (x1, y1) = curve[below[-1] : below[-1] + 2]
    return float(x0 * (x1 / x0) ** ((limit - y0) / (y1 - y0)))
