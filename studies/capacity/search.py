"""The search for the largest width that trains within a limit, and its record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from adafactor.planning import SETTINGS, plan
from adafactor.planning.show import format_size, parse_size
from studies.capacity.gpt import GPT, count
from studies.capacity.limited import ROOT, Trial, trial
from studies.capacity.page import CONTENDERS, OURS, Found, Record, draw, load, markdown

RECORD, PICTURE = ROOT / "studies" / "results" / "capacity.json", ROOT / "docs" / "capacity.png"
STRIDE = 16  # of the widths that are tried


def planned(key: str, width: int) -> int:
    """What the plan says of a GPT of that width."""
    counted = plan(GPT(width, SETTINGS[key].dtype, "meta"), device="cpu").line(key).bytes
    assert counted is not None
    return counted.total


def largest(fits: Callable[[int], bool], start: int, stride: int = STRIDE) -> int:
    """The largest multiple of `stride` that fits, searched from `start` outwards; 0 if none does."""
    low, high, reach, at = 0, None, stride, max(stride, start - start % stride)
    while high is None or high - low > stride:
        if fits(at):
            low = at
        else:
            high = at
        if high is None:
            at = low + reach
        elif low == 0 and high - reach > 0:
            at = high - reach
        else:
            at = (low + high) // 2 // stride * stride or stride
        reach *= 2
    return low


def search(key: str, limit: int, tell: Callable[[str], None]) -> Found:
    """The largest model of one setting, starting where the plan says it should be."""
    small = trial(key, STRIDE, limit)
    if not small.fits:
        raise ValueError(f"{format_size(limit)} do not even hold torch and {key}: {small.reason}")
    tried: dict[int, Trial] = {}

    def fits(width: int) -> bool:
        tell(f"{format_size(limit)}, {SETTINGS[key].label}: {count(width) / 1e6:,.0f} million parameters")
        tried[width] = trial(key, width, limit)
        return tried[width].fits

    start = largest(lambda width: planned(key, width) + small.data_bytes <= limit, 1024)
    best = largest(fits, start)
    return Found(limit, tried.get(best, small), [(width, t.fits) for width, t in tried.items()])


def searches(keys: Iterable[str], limits: Iterable[int], path: Path) -> Record:
    """All of them that the record does not have yet, saved one by one."""
    from rich.progress import Progress

    from benchmarks.machine import Processor, versions

    record = load(path) if path.exists() else Record()
    wanted = [(limit, key) for limit in limits for key in keys if record.best(limit, key) is None]
    with Progress() as progress:
        bar = progress.add_task("", total=len(wanted))
        for limit, key in wanted:
            record.found.append(search(key, limit, lambda text: progress.update(bar, description=text)))
            record.machine, record.versions = Processor().describe(), versions({"transformers", "numba"})
            record.save(path)
            progress.advance(bar)
    return record


def step_of_billions(billions: float, path: Path, limit: int | None) -> Record:
    """One step, inside backward, of the smallest GPT that has so many parameters."""
    from benchmarks.machine import Processor, versions

    record = load(path) if path.exists() else Record()
    width = next(width for width in range(STRIDE, 10**6, STRIDE) if count(width) >= billions * 1e9)
    print(f"one step of {count(width):,} parameters, {format_size(planned(OURS, width))} planned ...", flush=True)
    record.step = trial(OURS, width, limit, steps=1)
    record.machine, record.versions = Processor().describe(), versions({"transformers", "numba"})
    record.save(path)
    return record


def main(words: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser("studies.capacity", description="The largest GPT that trains in so much memory.")
    parser.add_argument("--limit", nargs="+", type=parse_size, metavar="SIZE", help="such as 4GiB 8GiB")
    parser.add_argument("--settings", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="KEY")
    parser.add_argument("--billions", type=float, help="one step of a model with so many parameters")
    parser.add_argument("--record", type=Path, default=RECORD, help="the JSON that results are added to")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where --render draws")
    parser.add_argument("--render", action="store_true", help="print the tables and draw the picture of the record")
    asked = parser.parse_args(words)
    if asked.billions:
        step_of_billions(asked.billions, asked.record, asked.limit[0] if asked.limit else None)
    elif asked.limit:
        searches(asked.settings, asked.limit, asked.record)
    if asked.render:
        draw(load(asked.record), asked.picture)
    print(markdown(load(asked.record)))
