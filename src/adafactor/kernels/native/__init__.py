"""The loops of the `cpu` backend, compiled by Numba: plain Python to read, native to run.

A *job* is one tensor in the order of its memory: B × P × S × Q × K, where P and Q are its two factored axes, P the
outer, and B, S, K are the other axes before, between and after them. A *line* is Q·K numbers side by side; a *unit* is
consecutive lines, the smallest piece that one thread takes. What is kept whole is one line, cut anywhere.

Sums are taken in the statistics' precision over at most `WIDTH` numbers (or `TALL` rows) and in double beyond. Units
do not depend on the number of threads and their sums are added in one order, so neither does the result.
"""

from __future__ import annotations

from adafactor.kernels.native.job import (
    ALL,
    APPLY,
    COLUMN,
    ENERGY,
    FULL,
    JOB,
    KAHAN,
    MEASURE,
    MOMENTS,
    NEAREST,
    NONE,
    OF_GRADIENT,
    OF_UPDATE,
    OUTER,
    ROW,
    STOCHASTIC,
)
from adafactor.kernels.native.walks import counts, factors, fold, furnish, gather, walk

__all__ = [
    "ALL",
    "APPLY",
    "COLUMN",
    "ENERGY",
    "FULL",
    "JOB",
    "KAHAN",
    "MEASURE",
    "MOMENTS",
    "NEAREST",
    "NONE",
    "OF_GRADIENT",
    "OF_UPDATE",
    "OUTER",
    "ROW",
    "STOCHASTIC",
    "counts",
    "factors",
    "fold",
    "furnish",
    "gather",
    "walk",
]
