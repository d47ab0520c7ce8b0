"""What the kernels of one parameter are launched with, the same in every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adafactor.core import momentum
from adafactor.core.contract import Parameter, Sums
from adafactor.core.factoring import Factored
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.between import COLUMNS, columns, conclude
from adafactor.kernels.triton.first_pass import first_pass
from adafactor.kernels.triton.last_pass import last_pass, squares
from adafactor.kernels.triton.launch import AT_MOST, Launch
from adafactor.kernels.triton.layout import LINE, TILE, Layout, layout_of, line_of, tiling
from adafactor.kernels.triton.unfactored import full_sums, small_step

ALIGNMENT = 16  # bytes
SHARED_MEMORY = 96 * 2**10  # bytes of a program; the smallest cards have 99 KB


class Plan:
    """A parameter, its launches and its scratch. Column sums are taken anew in each step, all else stays."""

    def __init__(self, parameter: Parameter, fields: Tensor):
        """Prepare; `fields` is the parameter's row of the executor's table."""
        layout = layout_of(parameter)
        assert isinstance(layout, Layout)
        self.parameter, self.layout, self.x, self._fields = parameter, layout, parameter.x, fields
        self.is_factored = isinstance(parameter.factoring, Factored)
        s, b, n, m = parameter.settings, layout.matrices, layout.n, layout.m
        has_momentum, has_blocks = bool(s.beta1), bool(s.beta1) and "momentum_scale" in parameter.state
        line = LINE if has_blocks else line_of(m)
        rows = TILE // line
        groups = min(8, -(-n // rows)) if layout.is_flat or n >= 8 * rows else 1
        tiles, lines = -(-n // (groups * rows)), 1 if layout.is_flat else -(-m // line)
        buffer = momentum.buffer(parameter.state) if has_momentum else None
        self.x2, self.completed = self._zeros(b * tiles * lines), fields[f.FINITE.value : f.X2.value + 1]  # of a shard
        self._values = self._pointers(has_momentum) | {
            "n": n, "m": m, "matrices": b, "groups": groups, "tiles": tiles, "lines": lines,
            "x_strides": layout.x, "g_strides": layout.g, "row_strides": layout.row, "col_strides": layout.col,
            "scale_strides": layout.scale, "number": layout.number, "number_strides": layout.numbers,
            "count": parameter.factoring.count, "eps1": s.eps[0], "eps2": s.eps[1], "clip": s.clip,
            "FLAT": layout.is_flat, "ROWS": rows, "LINE": line, "RANDOM": parameter.rounding == "stochastic",
            "RANDOM_MOMENTUM": buffer is not None and buffer.dtype != torch.float32,
            "AFTER": has_momentum and s.momentum_of == "direction", "RELATIVE": s.relative,
            "BY_ALPHA": s.weight_decay_by == "alpha", "SIGN": -1 if s.maximize else 1,
            "IGNORES": s.on_nonfinite == "ignore",
        }  # fmt: skip
        self._small: Launch | None = None
        grid = (b * tiles * lines,)
        units, blocks = self._plan_factored() if self.is_factored else self._plan_unfactored(grid)
        self._conclude = self._plan_conclude(units, blocks)
        self._last = Launch(last_pass, grid, 1, self._values)
        self._squares = Launch(squares, grid, 0, self._values)

    @property
    def variant(self) -> tuple[Any, ...]:
        """What its kernels are compiled for: constants, formats, which arguments are None, and how G can be loaded."""
        known = (f"{name} {getattr(v, 'dtype', v)}" for name, v in self._values.items() if _matters(name, v))
        return (
            self.parameter.gradient.dtype,
            self.layout.is_aligned,
            self._small is None,
            *self._first.constants,
            *known,
        )

    def step(self, g: Tensor) -> None:
        """Take it from G to X."""
        if self._small is not None:
            self._small(_is_aligned(g), g)
        else:
            self.moments(g)
            self.apply_(g)

    def moments(self, g: Tensor) -> None:
        """Read G: R, C (of a shard, what is here of its means) and ΣU²."""
        if not self.is_factored:
            self._first(_is_aligned(g), g)
            return
        column_sums = torch.empty(self._scratch, dtype=torch.float32, device=g.device)
        first = self._first if _is_aligned(g) else self._first_odd
        first(_is_aligned(g), g, column_sums, self._row_means(g) if first.programs[2] > 1 else None)
        self._fold(True, column_sums)

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return ΣU² and ΣX² of what is here of a shard, with C from completed means."""
        if self.is_factored:
            self._average(True, None)
        return self._u2.sum(), self.x2.sum()

    def apply_(self, g: Tensor) -> None:
        """Find the scalars; then read G again and write X."""
        self._conclude(True)
        self._last(_is_aligned(g), g)

    def measure(self) -> None:
        """Find ΣX², where it is not what the last step has left."""
        self._squares(True)

    def remeasure(self) -> None:
        """Find ΣX² again if X was written to behind torch's back; here the host waits."""
        found = torch.linalg.vector_norm(self.x, dtype=torch.float32).double().square()
        if not torch.isclose(found, self.x2.sum(), rtol=1e-4, atol=0.0):
            self.measure()

    def probe(self) -> Tensor:
        """Return a number that is finite if G² is."""
        return self._unit_sums[f.PROBE.value :: f.SUMS.value].sum()

    def sums(self, finite: Tensor) -> Sums:
        """Return what other ranks have a share in: means over the rows of G² + ε₁, and mean(R)."""
        one = Sums(self.parameter, finite)
        shard, state = self.parameter.shard, self.parameter.state
        if shard is None or not self.is_factored:
            return one
        if "col" in state:
            gone, own = self.layout.axes
            stack = [length for axis, length in enumerate(self.x.shape) if axis not in self.layout.axes]
            one.cols = self._means[0].view(*stack, self.layout.m).movedim(-1, own - (gone < own)).unsqueeze(gone)
        if "mean_row" in shard.shapes:
            one.mean_row = self._mean_row.view(shard.shapes["mean_row"])
        return one

    def complete(self, one: Sums) -> None:
        """Take mean(R) as all ranks have completed it; the other sums were completed where they are."""
        if one.mean_row is not None:
            self._mean_row.copy_(one.mean_row.reshape(-1))

    def _pointers(self, has_momentum: bool) -> dict[str, Any]:
        """Name the tensors that every kernel finds where they are; None for those that this parameter does not have."""
        state, along = self.parameter.state, self.layout.names
        return {
            "x_ptr": self.x, "full_ptr": state.get("full"), "row_ptr": state.get(along[0]),
            "col_ptr": state.get(along[1]), "momentum_ptr": momentum.buffer(state) if has_momentum else None,
            "scale_ptr": state.get("momentum_scale") if has_momentum else None,
            "compensation_ptr": state["compensation"] if self.parameter.rounding == "kahan" else None,
            "x2_ptr": self.x2, "fields_ptr": self._fields, "step_ptr": state["step"], "new_row_ptr": None,
            "new_col_ptr": None, "mean_row_ptr": None, "means_ptr": None,
        }  # fmt: skip

    def _plan_factored(self) -> tuple[int, int]:
        """Prepare what comes before `conclude`; return how many units and blocks of columns leave sums for it."""
        layout, values = self.layout, self._values
        b, n, m = layout.matrices, layout.n, layout.m
        t = tiling(b, n, m)
        units, blocks, self._scratch = b * t.units, b * -(-m // COLUMNS.value), 2 * b * t.units * m
        self._unit_sums, self._u2, self._mean_row = map(self._zeros, (units * f.SUMS.value, blocks, b))
        is_whole = self.parameter.shard is None
        self._means = self._zeros(0 if is_whole else 2 * b * m).view(2, -1, m)
        lengths = {"new_row_ptr": b * n, "new_col_ptr": b * m}
        values |= {name: torch.empty(k, dtype=torch.float32, device=self.x.device) for name, k in lengths.items()}
        values |= {"unit_sums_ptr": self._unit_sums, "u2_ptr": self._u2, "mean_row_ptr": self._mean_row}
        values |= {"means_ptr": None if is_whole else self._means}
        values |= {"whole_n": self.parameter.shape[layout.axes[0]], "unit": t.unit, "units": t.units}
        ahead = 2 * t.rows * t.chunk * t.chunks * self.parameter.gradient.dtype.itemsize  # bytes of three stages
        rows = {"ROWS": t.rows, "CHUNK": t.chunk, "CHUNKS": t.chunks, "STAGES": 3 if ahead < SHARED_MEMORY else 2}
        one_by_one = rows | {"STAGES": 1}  # where G is not aligned; then a thread has half as many elements
        grid, warps = (b, t.units, t.parts), t.warps
        self._first_odd = Launch(first_pass, grid, 3, values | one_by_one, num_warps=2 * warps, **AT_MOST)
        self._first = Launch(first_pass, grid, 3, values | rows, num_warps=warps, **AT_MOST)
        if not layout.is_aligned:
            self._first = self._first_odd
        self._fold = Launch(columns, (blocks,), 1, values | {"FOLDS": True, "AVERAGES": is_whole})
        self._average = Launch(columns, (blocks,), 1, values | {"FOLDS": False, "AVERAGES": True})
        return units, blocks

    def _plan_unfactored(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """Prepare the same, and where the tensor is one tile, a launch that takes the whole step."""
        self._unit_sums, self._u2 = self._zeros(grid[0] * f.SUMS.value), self._zeros(grid[0])
        self._values |= {"unit_sums_ptr": self._unit_sums, "u2_ptr": self._u2}
        self._first = Launch(full_sums, grid, 1, self._values)
        if grid == (1,) and not self.parameter.in_lockstep:
            self._small = Launch(small_step, grid, 1, self._values)
        return grid[0], grid[0]

    def _plan_conclude(self, units: int, blocks: int) -> Launch:
        """Give it the sums of all units; of a shard the three numbers that the ranks complete."""
        given: dict[str, Any] = {"units": units, "blocks": blocks, "tiles": len(self.x2)}
        if self.parameter.shard is not None:
            row = self._fields
            ends = row[f.FINITE.value - f.PROBE.value :], row[f.U2.value :], row[f.X2.value :]
            given = dict.fromkeys(given, 1) | dict(zip(("unit_sums_ptr", "u2_ptr", "x2_ptr"), ends, strict=True))
        return Launch(conclude, (1,), 0, self._values | given)

    def _row_means(self, g: Tensor) -> Tensor:
        """Return means of G² over rows that no program has to itself."""
        p, q = self.layout.axes
        means: Tensor = torch.linalg.vector_norm(g, dim=q, dtype=torch.float32).square() / self.layout.m
        return means.movedim(p - (q < p), -1).contiguous()

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.x.device)


def _is_aligned(g: Tensor) -> bool:
    return g.data_ptr() % ALIGNMENT == 0


def _matters(name: str, value: Any) -> bool:
    return name.isupper() or value is None or isinstance(value, Tensor)
