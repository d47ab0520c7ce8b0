"""Which runs make up each table and figure."""

from __future__ import annotations

from lab.presets import SCALES, Job, Scale, untied
from lab.table import TABLE_2, TABLE_3

SWEEP_ROWS = ("A", "B", "C", "H", "J", "K", "L", "N", "O", "P")
# Of the paper's step size, in factors of about 3 from well below the best to clear failure.
SWEEP_MULTIPLIERS = (0.3, 1.0, 3.0, 10.0, 30.0)
# Figure 1 compares the two first; the two last are the remedies, clipping and an increasing decay rate.
FIGURE_ROWS = ("G", "A", "H", "L")
# What the conclusions rest on has a second seed.
SECOND_SEED_ROWS = ("A", "B", "G", "H", "J", "K", "L", "N", "O")


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


def headline(seed: int = 0) -> list[Job]:
    """Adam, the two Adafactors the paper recommends, and one with momentum as Adam has it, at the default scale."""
    small = SCALES["small"]
    return [Job("B", small, True, seed), Job("O", small, False, seed), Job("N", small, True, seed),
            Job("P", small, False, seed)]  # fmt: skip


def everything() -> list[Job]:
    """All of the reproduction in the order it is run; each job once."""
    mini, hard = SCALES["mini"], SCALES["hard"]
    second = [job for job in table_2(mini, seed=1) if job.row in SECOND_SEED_ROWS]
    jobs = [*headline(), *table_2(mini), *sweep(hard), *table_3(mini), *figure(mini)]
    jobs += [*second, *table_3(mini, seed=1), *sweep(hard, seed=1)]
    return list({job.name: job for job in jobs}.values())
