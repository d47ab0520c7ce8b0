"""Parameters of one kind, described to the kernels in a few tables that are made once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from adafactor.core.contract import Parameter
from adafactor.core.factoring import Factored, statistics_dtype
from adafactor.core.rounding import roots
from adafactor.core.sums import shrink_of
from adafactor.kernels.memory_order import MemoryOrder, flat_order, numbering
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.sizes import (
    ALIGNMENT,
    BLOCK,
    LINE,
    LINES,
    MEASURED,
    UNFACTORED_UNIT,
    Tiling,
    checked,
    tile_shape,
    tiling,
    unit_rows,
)

GAP = 64  # elements: every vector in scratch begins at a multiple


@dataclass(frozen=True)
class Chunk:
    """What launches of the first pass and of `fold` are given: as much as fits the scratch."""

    units: list[tuple[Tiling | None, int, int]]  # first and end of those that are tiled alike; None: unfactored
    blocks: tuple[int, int]
    tensors: tuple[int, int]  # those that are complete with this chunk


class Table:
    """The tables, on the device, and the sizes of what a step needs besides."""

    def __init__(self, parameters: list[Parameter], held: int, most: int):
        """Describe parameters.

        Args:
            parameters: in any order; `self.parameters` has those together that are tiled alike, long units first.
            held: elements that a program of the first pass has in registers.
            most: bytes that a step may take besides the state.
        """
        self.tilings = {parameter: tiling_of(parameter, held) for parameter in parameters}
        self.parameters = sorted(parameters, key=self._order)
        device, stat = parameters[0].x.device, statistics_dtype(parameters[0].x.dtype)
        self.vectors = 0  # elements of new R and C
        self.unit_count = self.block_count = self.tile_count = 0
        # where its first R and C begin, and how far it is to the next
        self.new_vectors: dict[Parameter, tuple[tuple[int, int], int]] = {}
        self.own_matrices: dict[Parameter, tuple[int, int]] = {}  # its first matrix, and how many
        self._tensors: list[list[int]] = []
        self._matrices: list[list[int]] = []
        self._units: list[Tensor] = []
        self._blocks: list[Tensor] = []
        self._counts: list[tuple[int, int, int]] = []  # of each matrix: tensor, units, blocks
        for number, parameter in enumerate(self.parameters):
            self._describe(number, parameter)
        tiles = self._tiles()
        rest = 2 * self.vectors * stat.itemsize + 8 * (3 * self.unit_count + self.block_count + len(self._matrices))
        self.chunks, self.scratch = self._fill_scratch((most - rest) // stat.itemsize)
        shares, checks = self._samples()
        self.tensors = torch.tensor(self._tensors, dtype=torch.int64).to(device)
        self.matrices = torch.tensor(self._matrices, dtype=torch.int64).to(device)
        self._blocks.append(torch.zeros(1, 2, dtype=torch.int64))
        lists = torch.cat(self._units), torch.cat(self._blocks), tiles, shares, checks
        self.units, self.blocks, self.tiles, self.shares, self.checks = (t.to(torch.int32).to(device) for t in lists)
        self.matrix_count = len(self._matrices)
        del self._tensors, self._matrices, self._units, self._blocks, self._counts

    def _order(self, parameter: Parameter) -> tuple[Tiling, int]:
        """Sort by tiling; then longest units first, so that no launch ends with one."""
        if not isinstance(parameter.factoring, Factored):
            return Tiling(0, 0, 0, 0), -min(parameter.x.numel(), LINE * UNFACTORED_UNIT)
        p, q = factored_axes(parameter)
        n, m = parameter.x.shape[p], parameter.x.shape[q]
        return self.tilings[parameter] or Tiling(0, 0, 0, 0), -m * min(n, units_of(parameter, self.tilings[parameter]))

    def _describe(self, number: int, parameter: Parameter) -> None:
        row = [0] * f.TENSOR.value
        self._tensors.append(row)
        state, s = parameter.state, parameter.settings
        row[f.X.value], row[f.STEP.value] = parameter.x.data_ptr(), state["step"].data_ptr()
        row[f.GROUP.value], row[f.COUNT.value] = parameter.group, parameter.factoring.count
        if s.beta1:
            row[f.MOMENTUM.value] = state["momentum"].data_ptr()
        if parameter.rounding == "kahan":
            row[f.COMPENSATION.value] = state["compensation"].data_ptr()
        row[f.ROOT1.value], row[f.ROOT2.value] = roots(s.seed, parameter.number)
        row[f.SHRINK.value] = struct.unpack("q", struct.pack("d", shrink_of(parameter.shape)))[0]
        row[f.FIRST_UNIT.value], row[f.FIRST_BLOCK.value] = self.unit_count, self.block_count
        if not isinstance(parameter.factoring, Factored):
            self._describe_unfactored(number, parameter, row)
        else:
            self._describe_matrices(number, parameter, row)
        row[f.UNITS.value] = self.unit_count - row[f.FIRST_UNIT.value]
        row[f.BLOCKS.value] = self.block_count - row[f.FIRST_BLOCK.value]

    def _describe_unfactored(self, number: int, parameter: Parameter, row: list[int]) -> None:
        """Describe a tensor as one matrix whose rows are lines of its memory."""
        x = parameter.x
        lines = -(-x.numel() // LINE)
        row[f.FULL.value] = parameter.state["full"].data_ptr()
        row[f.N.value], row[f.M.value] = lines, x.numel()
        row[f.WHOLE_N.value] = row[f.WHOLE_M.value] = 1  # there are no means
        row[f.X_STRIDE_P.value] = row[f.G_STRIDE_P.value] = LINE
        row[f.X_STRIDE_Q.value] = row[f.G_STRIDE_Q.value] = 1
        matrix = [0] * f.MATRIX.value
        matrix[f.OF.value] = number
        if parameter.rounding == "stochastic":
            order = memory_order(parameter)
            assert isinstance(order, MemoryOrder)
            numbers = numbering(order, tuple(x.shape), parameter.shape, parameter.offset)
            assert numbers is not None
            matrix[f.NUMBER.value], row[f.NUMBER_Q.value] = numbers[0], numbers[2]
            row[f.NUMBER_P.value] = LINE * numbers[2]
        self._add_matrix(matrix, lines, UNFACTORED_UNIT, 0)

    def _describe_matrices(self, number: int, parameter: Parameter, row: list[int]) -> None:
        x, g = parameter.x, parameter.gradient
        p, q = factored_axes(parameter)
        shape, whole = x.shape, parameter.shape
        strides = {
            "x": list(x.stride()),
            "g": list(g.stride),
            "number": [prod(whole[i + 1 :]) for i in range(len(whole))],
        }
        # the state's own names are the paper's: its rows may be either axis
        along_p, along_q = ("row", "col") if p == factored(parameter).row_axis else ("col", "row")
        for key, gone, name in ((along_p, q, "row"), (along_q, p, "col")):
            if key in parameter.state:
                factor = parameter.state[key]
                row[{"row": f.ROW, "col": f.COL}[name].value] = factor.data_ptr()
                strides[name] = list(factor.stride())
                strides[name].insert(gone, 0)
            else:
                strides[name] = [0] * len(shape)
        for column, value in (
            (f.N, shape[p]),
            (f.M, shape[q]),
            (f.WHOLE_N, whole[p]),
            (f.WHOLE_M, whole[q]),
            (f.X_STRIDE_P, strides["x"][p]),
            (f.X_STRIDE_Q, strides["x"][q]),
            (f.G_STRIDE_P, strides["g"][p]),
            (f.G_STRIDE_Q, strides["g"][q]),
            (f.ROW_STRIDE, strides["row"][p]),
            (f.COL_STRIDE, strides["col"][q]),
            (f.SWAPPED, p != factored(parameter).row_axis),
            (f.NUMBER_P, strides["number"][p]),
            (f.NUMBER_Q, strides["number"][q]),
        ):
            row[column.value] = value
        batch = [axis for axis in range(len(shape)) if axis not in (p, q)]
        origin = sum(a * b for a, b in zip(strides["number"], parameter.offset or (0,) * len(whole), strict=True))
        offsets = [_offsets(shape, strides[name], batch) for name in ("x", "g", "row", "col", "number")]
        has_col, rows = row[f.COL.value] != 0, units_of(parameter, self.tilings[parameter])
        size_p, size_q = _up(shape[p]), _up(shape[q])
        self.new_vectors[parameter] = (self.vectors, self.vectors + size_p), size_p + size_q
        self.own_matrices[parameter] = len(self._matrices), len(offsets[0])
        for x_offset, g_offset, row_offset, col_offset, first in zip(*offsets, strict=True):
            matrix = [0] * f.MATRIX.value
            for column, value in (
                (f.OF, number),
                (f.X_OFFSET, x_offset),
                (f.G_OFFSET, g_offset),
                (f.ROW_OFFSET, row_offset),
                (f.COL_OFFSET, col_offset),
                (f.NUMBER, origin + first),
                (f.NEW_ROW, self.vectors),
                (f.NEW_COL, self.vectors + size_p),
            ):
                matrix[column.value] = value
            self.vectors += size_p + size_q
            self._add_matrix(matrix, shape[p], rows, shape[q] if has_col else 0)

    def _add_matrix(self, matrix: list[int], n: int, rows: int, columns: int) -> None:
        """Add the units and blocks of columns of a matrix."""
        place, count = len(self._matrices), -(-n // rows)
        matrix[f.OWN_UNIT.value], matrix[f.OWN_UNITS.value] = self.unit_count, count
        first = torch.arange(count) * rows
        self._units.append(torch.stack([torch.full_like(first, place), first, (first + rows).clamp(max=n)], 1))
        block = torch.arange(0, columns, BLOCK)
        self._blocks.append(torch.stack([torch.full_like(block, place), block], 1))
        self._matrices.append(matrix)
        self._counts.append((matrix[f.OF.value], count, len(block)))
        self.unit_count, self.block_count = self.unit_count + count, self.block_count + len(block)

    def _tiles(self) -> Tensor:
        """The tiles of the last pass, in the reverse order: it begins with what the first pass left in the cache."""
        tiles: list[Tensor] = []
        place = len(self._matrices)
        for number in reversed(range(len(self._tensors))):
            row, begin = self._tensors[number], self.tile_count
            n, m = row[f.N.value], row[f.M.value]
            height, width = (LINES, m) if row[f.FULL.value] else tile_shape(m)
            while place and self._matrices[place - 1][f.OF.value] == number:
                place -= 1
                rows, cols = torch.arange(0, n, height).flip(0), torch.arange(0, m, width)
                tiles.append(torch.cartesian_prod(torch.tensor([place]), rows, cols))
                self.tile_count += len(tiles[-1])
            row[f.FIRST_TILE.value], row[f.TILES.value] = begin, self.tile_count - begin
        return torch.cat(tiles)

    def _samples(self) -> tuple[Tensor, Tensor]:
        """Which tiles of which tensor programs measure, and which they check."""
        shares: list[tuple[int, int, int]] = []
        checks: list[tuple[int, int]] = []
        for i, row in enumerate(self._tensors):
            begin, end = row[f.FIRST_TILE.value], row[f.FIRST_TILE.value] + row[f.TILES.value]
            shares += [(i, first, min(first + MEASURED, end)) for first in range(begin, end, MEASURED)]
            sample = checked(end - begin)
            row[f.FIRST_CHECK.value] = len(checks)
            checks += [(i, begin + at) for at in sample] + [(i, -1)] * (len(sample) < end - begin)
            row[f.CHECKS.value] = len(checks) - row[f.FIRST_CHECK.value]
        return torch.tensor(shares), torch.tensor(checks)

    def _fill_scratch(self, most: int) -> tuple[list[Chunk], int]:
        """Give every matrix its place among the column sums, and begin a new chunk when they are full."""
        chunks: list[Chunk] = []
        units: list[tuple[Tiling | None, int, int]] = []
        used = largest = unit = block = tensor = first_block = first_tensor = 0
        for i, (matrix, (number, count, blocks)) in enumerate(zip(self._matrices, self._counts, strict=True)):
            size = _up(2 * count * self._tensors[number][f.M.value]) if blocks else 0
            if used and used + size > most:
                chunks.append(Chunk(units, (first_block, block), (first_tensor, tensor)))
                used, units, first_block, first_tensor = 0, [], block, tensor
            matrix[f.PARTIAL.value] = used
            used += size
            largest = max(largest, used)
            how = self.tilings[self.parameters[number]]
            if not units or units[-1][0] != how:
                units.append((how, unit, unit))
            unit, block = unit + count, block + blocks
            units[-1] = how, units[-1][1], unit
            if i + 1 == len(self._matrices) or self._matrices[i + 1][f.OF.value] != number:
                tensor = number + 1
        chunks.append(Chunk(units, (first_block, block), (first_tensor, tensor)))
        return chunks, largest


def factored(parameter: Parameter) -> Factored:
    """How a parameter is factored, of one that is."""
    assert isinstance(parameter.factoring, Factored)
    return parameter.factoring


def factored_axes(parameter: Parameter) -> tuple[int, int]:
    """P and Q: the factored axes in the order of memory, the outer one first."""
    row, col = factored(parameter).row_axis, factored(parameter).col_axis
    stride = parameter.x.stride()
    return (col, row) if stride[row] < stride[col] else (row, col)


def memory_order(parameter: Parameter) -> MemoryOrder | str:
    """The order of memory of an unfactored tensor, or why there is none."""
    return flat_order(tuple(parameter.x.shape), parameter.x.stride(), parameter.gradient.stride)


def tiling_of(parameter: Parameter, held: int) -> Tiling | None:
    """How the first pass holds the rows of a parameter; None: it is unfactored."""
    if not isinstance(parameter.factoring, Factored):
        return None
    return tiling(parameter.x.shape[factored_axes(parameter)[1]], parameter.gradient.dtype.itemsize, held)


def units_of(parameter: Parameter, how: Tiling | None) -> int:
    """The rows of a unit of the first pass."""
    assert parameter.gradient is not None and how is not None
    p, q = factored_axes(parameter)
    return unit_rows(parameter.x.shape[p], parameter.x.shape[q], parameter.gradient.dtype.itemsize, how.rows)


def is_aligned(parameter: Parameter) -> bool:
    """Whether 16 bytes can be read at once everywhere, as far as it does not depend on the gradient's address."""
    x, form, state = parameter.x, parameter.gradient, parameter.state
    assert form is not None
    kept = [state[key] for key in ("full", "momentum", "compensation") if key in state]
    if any(t.data_ptr() % ALIGNMENT for t in (x, *kept)):
        return False
    if not isinstance(parameter.factoring, Factored):
        return x.numel() % 16 == 0
    p, q = factored_axes(parameter)
    steps = [*x.stride(), *form.stride]
    inner = (q, q + x.dim())
    lengths = [*x.shape, *x.shape]
    return x.shape[q] % 16 == 0 and all(
        step == 1 if i in inner else step % 16 == 0 or lengths[i] == 1 for i, step in enumerate(steps)
    )


def _offsets(shape: Sequence[int], strides: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Where each matrix of a stack begins."""
    found = torch.zeros((), dtype=torch.int64)
    for axis in axes:
        found = found.unsqueeze(-1) + torch.arange(shape[axis]) * strides[axis]
    offsets: list[int] = found.reshape(-1).tolist()
    return offsets


def _up(count: int) -> int:
    return -(-count // GAP) * GAP
