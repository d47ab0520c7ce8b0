"""How a tensor is cut: a function of its own shape, dtypes and kind of momentum, of nothing else.

So the order of its sums does not depend on which other tensors step beside it. Within a program the compiler chooses
it: the bits are the same on the same kind of card with the same Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TILE = 8192  # elements that a program of the first walk has in registers, of float32 and without momentum
LINE = 512  # elements of a line of a tensor that is kept whole
WHOLE_UNIT = 64  # lines
BLOCK = 64  # columns that a program of `fold` adds up
UNITS = 512  # at most, of a matrix
PARTIAL_SUMS = 2**23  # at most, in a vector of column sums of all units of a matrix
NARROW, NARROW_PIECE = 128, (128, 128)  # up to so many columns a piece of the last walk is higher than wide
PIECE = (32, 512)  # rows and columns of a piece
SHARE = 64  # pieces that a program measures
CHECKED = 4, 16  # pieces of a tensor are checked, at least so many, and one of so many


@lru_cache
def tile(double: bool, of_gradient: bool) -> int:
    """Elements that a program of the first walk holds: G and, for the momentum of gradients, its average.

    A double takes two registers, and arithmetic with it some more.
    """
    return TILE >> 2 * double >> of_gradient


@dataclass(frozen=True)
class Cut:
    """How an n × m matrix is cut."""

    rows: int  # of a unit of the first walk
    is_long: bool  # half a tile does not hold a row: it takes the larger programs
    piece: tuple[int, int]

    def units(self, n: int) -> int:
        """The number of units of a matrix of n rows."""
        return -(-n // self.rows)


@lru_cache(maxsize=4096)
def cut(n: int, m: int, itemsize: int, held: int) -> Cut:
    """Cut a matrix of this shape, whose gradient has so many bytes an element; a program holds so many elements."""
    rows = max(64 // itemsize, 8)
    if m <= held // 2:  # short rows: a unit should be at least a tile
        rows = max(rows, held // max(1 << (m - 1).bit_length(), 128 if m <= 128 else 1024))
    while -(-n // rows) > max(1, min(UNITS, PARTIAL_SUMS // m)):
        rows *= 2
    return Cut(rows, m > held // 2, NARROW_PIECE if m <= NARROW else PIECE)


def checked(pieces: int) -> range:
    """Which of a tensor's pieces are checked before a step relies on ΣX²; if not all, its heaviest one is besides."""
    return range(0, pieces, max(1, min(CHECKED[1], pieces // CHECKED[0])))
