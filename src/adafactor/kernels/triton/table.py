"""Parameters of one kind, described to the kernels in a few tables that are made once."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from adafactor.core.contract import Parameter
from adafactor.core.momentum import BUFFERS
from adafactor.core.rounding import roots
from adafactor.kernels.memory_order import MemoryOrder, draws_words, numbering
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import layout, sizes
from adafactor.kernels.triton.kind import Kind

IN_STATE = {
    "full": f.FULL,
    **dict.fromkeys(BUFFERS, f.MOMENTUM),
    "momentum_scale": f.SCALE,
    "compensation": f.COMPENSATION,
}  # and the columns of their addresses; there is a momentum of one kind
PIECES = {
    "units": (f.FIRST_UNIT, f.UNITS),
    "blocks": (f.FIRST_BLOCK, f.BLOCKS),
    "tiles": (f.FIRST_TILE, f.TILES),
}  # of matrices, each for a program; and the columns that say where a tensor's begin, and how many there are
GAP = 64  # elements: every vector in scratch begins at a multiple
Row = dict[int, int]  # of a table: number by column; 0 where there is none


@dataclass(frozen=True)
class Chunk:
    """What launches of the first pass and of `fold` are given: as much as fits the scratch."""

    units: list[tuple[sizes.Tiling, int, int]]  # first and end of those that are tiled alike
    blocks: tuple[int, int]
    tensors: tuple[int, int]  # those that are complete with this chunk


@dataclass(frozen=True)
class Place:
    """Where a parameter's matrices are in the tables, and their new factors among the vectors."""

    matrix: int  # the first one
    matrices: int
    row: int  # where the first R and C begin
    col: int
    stride: int  # from a matrix to the next


