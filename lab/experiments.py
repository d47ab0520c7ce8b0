"""Which runs make up each table and figure."""

from __future__ import annotations

from lab.presets import SCALES, Job, Scale, untied
from lab.table import TABLE_2, TABLE_3

SWEEP_ROWS = ("A", "B", "C", "H", "J", "K", "L", "N", "O", "P")
# Of the paper's step size, in factors of about 3 from well below the best to clear failure.
SWEEP_MULTIPLIERS = (0.3, 1.0, 3.0, 10.0, 30.0)
# Figure 1 compares the two first; the two last are the remedies, clipping and an increasing decay rate.
FIGURE_ROWS = ("G", "A", "H", "L")
# The comparison of Adam and Adafactor: row → warm-up, as the paper recommends it.
COMPARED = {"B": True, "O": False, "P": False, "N": True}
STEP_SIZES = (3.0, 6.0, 1.5, 12.0)
# The best of them for each row: that of the lowest dev loss once the step size has fallen to zero, over all seeds run.
BEST = {"B": 6.0, "O": 3.0, "P": 6.0, "N": 6.0}


def table_2(scale: Scale, seed: int = 0) -> list[Job]:
    """All rows with and without warm-up: 44 runs."""
    return [Job(row.name, scale, warmup, seed) for row in TABLE_2 for warmup in (True, False)]


def table_3(scale: Scale, seed: int = 0) -> list[Job]:
    """Adam (with warm-up) and Adafactor (without) with each embedding scheme, the softmax untied: 6 runs."""
    scales = [untied(scale, embedding) for embedding in TABLE_3]
    return [job for s in scales for job in (Job("Adam", s, True, seed), Job("O", s, False, seed))]


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
    return [Job(row, scale, warm, seed, m) for m in STEP_SIZES for row, warm in COMPARED.items()]


def headline(scale: Scale, seed: int = 0) -> list[Job]:
    """Adam, Adafactor and Adafactor with momentum, each at its best step size."""
    return [Job(row, scale, COMPARED[row], seed, BEST[row]) for row in ("B", "P", "O")]


def suspects() -> list[Job]:
    """What may explain a difference between Adam and Adafactor, one change at a time, at a quarter of the length.

    At six times the paper's step size: there the rows come apart.
    """
    quarter = SCALES["quarter"]
    # from N to O: factored; relative steps; no warm-up (absolute steps without warm-up beside it)
    jobs = [Job(row, quarter, warm, 0, 6.0) for row, warm in (("NF", True), ("O", True), ("NF", False))]
    return jobs + [Job("B", quarter, False, 0, m) for m in (6.0, 3.0)]  # Adam's warm-up


def large_batches() -> list[Job]:
    """Four times the batch: less noise in the gradient."""
    return [Job(row, SCALES["wide"], COMPARED[row], 0, m) for row, m in (("B", 6.0), ("O", 6.0), ("O", 3.0))]


def everything() -> list[Job]:
    """All of the reproduction in the order it is run; each job once."""
    mini, hard, quarter, small = (SCALES[name] for name in ("mini", "hard", "quarter", "small"))
    second = [job for job in table_2(mini, seed=1) if not job.row.startswith("Q")]
    jobs = [*step_sizes(), *table_2(mini), *sweep(hard), *table_3(mini), *figure(mini)]
    jobs += [*headline(quarter, 1), Job("O", quarter, False, 1, 6.0), *suspects()]  # is ×6 better for O?
    # With warm-up O takes the larger step, too.
    jobs += [*headline(small), Job("O", small, True, 0, 6.0), Job("O", quarter, True, 1, 6.0)]
    jobs += [*headline(quarter, 2), Job("O", quarter, True, 2, 6.0)]
    b, p, o = headline(small, 1)
    jobs += [b, o, Job("O", small, True, 1, 6.0), *table_3(mini, 1), *table_3(mini, 2), *second]
    # At full length ×6 is less good for P than the sweep had promised.
    jobs += [Job("P", small, False, 0, 3.0), p, *headline(small, 2), Job("O", small, True, 2, 6.0)]
    jobs += [Job("B", small, True, 0, 3.0), *large_batches(), Job("O", quarter, False, 2, 6.0), *sweep(hard, 1)]
    return list({job.name: job for job in jobs}.values())
