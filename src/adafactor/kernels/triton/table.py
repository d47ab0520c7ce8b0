"""Parameters of one kind, described to the kernels in a few tables that are made once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from adafactor.core.bucket import Parameter
from adafactor.core.factoring import statistics_dtype
from adafactor.core.rounding import roots
from adafactor.core.sums import shrink_of
from adafactor.kernels.memory_order import MemoryOrder, flat_order, numbering
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.cut import BLOCK, LINE, PIECE, SHARE, WHOLE_UNIT, Cut, checked, cut

GAP = 64  # elements: every vector in scratch begins at a multiple


@dataclass(frozen=True)
class Chunk:
    """What a launch of the first walk and of `fold` is given: as much as fits the scratch."""

    units: tuple[int, int]  # first and end, of tensors with short rows
    long_units: tuple[int, int]  # with long rows
    blocks: tuple[int, int]
    tensors: tuple[int, int]  # those that are complete with this chunk


class Table:
    """The tables, on the device, and the sizes of what a step needs besides."""

    def __init__(self, parameters: list[Parameter], held: int, most: int):
        """Describe parameters.

        Args:
            parameters: in any order; `self.parameters` has those with long rows last.
            held: elements that a program of the first walk has in registers.
            most: bytes that a step may take besides the state.
        """
        self.cuts = {parameter: cut_of(parameter, held) for parameter in parameters}
        self.parameters = sorted(parameters, key=lambda parameter: self.cuts[parameter].is_long)
        device, stat = parameters[0].x.device, statistics_dtype(parameters[0].x.dtype)
        self.vectors = 0  # elements of new R and C
        self.unit_count = self.block_count = self.piece_count = 0
        self.new_vectors: dict[
            Parameter, tuple[tuple[int, int], int]
        ] = {}  # where its first R and C begin; to the next
        self.own_matrices: dict[Parameter, tuple[int, int]] = {}  # its first matrix, and how many
        self._tensors: list[list[int]] = []
        self._matrices: list[list[int]] = []
        self._units: list[Tensor] = []
        self._blocks: list[Tensor] = []
        self._rows_of_matrix: list[tuple[int, int, int]] = []  # tensor, units, blocks
        for number, parameter in enumerate(self.parameters):
            self._describe(number, parameter, self.cuts[parameter])
        pieces = self._pieces()
        rest = self.vectors * stat.itemsize + 8 * (3 * self.unit_count + self.block_count + len(self._matrices))
        self.chunks, self.scratch = self._cut_into_chunks((most - rest) // stat.itemsize)
        self.tensors = torch.tensor(self._tensors, dtype=torch.int64).to(device)
        self.matrices = torch.tensor(self._matrices, dtype=torch.int64).to(device)
        self.units = torch.cat(self._units).to(torch.int32).to(device)
        self.blocks = torch.cat([*self._blocks, torch.zeros(1, 2, dtype=torch.int64)]).to(torch.int32).to(device)
        self.pieces = pieces.to(torch.int32).to(device)
        self.spans, self.shares, self.checks = (s.to(torch.int32).to(device) for s in self._spans())
        self.matrix_count = len(self._matrices)
        del self._tensors, self._matrices, self._units, self._blocks, self._rows_of_matrix

    def _describe(self, number: int, parameter: Parameter, how: Cut) -> None:
        row = [0] * f.TENSOR.value
        self._tensors.append(row)
        state, s = parameter.state, parameter.settings
        row[f.X.value], row[f.STEP.value], row[f.GROUP.value] = (
            parameter.x.data_ptr(),
            state["step"].data_ptr(),
            parameter.group,
        )
        if s.beta1:
            row[f.MOMENTUM.value] = state["momentum"].data_ptr()
        if parameter.rounding == "kahan":
            row[f.COMPENSATION.value] = state["compensation"].data_ptr()
        row[f.ROOT1.value], row[f.ROOT2.value] = roots(s.seed, parameter.number)
        row[f.COUNT.value] = parameter.factoring.count
        row[f.SHRINK.value] = struct.unpack("q", struct.pack("d", shrink_of(parameter.shape)))[0]
        row[f.FIRST_UNIT.value], row[f.FIRST_BLOCK.value] = self.unit_count, self.block_count
        if parameter.factoring.estimator == "full":
            self._describe_whole(number, parameter, row)
        else:
            self._describe_matrices(number, parameter, row, how)
        row[f.UNITS.value] = self.unit_count - row[f.FIRST_UNIT.value]
        row[f.BLOCKS.value] = self.block_count - row[f.FIRST_BLOCK.value]

    def _describe_whole(self, number: int, parameter: Parameter, row: list[int]) -> None:
        x = parameter.x
        lines = -(-x.numel() // LINE)
        row[f.FULL.value] = parameter.state["full"].data_ptr()
        row[f.N.value], row[f.M.value] = lines, x.numel()
        matrix = [0] * f.MATRIX.value
        matrix[f.OF.value] = number
        if parameter.rounding == "stochastic":
            order = whole_order(parameter)
            assert isinstance(order, MemoryOrder)
            numbers = numbering(order, tuple(x.shape), parameter.shape, parameter.offset)
            assert numbers is not None
            matrix[f.NUMBER.value], row[f.NUMBER_P.value] = numbers[0], numbers[2]
        self._add_matrix(matrix, lines, WHOLE_UNIT, 0)

    def _describe_matrices(self, number: int, parameter: Parameter, row: list[int], how: Cut) -> None:
        x, g = parameter.x, parameter.gradient
        assert g is not None
        p, q = factored_axes(parameter)
        shape, whole = x.shape, parameter.shape
        strides = {
            "x": list(x.stride()),
            "g": list(g.stride),
            "number": [prod(whole[i + 1 :]) for i in range(len(whole))],
        }
        # the state's own names are the paper's: its rows may be either axis
        along_p, along_q = ("row", "col") if p == parameter.factoring.row_axis else ("col", "row")
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
            (f.XP, strides["x"][p]),
            (f.XQ, strides["x"][q]),
            (f.GP, strides["g"][p]),
            (f.GQ, strides["g"][q]),
            (f.ROW_STRIDE, strides["row"][p]),
            (f.COL_STRIDE, strides["col"][q]),
            (f.SWAPPED, p != parameter.factoring.row_axis),
            (f.NUMBER_P, strides["number"][p]),
            (f.NUMBER_Q, strides["number"][q]),
        ):
            row[column.value] = value
        batch = [axis for axis in range(len(shape)) if axis not in (p, q)]
        origin = sum(a * b for a, b in zip(strides["number"], parameter.offset or (0,) * len(whole), strict=True))
        offsets = [_offsets(shape, strides[name], batch) for name in ("x", "g", "row", "col", "number")]
        has_col = row[f.COL.value] != 0
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
            self._add_matrix(matrix, shape[p], how.rows, shape[q] if has_col else 0)

    def _add_matrix(self, matrix: list[int], n: int, rows: int, columns: int) -> None:
        """Add the units and blocks of columns of a matrix."""
        place, count = len(self._matrices), -(-n // rows)
        matrix[f.OWN_UNIT.value], matrix[f.OWN_UNITS.value] = self.unit_count, count
        first = torch.arange(count) * rows
        self._units.append(torch.stack([torch.full_like(first, place), first, (first + rows).clamp(max=n)], 1))
        block = torch.arange(0, columns, BLOCK)
        self._blocks.append(torch.stack([torch.full_like(block, place), block], 1))
        self._matrices.append(matrix)
        self._rows_of_matrix.append((matrix[f.OF.value], count, len(block)))
        self.unit_count, self.block_count = self.unit_count + count, self.block_count + len(block)

    def _pieces(self) -> Tensor:
        """The pieces of the last walk, in the reverse order: it begins with what the first walk left in the cache."""
        found: list[Tensor] = []
        place = len(self._matrices)
        for number in reversed(range(len(self._tensors))):
            row, begin = self._tensors[number], self.piece_count
            is_whole = row[f.FULL.value] != 0
            height, width = PIECE if is_whole else self.cuts[self.parameters[number]].piece
            n, m = row[f.N.value], 1 if is_whole else row[f.M.value]
            while place and self._matrices[place - 1][f.OF.value] == number:
                place -= 1
                rows = torch.arange(0, n, height).flip(0)
                cols = torch.arange(0, m, width)
                grid = torch.cartesian_prod(torch.tensor([place]), rows, cols)
                found.append(grid)
                self.piece_count += len(grid)
            row[f.FIRST_PIECE.value], row[f.PIECES.value] = begin, self.piece_count - begin
        return torch.cat(found)

    def _spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which pieces of which tensor the programs of the last walk take: to step, to measure and to check ΣX²."""
        number = torch.cat([torch.full((row[f.PIECES.value],), i) for i, row in reversed([*enumerate(self._tensors)])])
        piece = torch.arange(self.piece_count)
        shares, checks = [], []
        for i, row in enumerate(self._tensors):
            begin, end = row[f.FIRST_PIECE.value], row[f.FIRST_PIECE.value] + row[f.PIECES.value]
            shares += [(i, first, min(first + SHARE, end)) for first in range(begin, end, SHARE)]
            sample = checked(end - begin)
            checks += [(i, begin + at, begin + at + 1) for at in sample]
            checks += [(i, -1, -1)] if len(sample) < end - begin else []
        return torch.stack([number, piece, piece + 1], 1), torch.tensor(shares), torch.tensor(checks)

    def _cut_into_chunks(self, most: int) -> tuple[list[Chunk], int]:
        """Give every matrix its place among the column sums, and begin anew when they are full."""
        chunks: list[Chunk] = []
        long = [self.cuts[parameter].is_long for parameter in self.parameters]
        used = largest = unit = block = tensor = 0
        start = [0, 0, 0, 0]  # of units, long units, blocks, tensors
        counts = [0, 0]

        def close() -> None:
            first = unit - counts[0] - counts[1]
            middle = first + counts[0]
            chunks.append(Chunk((first, middle), (middle, unit), (start[2], block), (start[3], tensor)))

        for i, (matrix, (number, units, blocks)) in enumerate(zip(self._matrices, self._rows_of_matrix, strict=True)):
            size = _up(2 * units * self._tensors[number][f.M.value]) if blocks else 0
            if used and used + size > most:
                close()
                used, counts, start = 0, [0, 0], [0, 0, block, tensor]
            matrix[f.PARTIAL.value] = used
            used += size
            largest = max(largest, used)
            counts[long[number]] += units
            unit, block = unit + units, block + blocks
            if i + 1 == len(self._matrices) or self._matrices[i + 1][f.OF.value] != number:
                tensor = number + 1
        close()
        return chunks, largest


