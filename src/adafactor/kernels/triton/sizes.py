"""How tensors are divided among programs: a function of a tensor's own shape, dtypes and momentum, of nothing else.

So the order of its sums does not depend on which other tensors step beside it. Within a program the compiler chooses
the order: the bits are the same on the same kind of card with the same Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

HELD = 8192  # elements of G that a program of 8 warps keeps in registers, of float32 and without momentum
LINE, LINES = 512, 32  # elements of a line, and lines of a tile of the last pass
NARROW = 256  # columns: up to so many, a line of a tile consists of several rows
LEAST = 8  # columns that a program of the first pass holds, if only to ignore some
SHORT = 128  # columns: up to so many are one chunk
UNFACTORED_UNIT = 64  # lines
BLOCK = 64  # columns that a program of `fold` adds up
UNITS = 512  # at most, of a matrix
PARTIAL_SUMS = 2**23  # at most, in a vector of column sums of all units of a matrix
MEASURED = 64  # tiles that a program measures
CHECKED = 4, 16  # tiles of a tensor are checked, at least so many, and one of so many
TERMS = 2048  # numbers that a program adds up at once
ALIGNMENT = 16  # bytes that a thread loads at once


@dataclass(frozen=True, order=True)
class Tiling:
    """How a unit of the first pass holds rows: `rows` of them at a time, each in `chunks` pieces of `chunk` columns.

    A row that no program can hold has `parts`, each held by a program of its own, which reads the whole row.
    """

    rows: int
    chunk: int = 0
    chunks: int = 0  # 0: the tensor is unfactored, and its rows are lines
    warps: int = 8
    parts: int = 1
    width: int = 0  # columns of a part

    @property
    def is_part(self) -> bool:
        """Whether a program holds less than a row at a time."""
        return self.parts > 1 or self.chunk * self.chunks < self.width


@lru_cache(maxsize=4096)
def tiling(m: int, held: int, longest: int) -> Tiling:
    """Return how rows of m elements are held, where 8 warps hold so many elements, and a program the longest row.

    As many as fit, in chunks of as many elements as all threads load at once: so a thread has elements of one row, and
    at most a fifth of what it has is beyond the row's end. Of short rows a thread has several, and fewer elements.
    """
    size = max(1 << (m - 1).bit_length(), LEAST)
    if m <= SHORT:
        return Tiling(held // 2 // size, size, 1, width=size)
    parts = 1 if m <= longest else -(-m // (longest // 8 * 7))  # other columns take registers, too
    size = min(size, longest)
    room, warps = held << (size > held), 16 if size > held else 8
    chunk = size // max(room // (128 * warps), 1)
    chunks = -(-m // (chunk * parts))
    return Tiling(room // size, chunk, chunks, warps, parts, chunk * chunks)


@lru_cache(maxsize=4096)
def unit_rows(n: int, m: int, itemsize: int, rows: int) -> int:
    """Return the rows of a unit of an n × m matrix, where a program holds so many at a time."""
    unit = max(64 // itemsize, 8, (8 if m > SHORT else 4) * rows)  # enough turns of the loop to load ahead
    while -(-n // unit) > max(1, min(UNITS, PARTIAL_SUMS // m)):
        unit *= 2
    return unit


def checked(tiles: int) -> range:
    """Return which of a tensor's tiles are checked before a step relies on ΣX²; its heaviest one is, too."""
    return range(0, tiles, max(1, min(CHECKED[1], tiles // CHECKED[0])))
