"""Which runs make up each table and figure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.presets import SCALES, Job, Scale, untied
from lab.rows import TABLE_2, TABLE_3

SWEEP_ROWS = ("A", "B", "C", "H", "J", "K", "L", "N", "O", "P")
# Of the paper's step size, in factors of about 3 from well below the best to clear failure.
SWEEP_MULTIPLIERS = (0.3, 1.0, 3.0, 10.0, 30.0)
# Figure 1 compares the two first; the two last are the remedies, clipping and an increasing decay rate.
FIGURE_ROWS = ("G", "A", "H", "L")
# The comparison of Adam and Adafactor: name → row, and warm-up as the paper recommends it. O+ is O with warm-up.
COMPARED = {"B": ("B", True), "O": ("O", False), "P": ("P", False), "N": ("N", True), "O+": ("O", True)}
SWEPT = ("B", "O", "P", "N")
STEP_SIZES = (3.0, 6.0, 1.5, 12.0)
# The best of those that were run for each row, as `results.best_multiplier` finds it once the step size has fallen to
# zero: at a quarter of the length, and at full length. O+ has B's: it was not swept.
BEST = {
    "quarter": {"B": 6.0, "O": 3.0, "P": 6.0, "N": 6.0, "O+": 6.0},
    "small": {"B": 6.0, "O": 4.2, "P": 6.0, "N": 6.0, "O+": 6.0},
}
# The settings that decide a claim at `mini` (`lab/claims.py`), with and without warm-up: they get more seeds.
CLAIMED = {True: ("A", "B", "C", "D", "E", "G", "N"), False: ("O",)}


def table_2(scale: Scale, seed: int = 0) -> list[Job]:
    """All rows with and without warm-up: 44 runs."""
    return [Job(row.name, scale, warmup, seed) for row in TABLE_2 for warmup in (True, False)]


def claimed(scale: Scale, seed: int) -> list[Job]:
    """The part of Table 2 that claims rest on: 8 runs."""
    return [Job(row, scale, warm, seed) for warm, rows in CLAIMED.items() for row in rows]


def table_3(scale: Scale, seed: int = 0) -> list[Job]:
    """Adam (with warm-up) and Adafactor (without) with each embedding scheme, the softmax untied: 6 runs."""
    scales, adam = [untied(scale, embedding) for embedding in TABLE_3], table_3_adam(scale.name)
    return [job for s in scales for job in (Job(adam, s, True, seed), Job("O", s, False, seed))]


def table_3_adam(scale: str) -> str:
    """The row of Table 3's Adam: at the paper's own scale with the step size of Vaswani et al. (2017)."""
    return "Adam2017" if scale == "base3" else "Adam"


def sweep(scale: Scale, seed: int = 0) -> list[Job]:
    """Rows without warm-up over the step size, and row A with it for comparison."""
    jobs = [Job(row, scale, False, seed, m) for m in SWEEP_MULTIPLIERS for row in SWEEP_ROWS]
    return jobs + [Job("A", scale, True, seed, m) for m in SWEEP_MULTIPLIERS]


def figure(scale: Scale, seed: int = 0) -> list[Job]:
    """RMS(U) over training, with warm-up as in the paper; these runs are part of Table 2."""
    return [Job(row, scale, True, seed) for row in FIGURE_ROWS]


def step_sizes(seed: int = 0) -> list[Job]:
    """Which step size suits each row of the comparison best, at a quarter of the length."""
    scale = SCALES["quarter"]
    return [Job(*placed(name, scale), seed, m) for m in STEP_SIZES for name in SWEPT]


def placed(name: str, scale: Scale) -> tuple[str, Scale, bool]:
    """What a job of the comparison begins with."""
    row, warm = COMPARED[name]
    return row, scale, warm


def headline(scale: Scale, seed: int = 0) -> list[Job]:
    """Adam, Adafactor and Adafactor with momentum or with warm-up, each at its best step size."""
    return [Job(*placed(name, scale), seed, BEST[scale.name][name]) for name in ("B", "P", "O", "O+")]


def suspects() -> list[Job]:
    """What may explain a difference between Adam and Adafactor, one change at a time, at a quarter of the length.

    At six times the paper's step size: there the rows come apart.
    """
    quarter = SCALES["quarter"]
    # from N to O: factored; relative steps; no warm-up (absolute steps without warm-up beside it)
    jobs = [Job(row, quarter, warm, 0, 6.0) for row, warm in (("NF", True), ("O", True), ("NF", False))]
    return jobs + [Job("B", quarter, False, 0, m) for m in (6.0, 3.0)]  # Adam's warm-up


# The paper's relations, nothing tuned: Σρ² of a run of 16,000 steps is that of the paper's 100,000 at ×2.5, and ×5 for
# the rows with absolute steps keeps its ratio of relative to absolute ones (RMS(X₀) is 1/√d: twice the paper's).
UNTUNED = {"B": 5.0, "O": 2.5, "O+": 2.5}
LONG_SEEDS = (0, 1, 2, 3)


def untuned() -> list[Job]:
    """The headline in the paper's sense: Adam with warm-up against Adafactor without, and one O with it."""
    scale = SCALES["long"]
    jobs = [Job(*placed(name, scale), seed, UNTUNED[name]) for seed in LONG_SEEDS for name in ("O", "B")]
    return [*jobs, Job(*placed("O+", scale), 0, UNTUNED["O+"])]


