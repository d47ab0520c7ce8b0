"""Names of many parameters in few words: the layers of a model that differ by their number only are one group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from os.path import commonprefix

Named = tuple[str, tuple[int, ...]]  # a parameter's name and shape
MOST = 6  # kinds of layers in a list


def pattern(name: str) -> str:
    """`h.3.attn.weight` → `h.*.attn.weight`: every part that is a number becomes a star."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def grouped(parameters: Iterable[Named], chosen: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return all or the chosen names under a label for each kind of layer, in the order of the first of each.

    Layers are of one kind when their names differ in numbers only and their shapes do not differ. The label has a star
    for a number that differs; or the numbers, if there are others of that name, not chosen or of another shape.
    """
    kinds: dict[Named, list[str]] = {}
    alike: dict[str, list[str]] = {}
    for name, shape in parameters:
        kinds.setdefault((pattern(name), shape), []).append(name)
        alike.setdefault(pattern(name), []).append(name)
    labels: dict[str, list[str]] = {}
    for (star, shape), names in kinds.items():
        if here := names if chosen is None else [name for name in names if name in chosen]:
            label = _label(here, alike[star])
            labels[label if label not in labels else f"{label} {shape}"] = here
    return labels


def shortened(chosen: Iterable[str], among: Iterable[Named]) -> str:
    """Shorten the list of chosen parameters: `wte.weight, h.*.attn.weight (12), h.{3,5-7}.bias (4)`."""
    kinds = grouped(among, set(chosen))
    parts = [label if len(names) == 1 else f"{label} ({len(names)})" for label, names in kinds.items()]
    left = len(parts) - MOST
    return ", ".join(parts if left <= 1 else [*parts[:MOST], f"and {left} more kinds"])


def common_prefix(names: Iterable[str]) -> str:
    """Return what all names begin with, up to a dot: `transformer.`; empty for a single name."""
    names = list(names)
    prefix = commonprefix(names) if len(names) > 1 else ""
    return prefix[: prefix.rfind(".") + 1]


def select(names: Sequence[str], patterns: str | Iterable[str]) -> list[str]:
    """Return the names that any of the patterns matches, a star standing for any text.

    Raises:
        ValueError: a pattern matches nothing.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for wanted in patterns:
        if not any(fnmatchcase(name, wanted) for name in names):
            some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            raise ValueError(f"no parameter is called {wanted!r}; there are {some}")
    return [name for name in names if any(fnmatchcase(name, wanted) for wanted in patterns)]


def _label(names: list[str], alike: list[str]) -> str:
    """One name for several: a star where they differ or, if that would name others too, the numbers."""
    columns = [sorted(set(parts)) for parts in zip(*(name.split(".") for name in names), strict=True)]
    star = ".".join("*" if len(parts) > 1 else parts[0] for parts in columns)
    if star.count("*") != 1 or sum(fnmatchcase(name, star) for name in alike) == len(names):
        return star
    values = next(parts for parts in columns if len(parts) > 1)
    return star.replace("*", f"{{{_ranges(sorted(map(int, values)))}}}")


def _ranges(values: list[int]) -> str:
    """[3, 5, 6, 7] → `3,5-7`."""
    # within a run, a number and its place grow alike
    runs = [[value for _, value in run] for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
