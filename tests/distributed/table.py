"""The tables of docs/distributed.md: `python -m tests.distributed.table [errors] [traffic]`.

`errors` runs the checks under torchrun on four ranks (minutes); `traffic` computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from typing import Any

from adafactor.traffic import fully_sharded
from tests.distributed.launch import found

# layers, width, inner width, width of keys and values, words: Llama 3.2 1B, Llama 2 7B, Llama 3 70B
MODELS = {
    "1 B": (16, 2048, 8192, 512, 128256),
    "7 B": (32, 4096, 11008, 4096, 32000),
    "70 B": (80, 8192, 28672, 1024, 128256),
}
RANKS = (8, 64, 1024)


def shapes(layers: int, width: int, inner: int, key: int, words: int, tied: bool) -> Iterator[tuple[int, ...]]:
    """The parameters of a Llama."""
    yield from [(words, width)] * (1 if tied else 2)
    yield (width,)
    for _ in range(layers):
        yield from [(width, width), (key, width), (key, width), (width, width)]
        yield from [(inner, width), (inner, width), (width, inner), (width,), (width,)]


def traffic_table() -> None:
    """Bytes that a rank sends in one step of FSDP2, by the optimizer and by the gradients."""
    print("| model | parameters | ranks | collectives | optimizer, sent per rank | gradients, sent per rank | share |")
    print("|---|---|---|---|---|---|---|")
    for name, sizes in MODELS.items():
        model = list(shapes(*sizes, tied=name == "1 B"))
        count = sum(map(prod, model))
        for ranks in RANKS:
            sums = fully_sharded(model, ranks)
            ring = (ranks - 1) / ranks
            ours, theirs = 2 * sums.bytes * ring, 2 * count * ring  # an all-reduce; a reduce-scatter of bfloat16
            print(
                f"| {name} | {count / 1e9:.2f}·10⁹ | {ranks:,} | {sums.collectives} | {ours / 1e6:.1f} MB "
                f"| {theirs / 1e9:.2f} GB | {ours / theirs:.3%} |"
            )


def worst(table: dict[str, dict[str, float]], dtype: str, mesh: str, group: Any) -> dict[str, float]:
    """The largest error over all keywords, by shape or by placement."""
    largest: dict[str, float] = {}
    for name, row in table.items():
        if name.startswith(f"{dtype} | {mesh} |"):
            for case, error in row.items():
                largest[group(case)] = max(largest.get(group(case), 0.0), error)
    return largest


def error_tables() -> None:
    """Placements × shapes × dtypes, and ways to shard a model."""
    results = found(["placements", "models"], ranks=4, seconds=1800)
    table = results["placements"]
    for mesh in ("4", "2×2"):
        kinds = sorted(worst(table, "float64", mesh, lambda case: case.split(") ")[1]))
        every = list(worst(table, "float64", mesh, lambda case: case.split(") ")[0] + ")"))
        for dtype in ("float64", "float32"):
            cells = worst(table, dtype, mesh, lambda case: case)
            print(f"\n{dtype}, mesh of {mesh}\n\n| | " + " | ".join(every) + " |\n|---|" + "---|" * len(every))
            for kind in kinds:
                row = [cells.get(f"{shape} {kind}") for shape in every]
                print(f"| {kind} | " + " | ".join("" if e is None else f"{e:.0e}" for e in row) + " |")
    print("\n| way to shard | dtype | largest error |\n|---|---|---|")
    for name, error in results["models"].items():
        dtype, how = name.split(" | ")
        print(f"| {how} | {dtype} | {error:.0e} |")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["errors", "traffic"]
    if "errors" in wanted:
        error_tables()
    if "traffic" in wanted:
        traffic_table()
