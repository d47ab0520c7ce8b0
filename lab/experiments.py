"""Which runs make up each table, figure and claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lab import rules
from lab.presets import SCALES, Job, Scale, untied
from lab.records import find
from lab.results import FAILED, Record, final_loss
from lab.rows import TABLE_2, TABLE_3

ADAPTIVE = tuple(row.name for row in TABLE_2 if row.step != "sgd")  # rows A to P
# Adam and Adafactor: scale → row ("-": without warm-up) → multiple of the paper's step size → seeds. At `long` the
# first multiples are the paper's relations, nothing tuned: Σρ² of 16,000 steps is that of the paper's 100,000 at ×2.5,
# and ×5 for B keeps its ratio of relative to absolute steps (RMS(X₀) is 1/√d: twice the paper's).
COMPARISON: Mapping[str, Mapping[str, Mapping[float, Iterable[int]]]] = {
    "long": {
        "B": {5.0: range(8), 3.5: (4,), 7.0: (4,)},
        "O-": {2.5: range(8), 1.8: (4,), 3.5: (4,)},
        "O": {2.5: (0, *range(4, 8))},
    },
    "small": {
        "B": {3.0: (0,), 4.2: (0,), 6.0: range(3)},
        "O-": {2.1: (0,), 3.0: range(3), 4.2: range(3), 6.0: (0,)},
        "O": {3.0: (0,), 6.0: range(2)},
        "P-": {3.0: (0,), 6.0: range(3)},
    },
    "quarter": {
        "B": {1.5: (0,), 3.0: (0,), 6.0: range(3), 12.0: (0,)},
        "O-": {1.5: (0,), 3.0: range(3), 6.0: range(2), 12.0: (0,)},
        "O": {6.0: range(3)},
    },
}
UPDATES_ROWS = ("A", "H", "B", "C", "F", "I", "N")
OTHER_MODELS = ("pattern-broad", "pattern-deep")
STEP_SIZES = (1.0, 1.7, 3.0, 5.0)  # of which the other models take the largest at which B with warm-up learns
CHOOSING_SEED = 100


def table_2(scale: Scale, seed: int = 0) -> list[Job]:
    """All rows with and without warm-up: 44 runs."""
    return [Job(row.name, scale, warmup, seed) for row in TABLE_2 for warmup in (True, False)]


def table_3(scale: Scale, seed: int = 0) -> list[Job]:
    """Adam (with warm-up) and Adafactor (without) with each embedding scheme, the softmax untied: 6 runs."""
    scales, adam = [untied(scale, embedding) for embedding in TABLE_3], table_3_adam(scale.name)
    return [job for s in scales for job in (Job(adam, s, True, seed), Job("O", s, False, seed))]


def table_3_adam(scale: str) -> str:
    """The row of Table 3's Adam: at the paper's own scale with the step size of Vaswani et al. (2017)."""
    return "Adam2017" if scale == "base3" else "Adam"


def job(row: str, scale: str, seed: int, multiplier: float | None = None) -> Job:
    """The job of a row as claims name it: without warm-up if a "-" follows."""
    return Job(row.rstrip("-"), SCALES[scale], not row.endswith("-"), seed, multiplier)


def comparison(scale: str) -> list[Job]:
    """Adam and Adafactor at one scale."""
    return [job(row, scale, seed, multiplier) for row, steps in COMPARISON[scale].items()
            for multiplier, seeds in steps.items() for seed in seeds]  # fmt: skip


def of_claims(scale: str) -> list[Job]:
    """The runs of Table 2 at a scale that judge claims and were not known before, seed by seed."""
    pairs = [pair for claim in rules.claims() for pair in claim.pairs if pair.scale == scale and claim.known != "all"]
    wanted = {(seed, row): None for pair in pairs for seed in pair.seeds for row in (pair.first, pair.second)}
    return [job(row, scale, seed) for seed, row in sorted(wanted, key=lambda each: each[0])]


def table_2_here() -> list[Job]:
    """Table 2 at the two scales that decide: what judges claims, and the cells beside it."""
    mini = SCALES["mini"]
    jobs = [*of_claims("pattern"), *of_claims("mini")]
    jobs += [job(row + end, "pattern", seed) for end in ("-", "") for seed in range(6) for row in ADAPTIVE]
    jobs += [*table_2(mini), *(job(row + end, "mini", 1) for row in ADAPTIVE for end in ("", "-"))]
    jobs += [job(row, "mini", seed) for seed in (2, 3, 4) for row in ("A", "B", "C", "D", "E", "G", "N", "O-")]
    return jobs + [job(f"{row}-", "mini", seed) for seed in range(10, 15) for row in ADAPTIVE]


def other_models(recorded: list[Record]) -> list[Job]:
    """Is the pattern a property of the rows? At a step size that is known once B with warm-up was tried at several."""
    jobs = []
    for name in OTHER_MODELS:
        tried = [job("B", name, CHOOSING_SEED, multiplier) for multiplier in STEP_SIZES]
        jobs += tried
        multiplier = chosen_step_size(name, recorded)
        if multiplier is not None:
            rows = [pair.first for claim in rules.claims() for pair in claim.pairs if pair.scale == name]
            jobs += [job(row, name, seed, multiplier) for seed in (0, 1)
                     for row in (*rows, *(row.rstrip("-") for row in rows))]  # fmt: skip
    return sorted(jobs, key=lambda each: (each.seed != CHOOSING_SEED, each.warmup, each.seed))


def chosen_step_size(name: str, recorded: list[Record]) -> float | None:
    """The largest step size at which B with warm-up learns; None while one was not tried, or if it never does."""
    tried = {multiplier: find(job("B", name, CHOOSING_SEED, multiplier), recorded) for multiplier in STEP_SIZES}
    if None in tried.values():
        return None
    return max((m for m, record in tried.items() if record and final_loss(record) <= FAILED), default=None)


def everything(recorded: list[Record]) -> list[Job]:
    """All of the reproduction, each job once; the records say which step size the runs of other models have."""
    jobs = table_2_here()
    jobs += [job(f"{row}-", "updates", seed) for row in UPDATES_ROWS for seed in (3, 4, 5)]
    jobs += [each for seed in (0, 1, 2) for each in table_3(SCALES["mini"], seed)]
    jobs += [*other_models(recorded), Job("A160", SCALES["deep"], False)]
    jobs += [each for scale in ("quarter", "small", "long") for each in comparison(scale)]
    return list({each.name: each for each in jobs}.values())