class Table:
    """The tables, on the device, and the sizes of what a step needs besides."""

    def __init__(self, parameters: list[Parameter], kind: Kind, most: int):
        """Describe parameters.

        Args:
            parameters: in any order; `self.parameters` has those together that are tiled alike, long units first.
            kind: of all of them.
            most: bytes that a step may take besides the state.
        """
        self.tilings = {
            parameter: kind.tiling((layout.matrix_shape(parameter) or (0, None))[1]) for parameter in parameters
        }
        self.parameters = sorted(parameters, key=lambda p: (self.tilings[p], -self._unit_size(p)))
        self.vectors = 0  # elements of new R and C
        self.places: dict[Parameter, Place] = {}
        self._matrices: list[Row] = []
        self._pieces: dict[str, list[Tensor]] = {name: [] for name in PIECES}
        self._counts = [dict.fromkeys(PIECES, 0)]  # how many there are, after each matrix
        tensors = [self._describe(number, parameter) for number, parameter in enumerate(self.parameters)]
        units, blocks, tiles = (torch.cat(rows) for rows in self._pieces.values())
        for row in tensors:
            row[f.FIRST_TILE] = len(tiles) - row[f.FIRST_TILE] - row[f.TILES]
        tiles = tiles.flip(0)  # the last pass begins with what the first pass left in the cache
        rest = 2 * self.vectors * kind.stat.itemsize + 8 * (3 * len(units) + len(blocks) + len(self._matrices))
        self.chunks, self.scratch = self._fill_scratch(tensors, (most - rest) // kind.stat.itemsize)
        shares, checks = _samples(tensors)
        device = parameters[0].x.device
        self.tensors = _filled(tensors, f.TENSOR).to(device)
        self.matrices = _filled(self._matrices, f.MATRIX).to(device)
        lists = (units, blocks, tiles, shares, checks)
        self.units, self.blocks, self.tiles, self.shares, self.checks = (t.to(torch.int32).to(device) for t in lists)
        del self._matrices, self._pieces, self._counts

    def unit_rows(self, parameter: Parameter) -> int:
        """The rows of a unit of the first pass; of an unfactored tensor, its lines."""
        shape = layout.matrix_shape(parameter)
        if shape is None:
            return sizes.UNFACTORED_UNIT
        return sizes.unit_rows(*shape, parameter.gradient.dtype.itemsize, self.tilings[parameter].rows)

    def _unit_size(self, parameter: Parameter) -> int:
        n, m = layout.matrix_shape(parameter) or (-(-parameter.x.numel() // sizes.LINE), sizes.LINE)
        return m * min(n, self.unit_rows(parameter))

    def _describe(self, number: int, parameter: Parameter) -> Row:
        """Describe a tensor and its matrices."""
        how = self.tilings[parameter]
        root1, root2 = roots(parameter.settings.seed, parameter.number)
        columns, matrices = layout.block_shape(parameter)
        begin = self._counts[-1]
        row = {
            f.STEP: parameter.state["step"].data_ptr(),
            f.GROUP: parameter.group,
            f.COUNT: parameter.factoring.count,
            f.ROOT1: root1,
            f.ROOT2: root2,
            f.SHRINK: struct.unpack("q", struct.pack("d", 2.0 ** -max(parameter.shape, default=1).bit_length()))[0],
            f.PARTS: how.parts,
            f.COLUMNS: columns,
            f.MATRICES: matrices,
            f.MEAN_GIVEN: int(parameter.shard is not None and "mean_row" in parameter.shard.shapes),
        }
        describe = self._describe_matrices if how.chunks else self._describe_unfactored
        row |= describe(number, parameter)
        for name, (first, count) in PIECES.items():
            row |= {first: begin[name], count: self._counts[-1][name] - begin[name]}
        return row

    def _describe_unfactored(self, number: int, parameter: Parameter) -> Row:
        """Describe a tensor as one matrix whose rows are lines of its memory."""
        x, first, step = parameter.x, 0, 0
        if draws_words(parameter):
            order = layout.memory_order(parameter)
            assert isinstance(order, MemoryOrder)
            numbers = numbering(order, tuple(x.shape), parameter.shape, parameter.offset)
            assert numbers is not None
            first, step = numbers[0], numbers[2]
        n, m, stride = layout.memory_rows(parameter)
        matrix = {column: t.data_ptr() for column, t in _tensors(parameter).items()}
        self._add_matrix(matrix | {f.OF: number, f.NUMBER: first}, parameter, (n, m), 0)
        row = {f.N: n, f.M: m, f.NUMBER_P: stride * step, f.NUMBER_Q: step}
        row |= {f.SCALE_STRIDE: -(-stride // layout.block_shape(parameter)[0])}
        row |= {f.WHOLE_N: 1, f.WHOLE_M: 1}  # there are no means
        return row | {f.X_STRIDE_P: stride, f.G_STRIDE_P: stride, f.X_STRIDE_Q: 1, f.G_STRIDE_Q: 1}

    def _describe_matrices(self, number: int, parameter: Parameter) -> Row:
        """Describe a tensor and each matrix of its stack."""
        x, state, whole = parameter.x, parameter.state, parameter.shape
        (p, q), (along_p, along_q) = layout.factored_axes(parameter), layout.factors_along(parameter)
        n, m = x.shape[p], x.shape[q]
        tensors, none = _tensors(parameter), [0] * x.dim()
        for column, name in ((f.ROW, along_p), (f.COL, along_q)):
            if name in state:
                tensors[column] = state[name]
        strides = {column: [*t.stride(), *none] for column, t in tensors.items()}  # but for the last ones of scales
        strides |= {f.G_OFFSET: [*parameter.gradient.stride], f.NUMBER: layout.number_strides(whole)}
        batch = [axis for axis in range(x.dim()) if axis not in (p, q)]
        columns = {column: layout.matrix_offsets(x.shape, steps, batch) for column, steps in strides.items()}
        for column, t in tensors.items():
            columns[column] = [t.data_ptr() + t.element_size() * offset for offset in columns[column]]
        origin = sum(a * b for a, b in zip(strides[f.NUMBER], parameter.offset or none, strict=True))
        up_n, up_m = _up(n), _up(m)
        self.places[parameter] = Place(
            len(self._matrices), len(columns[f.X]), self.vectors, self.vectors + up_n, up_n + up_m
        )
        reach = layout.block_shape(parameter)[1]
        for i, at in enumerate(zip(*columns.values(), strict=True)):
            matrix = dict(zip(columns, at, strict=True))
            matrix[f.NUMBER] += origin
            matrix |= {f.OF: number, f.NEW_ROW: self.vectors, f.NEW_COL: self.vectors + up_n}
            self.vectors += up_n + up_m
            self._add_matrix(matrix, parameter, (n, m), m if along_q in state else 0, is_tiled=i % reach == 0)
        return {
            f.ROW_STRIDE: strides.get(f.ROW, none)[p],
            f.COL_STRIDE: strides.get(f.COL, none)[q],
            f.SCALE_STRIDE: strides.get(f.SCALE, none)[p],
            f.N: n,
            f.M: m,
            f.WHOLE_N: whole[p],
            f.WHOLE_M: whole[q],
            f.X_STRIDE_P: strides[f.X][p],
            f.X_STRIDE_Q: strides[f.X][q],
            f.G_STRIDE_P: strides[f.G_OFFSET][p],
            f.G_STRIDE_Q: strides[f.G_OFFSET][q],
            f.NUMBER_P: strides[f.NUMBER][p],
            f.NUMBER_Q: strides[f.NUMBER][q],
            f.SWAPPED: int(along_p == "col"),
        }

    def _add_matrix(
        self, matrix: Row, parameter: Parameter, shape: tuple[int, int], columns: int, is_tiled: bool = True
    ) -> None:
        """Add a matrix, its units, blocks of as many columns as C has, and tiles, unless those of another have it."""
        (n, m), rows, how = shape, self.unit_rows(parameter), self.tilings[parameter]
        lines = n if how.chunks else -(-parameter.x.numel() // sizes.LINE)
        height, width = layout.tile_shape(parameter)
        place = torch.tensor([len(self._matrices)])
        units = torch.cartesian_prod(place, torch.arange(0, lines, rows), torch.arange(how.parts) * how.width)
        units = units[:, [0, 1, 1, 2]]
        units[:, 2] = (units[:, 2] + rows).clamp(max=lines)
        blocks = torch.cartesian_prod(place, torch.arange(0, columns, sizes.BLOCK)).reshape(-1, 2)
        tiles = torch.cartesian_prod(place, torch.arange(0, n, height), torch.arange(0, m, width).flip(0))
        tiles = tiles[: len(tiles) if is_tiled else 0]
        before = self._counts[-1]
        self._matrices.append(matrix | {f.OWN_UNIT: before["units"], f.OWN_UNITS: len(units)})
        after = {}
        for name, pieces in zip(PIECES, (units, blocks, tiles), strict=True):
            self._pieces[name].append(pieces)
            after[name] = before[name] + len(pieces)
        self._counts.append(after)

    def _fill_scratch(self, tensors: list[Row], most: int) -> tuple[list[Chunk], int]:
        """Give every matrix its place among the column sums, and begin a new chunk when they are full."""
        chunks: list[Chunk] = []
        begin = used = largest = 0
        for i, matrix in enumerate(self._matrices):
            tensor = tensors[matrix[f.OF]]
            size = _up(2 * (matrix[f.OWN_UNITS] // tensor[f.PARTS]) * tensor[f.M]) if tensor[f.BLOCKS] else 0
            if used and used + size > most:
                chunks.append(self._chunk(begin, i))
                begin, used = i, 0
            matrix[f.PARTIAL] = used
            used += size
            largest = max(largest, used)
        return [*chunks, self._chunk(begin, len(self._matrices))], largest

    def _chunk(self, begin: int, end: int) -> Chunk:
        """Make a chunk of these matrices."""
        owners = [matrix[f.OF] for matrix in self._matrices[begin : end + 1]]
        first, last, units = self._counts[begin], self._counts[end], []
        for how, same in groupby(range(begin, end), lambda i: self.tilings[self.parameters[owners[i - begin]]]):
            places = list(same)
            units.append((how, self._counts[places[0]]["units"], self._counts[places[-1] + 1]["units"]))
        after = owners[-1] if end < len(self._matrices) else len(self.parameters)
        return Chunk(units, (first["blocks"], last["blocks"]), (owners[0], after))


def _tensors(parameter: Parameter) -> dict[int, Tensor]:
    """X and what is kept for each of its elements, by the columns of their addresses."""
    return {f.X: parameter.x} | {c: parameter.state[key] for key, c in IN_STATE.items() if key in parameter.state}


def _samples(tensors: list[Row]) -> tuple[Tensor, Tensor]:
    """Which tiles of which tensor programs measure, and which they check."""
    shares: list[tuple[int, int, int]] = []
    checks: list[tuple[int, int]] = []
    for i, row in enumerate(tensors):
        begin, end = row[f.FIRST_TILE], row[f.FIRST_TILE] + row[f.TILES]
        shares += [(i, first, min(first + sizes.MEASURED, end)) for first in range(begin, end, sizes.MEASURED)]
        sample = sizes.checked(end - begin)
        row[f.FIRST_CHECK] = len(checks)
        checks += [(i, begin + at) for at in sample] + [(i, -1)] * (len(sample) < end - begin)
        row[f.CHECKS] = len(checks) - row[f.FIRST_CHECK]
    return torch.tensor(shares), torch.tensor(checks)


def _filled(rows: list[Row], columns: int) -> Tensor:
    return torch.tensor([[row.get(column, 0) for column in range(columns)] for row in rows], dtype=torch.int64)


def _up(count: int) -> int:
    return -(-count // GAP) * GAP
