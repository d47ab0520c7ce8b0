"""Print the errors of sharded runs, under torchrun on four ranks: `python -m tests.distributed.table`."""

from __future__ import annotations

from typing import Any

from tests.distributed.launch import found


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
    error_tables()
