"""Names of many parameters in few words: layers whose names differ by their number only are of one kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from os.path import commonprefix

from adafactor.core.record import Record

MOST = 6  # kinds of layers in a list


def group_by_kind(records: Iterable[Record], chosen: Collection[str] | None = None) -> dict[str, list[Record]]:
    """Return all or the chosen records under a label for each kind of layer, in the order of the first of each.

    Layers are of one kind when their names differ in numbers only and their shapes do not differ. The label has a star
    for a number that differs; or the numbers, if there are others of that name, not chosen or of another shape.
    """
    kinds: dict[tuple[str, tuple[int, ...]], list[Record]] = {}
    alike: dict[str, list[str]] = {}
    for record in records:
        star = ".".join("*" if part.isdigit() else part for part in record.name.split("."))
        kinds.setdefault((star, record.shape), []).append(record)
        alike.setdefault(star, []).append(record.name)
    labels: dict[str, list[Record]] = {}
    for (star, shape), kind in kinds.items():
        if here := kind if chosen is None else [record for record in kind if record.name in chosen]:
            label = _label([record.name for record in here], alike[star])
            labels[label if label not in labels else f"{label} {shape}"] = here
    return labels


def group_with_title(records: Sequence[Record]) -> tuple[str, dict[str, list[Record]]]:
    """Return a title such as `148 tensors of transformer`, and the records by kind, without that word in each label."""
    common = commonprefix([record.name for record in records]) if len(records) > 1 else ""
    prefix = common[: common.rfind(".") + 1]
    title = f"{len(records)} tensors" + (f" of {prefix.rstrip('.')}" if prefix else "")
    return title, {label.removeprefix(prefix): kind for label, kind in group_by_kind(records).items()}


def shorten(chosen: Collection[str], among: Iterable[Record]) -> str:
    """Shorten the list of chosen parameters: `wte.weight, h.*.attn.weight (12), h.{3,5-7}.bias (4)`."""
    kinds = group_by_kind(among, chosen)
    parts = [label if len(kind) == 1 else f"{label} ({len(kind)})" for label, kind in kinds.items()]
    left = len(parts) - MOST
    return ", ".join(parts if left <= 1 else [*parts[:MOST], f"and {left} more kinds"])


def select(names: Sequence[str], patterns: str | Iterable[str]) -> list[str]:
    """Return the names that any of the patterns matches, a star standing for any text.

    Raises:
        ValueError: a pattern matches nothing.
    """
    matches: set[str] = set()
    for wanted in [patterns] if isinstance(patterns, str) else patterns:
        found = [name for name in names if fnmatchcase(name, wanted)]
        if not found:
            some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            raise ValueError(f"no parameter is called {wanted!r}; there are {some}")
        matches.update(found)
    return [name for name in names if name in matches]


def _label(names: list[str], alike: list[str]) -> str:
    """One name for several: a star where they differ or, if that would name others too, the numbers."""
    columns = [sorted(set(parts)) for parts in zip(*(name.split(".") for name in names), strict=True)]
    star = ".".join("*" if len(parts) > 1 else parts[0] for parts in columns)
    if star.count("*") != 1 or sum(fnmatchcase(name, star) for name in alike) == len(names):
        return star
    numbers = sorted(int(part) for parts in columns if len(parts) > 1 for part in parts)
    # within a run of consecutive numbers, a number and its place grow alike
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ranges = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return star.replace("*", f"{{{ranges}}}")
