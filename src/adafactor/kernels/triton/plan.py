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
from adafactor.kernels.triton.layout import layout_of, line_of, tiling
from adafactor.kernels.triton.unfactored import full_sums, small_step

TILE = 2048  # elements that a program of the last pass takes at a time
SHARED_MEMORY = 96 * 2**10  # bytes of a program; the smallest cards have 99 KB


class Plan:
    """A parameter, its launches and its scratch. Column sums are taken anew in each step, all else stays."""

    def __init__(self, parameter: Parameter, fields: Tensor):
        """Prepare; `fields` is the parameter's row of the executor's table."""
        self.parameter, self.layout, self.x = parameter, layout_of(parameter), parameter.x
        self.is_factored = isinstance(parameter.factoring, Factored)
        b, n, m = self.layout[:3]
        line = line_of(m)
        rows = TILE // line
        groups = min(8, -(-n // rows)) if not self.is_factored or n >= 8 * rows else 1
        tiles, lines = -(-n // (groups * rows)), -(-m // line) if self.is_factored else 1
        programs = b * tiles * lines
        self.x2, self.completed = self._zeros(programs), fields[f.FINITE.value : f.X2.value + 1]  # of a shard
        self._values = self._describe() | {
            "n": n, "m": m, "matrices": b, "groups": groups, "tiles": tiles, "lines": lines, "ROWS": rows, "LINE": line,
            "x2_ptr": self.x2, "fields_ptr": fields,
        }  # fmt: skip
        self._small: Launch | None = None
        units, blocks = self._plan_factored() if self.is_factored else self._plan_unfactored(programs)
        ends: dict[str, Any] = {"units": units, "blocks": blocks, "tiles": programs}
        if parameter.shard is not None:  # the three numbers that the ranks complete, in place of all programs' sums
            pointers = fields[f.FINITE.value - f.PROBE.value :], fields[f.U2.value :], fields[f.X2.value :]
            ends = dict.fromkeys(ends, 1) | dict(zip(("unit_sums_ptr", "u2_ptr", "x2_ptr"), pointers, strict=True))
        self._conclude = Launch(conclude, (1,), 0, self._values | ends)
        self._last = Launch(last_pass, (programs,), 1, self._values)
        self.measure = Launch(squares, (programs,), 0, self._values)  # ΣX², where the last step has left another

    def step(self, g: Tensor) -> None:
        """Take it from G to X."""
        if self._small is not None:
            self._small(g)
        else:
            self.moments(g)
            self.apply_(g)

    def moments(self, g: Tensor) -> None:
        """Read G: R, C (of a shard, what is here of its means) and ΣU²."""
        if not self.is_factored:
            self._first(g)
            return
        column_sums = torch.empty(self._scratch, dtype=torch.float32, device=g.device)
        self._first(g, column_sums)
        self._fold(column_sums)

    def probe(self) -> Tensor:
        """Return a number that is finite if G² is."""
        return self._unit_sums[f.PROBE.value :: f.SUMS.value].sum()

    def sums(self, finite: Tensor) -> Sums:
        """Return what other ranks have a share in and complete: means over the rows of G² + ε₁, and mean(R)."""
        one, shard, (gone, own) = Sums(self.parameter, finite), self.parameter.shard, self.layout.axes
        if shard is not None and "cols" in shard.partial:
            stack = [length for axis, length in enumerate(self.x.shape) if axis not in self.layout.axes]
            one.cols = self._means[0].view(*stack, self.layout.m).movedim(-1, own - (gone < own)).unsqueeze(gone)
        if shard is not None and "mean_row" in shard.partial:
            one.mean_row = self._mean_row.view(shard.shapes["mean_row"])
        return one

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return ΣU² and ΣX² of what is here of a shard, with C from the completed means."""
        if self.is_factored:
            self._average(None)
        return self._u2.sum(), self.x2.sum()

    def apply_(self, g: Tensor) -> None:
        """Find the scalars; then read G again and write X."""
        self._conclude()
        self._last(g)

    def _describe(self) -> dict[str, Any]:
        """Name the tensors that stay where they are, their strides, and what the settings say but for the rates."""
        p, s, state, layout = self.parameter, self.parameter.settings, self.parameter.state, self.layout
        m = momentum.buffer(state) if s.beta1 else None
        return {
            "x_ptr": p.x, "full_ptr": state.get("full"), "momentum_ptr": m, "step_ptr": state["step"],
            "row_ptr": state.get(layout.names[0]), "col_ptr": state.get(layout.names[1]),
            "scale_ptr": None if m is None else state.get("momentum_scale"),
            "compensation_ptr": state["compensation"] if p.rounding == "kahan" else None,
            "new_row_ptr": None, "new_col_ptr": None, "mean_row_ptr": None,
            "x_strides": layout.x, "g_strides": layout.g, "row_strides": layout.row, "col_strides": layout.col,
            "scale_strides": layout.scale, "number": layout.number, "number_strides": layout.numbers,
            "count": p.factoring.count, "eps1": s.eps[0], "eps2": s.eps[1], "clip": s.clip,
            "RELATIVE": s.relative, "BY_ALPHA": s.weight_decay_by == "alpha", "SIGN": -1 if s.maximize else 1,
            "IGNORES": s.on_nonfinite == "ignore", "FLAT": not self.is_factored, "RANDOM": p.rounding == "stochastic",
            "RANDOM_MOMENTUM": m is not None and m.dtype != torch.float32,
            "AFTER": bool(s.beta1) and s.momentum_of == "direction",
        }  # fmt: skip

    def _plan_factored(self) -> tuple[int, int]:
        """Prepare what comes before `conclude`; return how many units and blocks of columns leave sums for it."""
        g, (b, n, m), is_whole = self.layout.g, self.layout[:3], self.parameter.shard is None
        t = tiling(b, n, m)
        units, blocks, self._scratch = b * t.units, b * -(-m // COLUMNS.value), 2 * b * t.units * m
        self._unit_sums, self._u2, self._mean_row = map(self._zeros, (units * f.SUMS.value, blocks, b))
        self._means = self._zeros(0 if is_whole else 2 * b * m).view(2, -1, m)
        rows, cols = (torch.empty(b * k, dtype=torch.float32, device=self.x.device) for k in (n, m))
        ahead = 2 * t.rows * t.chunk * t.chunks * self.parameter.gradient.dtype.itemsize  # bytes of three stages
        is_even = g.col == 1 and m % 16 == g.row % 16 == g.stack % 16 == 0  # a thread can load 16 bytes at once
        self._values |= {
            "new_row_ptr": rows, "new_col_ptr": cols, "unit_sums_ptr": self._unit_sums, "u2_ptr": self._u2,
            "mean_row_ptr": self._mean_row, "means_ptr": None if is_whole else self._means,
            "whole_n": self.parameter.shape[self.layout.axes[0]], "unit": t.unit, "units": t.units,
        }  # fmt: skip
        held = {"ROWS": t.rows, "CHUNK": t.chunk, "CHUNKS": t.chunks, "STAGES": 3 if ahead < SHARED_MEMORY else 2}
        # else a thread has half as many, but never so many threads that there are not 128 registers for each
        held, warps = (held, t.warps) if is_even else (held | {"STAGES": 1}, min(16, 2 * t.warps))
        self._first = Launch(first_pass, (b, t.units), 2, self._values | held, num_warps=warps, **AT_MOST)
        self._fold = Launch(columns, (blocks,), 1, self._values | {"FOLDS": True, "AVERAGES": is_whole})
        self._average = Launch(columns, (blocks,), 1, self._values | {"FOLDS": False, "AVERAGES": True})
        return units, blocks

    def _plan_unfactored(self, programs: int) -> tuple[int, int]:
        """Prepare the same, and where the tensor is one tile, a launch that takes the whole step."""
        self._unit_sums, self._u2 = self._zeros(programs * f.SUMS.value), self._zeros(programs)
        self._values |= {"unit_sums_ptr": self._unit_sums, "u2_ptr": self._u2}
        self._first = Launch(full_sums, (programs,), 1, self._values)
        if programs == 1 and not self.parameter.in_lockstep:
            self._small = Launch(small_step, (1,), 1, self._values)
        return programs, programs

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.x.device)