def pattern(seeds: Iterable[int] = (0, 1, 2)) -> list[Job]:
    """Table 2 without its SGD rows, where rows fail as in the paper: 32 runs a seed."""
    return [job for seed in seeds for job in table_2(SCALES["pattern"], seed) if not job.row.startswith("Q")]


def mechanism() -> list[Job]:
    """Does a second moment that is out of date make A fail without warm-up, and does clipping cure it?"""
    return [Job(row, SCALES["deep"], False) for row in ("A160", "H160")]


def missing_cells() -> list[Job]:
    """At full length: is ×3 O's best step size, and is it warm-up or relative steps that costs there?"""
    small = SCALES["small"]
    jobs = [Job("O", small, False, 0, m) for m in (2.1, 4.2, 6.0)] + [Job("B", small, True, 0, m) for m in (4.2, 8.5)]
    jobs += [Job(row, small, True, seed, 3.0) for seed in (1, 2) for row in ("B", "O")]
    return jobs + [Job(row, small, True, 0, 3.0) for row in ("N", "NF")]


CLAIMS: dict[str, Any] = json.loads((Path(__file__).parent / "claims.json").read_text(encoding="utf-8"))
UPDATES_ROWS = ("A", "H", "B", "C", "F", "I", "N")
PROPERTY_ROWS = ("A", "B", "F", "G", "H", "I", "K", "L", "N", "O")
PROPERTY_SCALES = ("pattern-broad", "pattern-deep")
PROPERTY_STEP_SIZES = (1.0, 1.7, 3.0, 5.0)
CHOOSING_SEED = 100


def of_claims(scale: str, most: int) -> list[Job]:
    """The runs at a scale that judge the claims which compare at most so many rows, seed by seed."""
    wanted: dict[int, dict[str, None]] = {}
    for claim in CLAIMS["claims"]:
        several = isinstance(claim["scale"], list)
        parts = (
            zip(claim["scale"], claim["seeds"], claim["rows"], strict=True)
            if several and "-" not in claim["scale"][0]
            else []
        )
        parts = parts if several else [(claim["scale"], claim["seeds"], [*pair]) for pair in claim["rows"]]
        for where, seeds, rows in parts:
            if where == scale and claim["known"] == "none" and len(claim["rows"]) <= most:
                for seed in seeds:
                    wanted.setdefault(seed, {}).update(dict.fromkeys(rows))
    return [Job(row.rstrip("-"), SCALES[scale], not row.endswith("-"), seed)
            for seed, rows in sorted(wanted.items()) for row in rows]  # fmt: skip


