"""From the command line to a record and its tables."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks import machine, suites, tables
from benchmarks.contenders import CONTENDERS, EMPTY, Contender, find, why_not
from benchmarks.measure import extra_bytes, measure
from benchmarks.record import Record, load

tell = partial(print, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or show a record."""
    parser = argparse.ArgumentParser("python -m benchmarks", description="Time a step beside other optimizers.")
    add = parser.add_argument
    add("--suite", nargs="+", default=list(suites.DEFAULT), metavar="NAME")
    add(
        "--contender", nargs="+", default=list(CONTENDERS), metavar="NAME", help="module:Class is an optimizer of yours"
    )
    add("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--rounds", type=int, default=15, help="how often each contender is timed (default: %(default)s)")
    add("--threads", type=int, default=machine.cores(), help="for each contender (default: all cores)")
    add("--device", default="cpu", help="such as cuda (default: %(default)s)")
    add("--no-memory", action="store_true", help="do not measure extra memory, which takes a process per contender")
    add("--output", type=Path, default=Path("runs/bench.json"), help="the record (default: %(default)s)")
    add("--render", type=Path, metavar="RECORD", help="measure nothing; print the tables of this record")
    add("--list", action="store_true", help="print the suites and the contenders")
    asked = parser.parse_args(words)
    if asked.list:
        print(*(f"{name:30} {each.title}" for name, each in suites.SUITES.items()), sep="\n")
        print(*(f"{key:30} {each.label}" for key, each in CONTENDERS.items()), sep="\n")
        return 0
    try:
        record = (
            load(asked.render) if asked.render else run(asked, shlex.join(sys.argv[1:] if words is None else words))
        )
    except (ValueError, OSError, ImportError, AttributeError) as mistake:
        parser.error(str(mistake))
    print(tables.markdown(record), end="")
    return 0


def run(asked: argparse.Namespace, words: str) -> Record:
    """Measure everything that was asked for; the record is saved after each suite."""
    if min(asked.rounds, asked.threads) < 1:
        raise ValueError("--rounds and --threads must be at least 1")
    chosen, device = [suites.find(name) for name in asked.suite], torch.device(asked.device)
    torch.set_num_threads(asked.threads)
    record = Record(machine.describe(f"python -m benchmarks {words}".strip()))
    found = {dtype: _that_run(asked.contender, dtype, device) for dtype in asked.dtype}
    if not any(found.values()):
        raise ValueError("none of the contenders can run here")
    for suite, (dtype, contenders) in product(chosen, found.items()):
        rows = measure(suite, contenders, dtype, asked.rounds, tell, device) if contenders else []
        for row in rows if not asked.no_memory and device.type == "cpu" else []:
            if "seconds" in row and not find(row["contender"]).floor:
                row["extra_bytes"] = extra_bytes(row["contender"], suite.shapes, dtype)
        record.rows += rows
        record.save(asked.output)
    return record


def _that_run(keys: Sequence[str], dtype: str, device: torch.device) -> list[Contender]:
    """Return the contenders of a dtype that can run here; with one that steps in backward also an empty backward."""
    found = [find(key) for key in keys]
    if any(contender.in_backward for contender in found):
        found = [*(contender for contender in found if contender.key != EMPTY), find(EMPTY)]
    found = [contender for contender in found if dtype in contender.dtypes]
    reasons = {contender.label: why_not(contender, dtype, device) for contender in found}
    for label, reason in reasons.items():
        if reason:
            tell(f"left out: {label}, {dtype}: {reason}")
    return [contender for contender in found if reasons[contender.label] is None]


if __name__ == "__main__":
    sys.exit(main())
