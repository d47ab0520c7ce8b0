"""Bytes as people write them."""

from __future__ import annotations

import re

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse(text: int | str) -> int:
    """A number of bytes from `24GiB`, `24G` (the same), `24 GB` or `800MiB`; an integer is bytes, its text is not."""
    if isinstance(text, int) and not isinstance(text, bool):
        count, unit = float(text), "B"
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
        count, unit = (float(found[1]), found[2].upper()) if found else (0.0, "-")
        if count and not unit:
            raise ValueError(f"{text} of what? Write {text}GiB, or {text}MiB")
    if unit not in UNITS or count <= 0:
        raise ValueError(f"{text!r} must be a size above 0 such as 24GiB or 24G (2³⁰ bytes), 24GB (10⁹) or 800MiB")
    return int(count * UNITS[unit])


def show(count: int) -> str:
    """Three significant digits, in units of 1024."""
    if not count:
        return "–"
    size, unit = next(pair for pair in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if count >= pair[0])
    value = count / size
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