def judging() -> list[Job]:
    """The runs that judge claims by the rules of `claims.json`, in the order of how much rests on them."""
    mini, hard, updates = SCALES["mini"], SCALES["pattern"], SCALES["updates"]
    seeds = (3, 4, 5)
    jobs = [*of_claims("pattern", 2), *of_claims("mini", 2)]
    jobs += [Job(row, updates, False, seed) for row in UPDATES_ROWS for seed in seeds]
    jobs += [job for job in pattern(seeds) if not job.warmup] + of_claims("mini", 99)
    jobs += [Job(row, mini, True, seed) for seed in range(15, 26) for row in ("D", "A")]
    jobs += [Job(row.name, hard, True, seed) for seed in seeds for row in TABLE_2 if row.step != "sgd"]
    return list({job.name: job for job in jobs}.values())


def other_models(recorded: list[dict[str, Any]]) -> list[Job]:
    """Is the pattern a property of the rows? At a step size that is known once B with warm-up was tried at several."""
    from lab.records import find
    from lab.results import FAILED, final_loss

    jobs = []
    for scale in (SCALES[name] for name in PROPERTY_SCALES):
        tried = [Job("B", scale, True, CHOOSING_SEED, m) for m in PROPERTY_STEP_SIZES]
        found = [find(job, recorded) for job in tried]
        learned = [job.effective_multiplier for job, record in zip(tried, found, strict=True)
                   if record is not None and final_loss(record) <= FAILED]  # fmt: skip
        jobs += tried
        if None not in found and learned:
            jobs += [Job(row, scale, warm, seed, max(learned)) for warm in (False, True) for seed in (0, 1)
                     for row in PROPERTY_ROWS]  # fmt: skip
    return sorted(jobs, key=lambda job: (job.seed != CHOOSING_SEED, job.warmup, job.seed))


def once_more() -> list[Job]:
    """What else there is time for: `mini` without warm-up on the new seeds, and the headline on one text."""
    mini, whole = SCALES["mini"], SCALES["long"]
    jobs = [Job(row.name, mini, False, seed) for seed in range(10, 15) for row in TABLE_2 if row.step != "sgd"]
    jobs += [Job(*placed(name, whole), seed, UNTUNED[name]) for seed in range(4, 8) for name in ("O", "B")]
    jobs += [Job(*placed("O+", whole), seed, UNTUNED["O+"]) for seed in range(4, 8)]
    return jobs + [Job(*placed(name, whole), 4, m) for name, m in (("O", 1.8), ("O", 3.5), ("B", 3.5), ("B", 7.0))]


def everything() -> list[Job]:
    """All of the reproduction in the order it is run; each job once."""
    mini, hard, quarter, small = (SCALES[name] for name in ("mini", "hard", "quarter", "small"))
    jobs = [*untuned(), *pattern(), *missing_cells(), *mechanism(), *step_sizes(), *suspects()]
    jobs += [job for seed in (0, 1, 2) for scale in (small, quarter) for job in headline(scale, seed)]
    # other step sizes than a row's best
    jobs += [Job("O", quarter, False, seed, 6.0) for seed in (1, 2)]
    jobs += [Job(row, small, warm, 0, 3.0) for row, warm in (("O", True), ("P", False), ("B", True))]
    jobs += [Job("P", small, False, 1, 3.0), *(Job("O", small, False, seed, 3.0) for seed in (0, 1, 2))]
    jobs += [*table_2(mini), *(job for job in table_2(mini, seed=1) if not job.row.startswith("Q"))]
    jobs += [job for seed in (2, 3, 4) for job in claimed(mini, seed)]
    jobs += [Job(row, mini, True, seed) for seed in range(5, 10) for row in ("A", "D")]  # five seeds did not decide
    jobs += [job for seed in (0, 1, 2) for job in table_3(mini, seed)]
    jobs += [*sweep(hard), *sweep(hard, 1)]
    return list({job.name: job for job in jobs}.values())
