"""A record of the benchmark as Markdown tables, for the terminal and the documents."""

from __future__ import annotations

import math
from statistics import median

from benchmarks.contenders import EMPTY, find
from benchmarks.record import Record, Row

YARDSTICK = "adamw"


def markdown(record: Record) -> str:
    """Where and how it was measured, then time and memory, a row for each contender in a dtype."""
    suites = list(dict.fromkeys(row["suite"] for row in record.rows))
    entries = dict.fromkeys((row["dtype"], row["contender"]) for row in record.rows if "seconds" in row)
    time, memory = [], []
    for dtype, contender in sorted(entries, key=lambda entry: entry[0] != "float32"):
        name = f"{find(contender).label}, {dtype}"
        found = [record.first(suite=suite, contender=contender, dtype=dtype) for suite in suites]
        time.append([name, *(_time(record, row) if row else "" for row in found)])
        if not find(contender).floor:
            memory.append([name, *(_memory(row) if row else "" for row in found)])
    parts = [about(record), "Milliseconds of a step, and × fused AdamW after backward in the same dtype:"]
    parts += [_table(["", *suites], time), "State, and what a step takes besides:", _table(["", *suites], memory)]
    return "\n\n".join(parts) + "\n"


def about(record: Record) -> str:
    """Say where, when and how it was measured, in a few sentences."""
    a = record.about
    versions = ", ".join(f"{name} {number}" for name, number in a["versions"].items())
    copies = [row for row in record.rows if row["contender"] == "copy"]
    speeds = [speed / 1e9 for row in copies for speed in row["bytes_per_second"]]
    loads = [load for row in copies for load in row.get("load", []) if load is not None]
    rounds = max((len(row["seconds"]) for row in record.rows if "seconds" in row), default=0)
    processor = f"{a['processor']} ({a['capability']})" if a["capability"] else a["processor"]
    said = f"`{a['command']}`, {a['date']}: {processor}, {a['threads']} of {a['cores']} cores, "
    said += f"{size(a['cache_bytes'])} last-level cache. {versions}. Medians of {rounds} rounds that alternate the "
    said += "contenders, and in brackets the least and the greatest ratio."
    if speeds:
        said += f" A copy in between moved {min(speeds):.0f} to {max(speeds):.0f} GB/s"
        said += f"; load average {min(loads):.1f} to {max(loads):.1f}." if loads else "."
    return said


def taken(record: Record, row: Row) -> list[float]:
    """Seconds of each round; inside backward without those of an empty backward pass in the same round."""
    if row["contender"] == EMPTY or not find(row["contender"]).in_backward:
        return list(row["seconds"])
    empty = record.first(suite=row["suite"], contender=EMPTY, dtype=row["dtype"])
    assert empty is not None, "an empty backward pass is measured beside every step inside backward"
    return [a - b for a, b in zip(row["seconds"], empty["seconds"], strict=True)]


def ratios(record: Record, row: Row) -> list[float]:
    """How many times as long as fused AdamW after backward, round by round; nothing without it."""
    base = record.first(suite=row["suite"], contender=YARDSTICK, dtype=row["dtype"])
    return [] if base is None else [a / b for a, b in zip(taken(record, row), base["seconds"], strict=True)]


def significant(value: float) -> str:
    """Three significant digits, never with an exponent."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "–"
    unit, name = next(pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= pair[0] or pair[0] == 1e3)
    return f"{significant(count / unit)} {name}"


def _time(record: Record, row: Row) -> str:
    text, found = f"{significant(1e3 * median(taken(record, row)))} ms", ratios(record, row)
    if not found:
        return text
    is_base = row["contender"] == YARDSTICK
    return f"{text}, {median(found):.2f}" + ("" if is_base else f" ({min(found):.2f}–{max(found):.2f})")


def _memory(row: Row) -> str:
    return f"{size(row['state_bytes'])} + {size(row.get('extra_bytes'))}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
