"""Parameters described to the compiled library: a table with a row, a *job*, for each."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.factoring import Factored
from adafactor.core.momentum import buffer
from adafactor.core.rounding import keys, roots
from adafactor.core.settings import Settings
from adafactor.kernels.cpu.layout import (
    TYPES,
    Layout,
    block_of,
    find_layout,
    numbers_of,
    offsets_of,
    rounds_momentum,
)
from adafactor.kernels.cpu.library import CACHE_LINE, library
from adafactor.kernels.cpu.threads import parallel_loops

ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}
FORMATS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 3}  # of a momentum
MOMENTA = {"update": 0, "gradient": 1, "direction": 2}
RATES = "beta2", "w1", "w2", "rho", "share"
MOMENTS, NORMS, APPLY = range(3)


class Executor:
    """The table of some parameters, made once and used for many steps.

    Unsharded, a step is one call of the library. Where a bad gradient raises, it stops after the first pass to look;
    where parameters are sharded, it stops twice to let other ranks complete the sums.
    """

    def __init__(self, parameters: list[Parameter]):
        """Describe what does not change from step to step."""
        self.parameters = sorted(parameters, key=lambda parameter: -parameter.x.numel())  # large ones go first
        self.in_lockstep = parameters[0].in_lockstep
        self.sums: list[Sums] = []
        self.library = library()
        self.jobs = np.zeros(len(self.parameters), self.library.job)
        self.where = self.jobs.ctypes.data
        self.rates = [self.jobs[name] for name in RATES]
        self.tables: list[Tensor] = []  # memory that jobs refer to by its address
        self.mean_rows: dict[int, Tensor] = {}  # what other ranks complete, by the number of the job
        layouts = [_layout_of(parameter) for parameter in self.parameters]
        for job, parameter, layout in zip(self.jobs, self.parameters, layouts, strict=True):
            self._describe(job, parameter, layout)
        self._all: list[Sums] = []  # of all parameters; their tensors are views of what the library reads and writes
        if self.in_lockstep:
            self._all = [self._place(i, layout) for i, layout in enumerate(layouts)]
        self.writable = [parameter.x for parameter in self.parameters]
        groups: dict[int, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            groups.setdefault(parameter.group, []).append(i)
        self.groups = {group: np.array(members) for group, members in groups.items()}
        self.roots = {
            i: roots(p.settings.seed, p.number)
            for i, p in enumerate(self.parameters)
            if p.rounding == "stochastic" or rounds_momentum(p)
        }
        self._present: list[int] = []  # the parameters with a gradient in this step
        self._at, self._changed = MOMENTS, False  # the phase that this step has come to; whether it has written

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Describe what is of this step: G, the rates, the random numbers."""
        table = self.jobs
        table["present"] = [g is not None for g in grads]
        table["g"] = [0 if g is None else g.data_ptr() for g in grads]
        table["taken"], self._at, self._changed = 0, MOMENTS, False
        if written is not None:  # ΣX² is of what was there before
            table["x2_after"][written] = np.nan
        counts = np.empty(len(table))
        self.library.counts(self.where, len(table), counts.ctypes.data)
        for group, members in self.groups.items():
            self._set_rates(settings[group], members, counts[members])
        for i, root in self.roots.items():
            table["key1"][i], table["key2"][i] = keys(root, counts[i] + 1)

    def step(self) -> None:
        """Take a whole step."""
        self._run(MOMENTS, APPLY)

    def moments(self) -> None:
        """First pass. The sums are views of the scratch: what other ranks add to them is where the library reads it."""
        self._run(MOMENTS, MOMENTS)
        self._present = np.flatnonzero(self.jobs["present"]).tolist()
        self.sums = [self._all[i] for i in self._present]
        for i, one in zip(self._present, self.sums, strict=True):
            one.finite = bool(self.jobs["finite"][i])
            if (shard := one.parameter.shard) is not None:  # this rank's part, where no rank has R whole
                beta2, w2 = float(self.jobs["beta2"][i]), float(self.jobs["w2"][i])
                one.mean_row = shard.mean_row(one.rows, one.parameter.state.get("row"), beta2, w2)

    def norms(self) -> None:
        """Second pass."""
        self._take()
        for i, one in zip(self._present, self.sums, strict=True):
            if one.mean_row is not None:
                self.mean_rows[i].copy_(one.mean_row)
        self._run(NORMS, NORMS)
        u2, x2 = self.jobs["u2"].tolist(), self.jobs["x2"].tolist()
        for i, one in zip(self._present, self.sums, strict=True):
            one.u2, one.x2 = u2[i], x2[i]

    def apply_(self) -> None:
        """Run all that is left."""
        if self._at == MOMENTS:
            self._take()
            self._run(NORMS, APPLY)
            return
        self.jobs["u2"][self._present] = [one.u2 for one in self.sums]
        self.jobs["x2"][self._present] = [one.x2 for one in self.sums]
        self._run(APPLY, APPLY)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self.sums = []
        if not self._changed:
            return []
        present, taken = self.jobs["present"] != 0, self.jobs["taken"] != 0
        if taken.all():
            torch.autograd.graph.increment_version(self.writable)
            return []
        torch.autograd.graph.increment_version([self.writable[i] for i in np.flatnonzero(taken)])
        return [self.parameters[i] for i in np.flatnonzero(present & ~taken)]

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to the parameters."""
        table = self.jobs
        for i in np.flatnonzero((table["steps"] != 0) | (table["skipped"] != 0)):
            job, metrics = table[i], self.parameters[i].metrics
            if job["steps"]:
                rms_x = float(job["rms_x"]) if job["measures_x"] else None
                values = float(job["beta2_taken"]), rms_x, float(job["alpha"]), float(job["rms_u"])
                metrics.add(*values, int(job["clipped"]), int(job["steps"]))
            metrics.skipped += int(job["skipped"])
        table["steps"] = table["clipped"] = table["skipped"] = 0

    def _run(self, first: int, last: int) -> None:
        """Run the phases from `first` to `last` on torch's threads."""
        self._at, self._changed = last, last == APPLY
        threads, count = torch.get_num_threads(), len(self.jobs)
        size = self.library.memory(self.where, count, threads, first, last)
        memory = _aligned(size)
        self.library.run(self.where, count, memory.data_ptr(), threads, first, last, *parallel_loops())

    def _take(self) -> None:
        """Tell the library which steps are taken."""
        self.jobs["taken"][self._present] = [bool(one.finite) for one in self.sums]

    def _set_rates(self, settings: Settings, members: Any, counts: Any) -> None:
        """The rates of the parameters of a group; t differs where gradients were missing or not finite."""
        together = bool((counts == counts[0]).all())
        for t in counts[:1].tolist() if together else np.unique(counts).tolist():
            rates, at = settings.rates(t + 1), members if together else members[counts == t]
            for column, rate in zip(self.rates, rates, strict=True):
                column[at] = rate

    def _describe(self, job: Any, parameter: Parameter, layout: Layout) -> None:
        """Fill in a job, by the names of its fields."""
        s, state, factoring, x = parameter.settings, parameter.state, parameter.factoring, parameter.x
        job["batch"], job["rows"], job["parts"], job["cols"] = layout.batch, layout.rows, layout.parts, layout.cols
        job["period"], job["swapped"], job["factored"] = layout.period, layout.swapped, isinstance(factoring, Factored)
        job["x_type"], job["g_type"] = TYPES[x.dtype], TYPES[parameter.gradient.dtype]
        job["rounding"], job["relative"] = ROUNDINGS[parameter.rounding], s.relative
        job["measures_x"], job["x2_after"] = parameter.measures_x, np.nan
        job["decays_by_alpha"], job["ignores_nonfinite"] = s.weight_decay_by == "alpha", s.on_nonfinite == "ignore"
        job["n_rows"], job["n_cols"], job["count"] = 1, 1, factoring.count
        job["clip"], job["sign"] = s.clip or 0.0, -1 if s.maximize else 1
        job["eps1"], job["eps2"] = s.eps
        job["x"], job["t"] = x.data_ptr(), state["step"].data_ptr()
        numbers = numbers_of(parameter, layout) or (0, 0, 0, 0)
        job["origin"], job["number_batch"], job["number_rows"], job["number_parts"] = numbers
        if parameter.rounding == "kahan":
            job["compensation"] = state["compensation"].data_ptr()
        if isinstance(factoring, Factored):
            self._describe_factors(job, parameter, factoring, layout)
        else:
            job["full"] = state["full"].data_ptr()
        momentum = buffer(state) if s.beta1 else None
        if momentum is not None:
            job["momentum"], job["momentum_of"] = FORMATS[momentum.dtype], MOMENTA[s.momentum_of]
            job["m"], job["block"] = momentum.data_ptr(), block_of(parameter)
            if momentum.dtype == torch.int8:
                job["m_scales"] = state["momentum_scale"].data_ptr()
        averages_g = momentum is not None and s.momentum_of == "gradient"
        job["needs_second_pass"] = averages_g or _has_partial_rows(parameter, layout)

    def _describe_factors(self, job: Any, parameter: Parameter, factoring: Factored, layout: Layout) -> None:
        """Describe R along the rows of memory and C along its lines, whatever the paper calls them."""
        axes = factoring.row_axis, factoring.col_axis
        along_rows, along_lines = reversed(axes) if layout.swapped else axes
        job["n_rows"], job["n_cols"] = factoring.shape[along_rows], factoring.shape[along_lines]
        for field, key in zip(("row", "col"), _keys(layout), strict=True):
            if key in parameter.state:
                factor = parameter.state[key]
                job[field] = factor.data_ptr()
                if (offsets := offsets_of(factor, layout)) is not None:
                    self.tables.append(offsets)
                    job[f"{field}_offsets"] = offsets.data_ptr()

    def _place(self, i: int, layout: Layout) -> Sums:
        """Give a job scratch of its own; return its sums as views of that, in the state's shapes."""
        job, parameter = self.jobs[i], self.parameters[i]
        where = self.where + i * self.jobs.itemsize
        scratch = _aligned(self.library.scratch(where))
        self.tables.append(scratch)
        self.library.place(where, scratch.data_ptr())
        sums, factoring, shard = Sums(parameter), parameter.factoring, parameter.shard
        if shard is None or not isinstance(factoring, Factored):
            return sums
        means = {}
        for field, key in zip(
            ("row_sums", "col_sums"), ("col", "row") if layout.swapped else ("row", "col"), strict=True
        ):
            if key in parameter.state:
                shape = [1 if axis == factoring.summed_axis(key) else parameter.x.shape[axis] for axis in layout.order]
                start = int(job[field]) - scratch.data_ptr()
                view = scratch[start : start + 8 * prod(shape)].view(torch.float64).view(shape)
                means[key] = _as_x(view, layout)
        sums.rows, sums.cols = means.get("row"), means.get("col")
        if "mean_row" in shard.shapes:
            shape = [shard.shapes["mean_row"][axis] for axis in layout.order]
            in_order = torch.empty(shape, dtype=torch.float64, device="cpu")
            self.mean_rows[i] = _as_x(in_order, layout)
            job["mean_row"] = in_order.data_ptr()
        return sums


def _layout_of(parameter: Parameter) -> Layout:
    layout = find_layout(parameter)
    assert isinstance(layout, Layout)
    return layout


def _keys(layout: Layout) -> tuple[str, str]:
    """What the state calls R along the rows of memory, and C along its lines."""
    return ("col", "row") if layout.swapped else ("row", "col")


def _has_partial_rows(parameter: Parameter, layout: Layout) -> bool:
    """Whether other ranks have a part in R along the rows of memory, so that the first pass cannot divide by it."""
    return parameter.shard is not None and {"row": "rows", "col": "cols"}[_keys(layout)[0]] in parameter.shard.partial


def _aligned(size: int) -> Tensor:
    """Memory that begins with a cache line."""
    memory = torch.empty(size + CACHE_LINE, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % CACHE_LINE :]


def _as_x(in_order: Tensor, layout: Layout) -> Tensor:
    """A tensor whose axes are in the order of memory, with the axes of X."""
    return in_order.permute([layout.order.index(axis) for axis in range(in_order.dim())])
