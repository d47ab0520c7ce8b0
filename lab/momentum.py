"""The momentum's formats: the lab's Transformer with row P, whose momentum is kept in float32, bfloat16 or int8.

The runs are those of `lab.precision` in float32, and two others are beside them: row O of that experiment, which has no
momentum, and Adam (row B, with warm-up) at the scale `mini`, which is the same model on the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from lab import precision
from lab.files import put_between
from lab.precision import SEEDS, TUNING_DOMAIN, TUNING_RATE, TUNING_STEPS, PrecisionJob, spread
from lab.presets import SCALES, Job, Scale
from lab.records import find
from lab.results import Record

SCALE = replace(precision.SCALE, name="momentum")
FORMATS = ("float32", "bfloat16", "int8")
BEGIN, END = "<!-- momentum, from the records: python -m lab precision --render -->\n", "<!-- end of momentum -->\n"


def jobs(scale: Scale = SCALE, domain: str = TUNING_DOMAIN, corpus: str = "debian") -> list[PrecisionJob]:
    """All runs, the short ones first; in each part seed by seed, so that what is there can be compared."""
    tuning = replace(scale, steps=TUNING_STEPS)
    pairs = list(product(SEEDS, FORMATS))
    tuned = [PrecisionJob("P", tuning, False, seed, TUNING_RATE, corpus, None, domain, m) for seed, m in pairs]
    return tuned + [PrecisionJob("P", scale, False, seed, None, corpus, None, None, m) for seed, m in pairs]


def tables(records: list[Record]) -> str:
    """From scratch and fine-tuned: the losses with no momentum, with each format of it, and with Adam.

    A part is shown when two seeds of each format are there.
    """
    blocks = []
    for title, tuned in (("From scratch", False), ("Fine-tuned", True)):
        runs: dict[str, Sequence[Job]] = {"no momentum": _of(precision.jobs(), tuned)}
        for format in FORMATS:
            runs[f"momentum in {format}"] = [job for job in _of(jobs(), tuned) if job.momentum == format]
        if not tuned:
            runs["Adam"] = [Job("B", SCALES["mini"], True, seed) for seed in SEEDS]
        found = {name: [r for job in wanted if (r := find(job, records))] for name, wanted in runs.items()}
        if all(len(found[f"momentum in {format}"]) > 1 for format in FORMATS):
            blocks.append(_table(found, title))
    return "\n".join(blocks)


def _of(all_jobs: list[PrecisionJob], tuned: bool) -> list[PrecisionJob]:
    """The float32 runs of one part."""
    return [job for job in all_jobs if bool(job.domain) == tuned and job.rounding is None]


def _table(runs: dict[str, list[Record]], title: str) -> str:
    lines = [f"| {title} | dev loss | minus float32 momentum, same seed | seeds | state |", "|---" * 5 + "|"]
    base = {record["config"]["seed"]: record["dev_loss"] for record in runs["momentum in float32"]}
    for name, records in runs.items():
        same = [record for record in records if record["config"]["seed"] in base]
        gaps = [record["dev_loss"] - base[record["config"]["seed"]] for record in same]
        cells = [name, spread([record["dev_loss"] for record in same])]
        cells += ["" if name == "momentum in float32" else spread(gaps, signed=True), str(len(same))]
        cells.append(f"{mean(record['state_bytes'] for record in same) / 1e6:.2f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def render(records: list[Record], document: Path) -> None:
    """Put the tables into the document, between its two marks."""
    put_between(document, BEGIN, END, tables(records))