def factored_axes(parameter: Parameter) -> tuple[int, int]:
    """P and Q: the factored axes in the order of memory, the outer one first."""
    row, col = parameter.factoring.row_axis, parameter.factoring.col_axis
    assert row is not None and col is not None
    stride = parameter.x.stride()
    return (col, row) if stride[row] < stride[col] else (row, col)


def whole_order(parameter: Parameter) -> MemoryOrder | str:
    """The order of memory of a tensor whose second moment is kept whole, or why there is none."""
    assert parameter.gradient is not None
    return flat_order(tuple(parameter.x.shape), parameter.x.stride(), parameter.gradient.stride)


def cut_of(parameter: Parameter, held: int) -> Cut:
    """How a parameter is cut."""
    if parameter.factoring.estimator == "full":
        return Cut(WHOLE_UNIT, False, PIECE)
    assert parameter.gradient is not None
    p, q = factored_axes(parameter)
    return cut(parameter.x.shape[p], parameter.x.shape[q], parameter.gradient.dtype.itemsize, held)


def is_aligned(parameter: Parameter) -> bool:
    """Whether 16 bytes can be read at once everywhere, as far as it does not depend on the gradient's address."""
    x, form, state = parameter.x, parameter.gradient, parameter.state
    assert form is not None
    kept = [state[key] for key in ("full", "momentum", "compensation") if key in state]
    if any(t.data_ptr() % 16 for t in (x, *kept)):
        return False
    if parameter.factoring.estimator == "full":
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
