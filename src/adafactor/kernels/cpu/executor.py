"""Parameters of one kind, described to the compiled loops: a table with a row, a *job*, for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.factoring import Factored
from adafactor.core.momentum import blocks_of, buffer
from adafactor.core.rounding import keys, roots
from adafactor.core.settings import Settings
from adafactor.kernels.cpu import blocks, native
from adafactor.kernels.cpu.native import jobs, parts
from adafactor.kernels.memory_order import (
    MemoryOrder,
    draws_words,
    find_memory_order,
    has_rounded_momentum,
    numbering,
)

ESTIMATORS = {"outer": jobs.OUTER, "row": jobs.ROW, "column": jobs.COLUMN, "full": jobs.FULL}
SWAPPED = {jobs.OUTER: jobs.OUTER, jobs.ROW: jobs.COLUMN, jobs.COLUMN: jobs.ROW}
ROUNDINGS = {"nearest": jobs.NEAREST, "stochastic": jobs.STOCHASTIC, "kahan": jobs.KAHAN}
MOMENTA = {"update": jobs.OF_UPDATE, "gradient": jobs.OF_GRADIENT, "direction": jobs.OF_DIRECTION}
# Stored as computed: ΣX² of what was computed is that of what is stored.
FULL_PRECISION = (torch.float32, torch.float64)


class Executor:
    """The table of some parameters whose X and G have the same dtypes, made once and used for many steps.

    Unsharded, a step is one call of `native.run_phases`. Where a bad gradient raises, it stops after the first pass to
    look; where parameters are sharded, it stops twice to let other ranks complete the sums.
    """

    def __init__(self, parameters: list[Parameter], dtypes: tuple[torch.dtype, torch.dtype]):
        """Describe what does not change from step to step."""
        self.parameters = sorted(parameters, key=lambda parameter: -parameter.x.numel())  # large ones go first
        self.in_lockstep = parameters[0].in_lockstep
        self.sums: list[Sums] = []
        self.jobs = jobs.new_jobs(len(self.parameters))
        self.where = self.jobs.ctypes.data
        self.rates = [self.jobs[name] for name in ("beta2", "w1", "w2", "rho", "share")]
        self.tables: list[Any] = []  # memory that jobs refer to by its address
        orders = [_order(parameter) for parameter in self.parameters]
        described = list(zip(self.jobs, self.parameters, orders, strict=True))
        for job, parameter, order in described:
            self._describe(job, parameter, order)
        parts.assign(self.jobs, *dtypes)
        self.scratch: Tensor | None = None  # where something happens between the phases; else each step has its own
        self._all: list[Sums] = []  # of all parameters; their tensors are views of what the loops read and write
        if self.in_lockstep:
            starts = [0, *accumulate(order.scratch for order in orders)]  # in doubles
            self.scratch = torch.empty(starts[-1], dtype=torch.float64, device="cpu")
            self.jobs["scratch"] = [self.scratch.data_ptr() + 8 * start for start in starts[:-1]]
            self._all = [self._sums_of(*one) for one in described]
        self.writable = [parameter.x for parameter in self.parameters if not parameter.x.is_inference()]
        groups: dict[int, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            groups.setdefault(parameter.group, []).append(i)
        self.groups = {group: np.array(members) for group, members in groups.items()}
        self.roots = {i: roots(p.settings.seed, p.number) for i, p in enumerate(self.parameters) if draws_words(p)}
        self._changed = False  # in this step
        self._present: list[int] = []  # the parameters with a gradient in this step
        self._at = jobs.MOMENTS  # the phase that this step has come to

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Describe what is of this step: G, the rates, the random numbers."""
        table = self.jobs
        present = [g for g in grads if g is not None]
        if len(present) == len(grads):
            table["present"], table["g"] = 1, list(map(Tensor.data_ptr, present))
        else:
            table["present"] = [g is not None for g in grads]
            table["g"] = [0 if g is None else g.data_ptr() for g in grads]
        table["taken"], self._changed, self._at = 0, False, jobs.MOMENTS
        if written is not None:  # ΣX² is of what was there before
            table["x2_after"][written] = np.nan
        counts = native.step_counts(table, self.where)
        for group, members in self.groups.items():
            self._set_rates(settings[group], members, counts[members])
        for i, root in self.roots.items():
            table["key1"][i], table["key2"][i] = keys(root, counts[i] + 1)

    def step(self) -> None:
        """Take a whole step."""
        self._changed = True
        native.run_phases(self.jobs, self.where, jobs.MOMENTS, jobs.END)

    def moments(self) -> None:
        """First pass. The sums are views of the scratch: what other ranks add to them is where the loops read it."""
        self._run_to(jobs.FACTORS)
        finite = np.isfinite(self.jobs["finite"]).tolist()
        self._present = np.flatnonzero(self.jobs["present"]).tolist()
        self.sums = [self._all[i] for i in self._present]
        for i, one in zip(self._present, self.sums, strict=True):
            one.finite = finite[i]

    def norms(self) -> None:
        """Second pass."""
        self._take()
        self._changed = True
        self._run_to(jobs.CONCLUDE)
        u2, x2 = self.jobs["u2"].tolist(), self.jobs["x2"].tolist()
        for i, one in zip(self._present, self.sums, strict=True):
            one.u2, one.x2 = u2[i], x2[i]

    def apply_(self) -> None:
        """Run all that is left."""
        if self._at == jobs.FACTORS:
            self._take()
        else:
            self.jobs["u2"][self._present] = [one.u2 for one in self.sums]
            self.jobs["x2"][self._present] = [one.x2 for one in self.sums]
        self._changed = True
        self._run_to(jobs.END)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self.sums = []
        if not self._changed:
            return []
        present, taken = self.jobs["present"] != 0, self.jobs["taken"] != 0
        if taken.all():
            torch.autograd.graph.increment_version(self.writable)
            return []
        written = [self.parameters[i].x for i in np.flatnonzero(taken)]
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
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

    def _run_to(self, end: int) -> None:
        """Run the compiled phases from where this step has come to."""
        native.run_phases(self.jobs, self.where, self._at, end, self.scratch)
        self._at = end

    def _take(self) -> None:
        """Tell the loops which steps are taken."""
        self.jobs["taken"][self._present] = [bool(one.finite) for one in self.sums]

    def _sums_of(self, job: Any, p: Parameter, order: MemoryOrder) -> Sums:
        """The sums of a parameter as views of the scratch, in the state's shapes."""
        sums = Sums(p)
        if p.shard is not None and isinstance(p.factoring, Factored):
            means = self._means(job, p, order)
            sums.rows, sums.cols = means.get("row"), means.get("col")
            if "mean_row" in p.shard.shapes:
                shape = p.shard.shapes["mean_row"]
                in_order = torch.empty([shape[axis] for axis in order.order], dtype=torch.float64, device="cpu")
                sums.mean_row = _as_x(in_order, order)
                job["known_mean"], job["counts_row"] = in_order.data_ptr(), p.shard.counts_row
        return sums

    def _means(self, job: Any, p: Parameter, order: MemoryOrder) -> dict[str, Tensor]:
        """Views of the means of G² + ε₁ in the scratch."""
        assert self.scratch is not None and isinstance(p.factoring, Factored)
        means = {}
        for field, key, summed in _factors(p.factoring, order):
            if key in p.state:
                start = (int(job["scratch"] + job[field]) - self.scratch.data_ptr()) // 8
                sizes = [1 if axis == summed else p.x.shape[axis] for axis in order.order]
                means[key] = _as_x(self.scratch[start : start + prod(sizes)].view(sizes), order)
        return means

    def _describe(self, job: Any, parameter: Parameter, order: MemoryOrder) -> None:
        """Fill in a job, by the names of its fields."""
        s, state, factoring = parameter.settings, parameter.state, parameter.factoring
        jobs.lay_out(job, order)
        job["eps1"], job["eps2"] = s.eps
        job["estimator"] = ESTIMATORS[factoring.estimator]
        job["momentum"] = MOMENTA[s.momentum_of] if s.beta1 else jobs.NONE
        job["rounding"] = ROUNDINGS[parameter.rounding]
        job["relative"], job["measures_x"], job["ignore"] = s.relative, parameter.measures_x, s.on_nonfinite == "ignore"
        job["n_rows"] = job["n_cols"] = 1
        job["clip"], job["count"], job["sign"] = s.clip or 0.0, factoring.count, -1 if s.maximize else 1
        job["x"], job["t"] = parameter.x.data_ptr(), state["step"].data_ptr()
        job["decays_by_alpha"] = s.weight_decay_by == "alpha"
        if parameter.rounding == "kahan":
            job["compensation"] = state["compensation"].data_ptr()
        if blocks.are_elsewhere(parameter, order):
            self.tables += blocks.lay_out(job, parameter, order)
        else:
            job["carries_x2"] = parameter.measures_x and order.can_carry_x2 and parameter.x.dtype in FULL_PRECISION
            numbers = numbering(order, tuple(parameter.x.shape), parameter.shape, parameter.offset)
            for name, value in zip(("origin", "nb", "np", "ns", "nq"), numbers or (), strict=False):
                job[name] = value
        if s.beta1:
            self._describe_momentum(job, parameter)
        if isinstance(factoring, Factored):
            self._describe_factors(job, parameter, factoring, order)
        else:
            job["full"] = state["full"].data_ptr()

    def _describe_momentum(self, job: Any, parameter: Parameter) -> None:
        """Describe how the momentum is stored."""
        s, state, in_blocks = parameter.settings, parameter.state, blocks_of(parameter.factoring, parameter.settings)
        m = buffer(state)
        assert m is not None
        job["m"] = m.data_ptr()
        if in_blocks is not None:
            job["m_scales"] = state["momentum_scale"].data_ptr()
            job["momentum_format"] = jobs.INT8
            if not job["blocks"]:
                job["block_line"] = prod(parameter.x.shape[in_blocks.axis :])
                job["block"] = in_blocks.length * job["block_line"] // parameter.x.shape[in_blocks.axis]
                job["stretch"] = job["room"] = job["block"]
        elif m.dtype == torch.bfloat16:
            job["momentum_format"] = jobs.BFLOAT16
            job["stretch"] = job["room"] if s.momentum_of == "gradient" else job["stretch"]
        job["rounds_momentum_at_random"] = has_rounded_momentum(parameter)

    def _describe_factors(self, job: Any, parameter: Parameter, factoring: Factored, order: MemoryOrder) -> None:
        """Describe which axes are P and Q, and where R along P and C along Q lie."""
        first, second = order.axes
        job["n_rows"], job["n_cols"] = factoring.shape[first], factoring.shape[second]
        if first == factoring.col_axis:  # P is the paper's column axis
            job["estimator"], job["swapped"] = SWAPPED[int(job["estimator"])], 1
        for field, key, _ in _factors(factoring, order):
            if key in parameter.state:
                factor = parameter.state[key]
                job[f"{field}_state"] = factor.data_ptr()
                in_order = factor.permute(order.order)
                if not in_order.is_contiguous():
                    offsets = blocks.offsets_of(in_order.shape, in_order.stride())
                    self.tables.append(offsets)
                    job[f"{field}_offsets"] = offsets.ctypes.data

    def _set_rates(self, settings: Settings, members: Any, counts: Any) -> None:
        """The rates of the parameters of a group; t differs where gradients were missing or not finite."""
        together = bool((counts == counts[0]).all())
        for t in counts[:1].tolist() if together else np.unique(counts).tolist():
            rates, at = settings.rates(t + 1), members if together else members[counts == t]
            for column, rate in zip(self.rates, rates, strict=True):
                column[at] = rate


def _order(parameter: Parameter) -> MemoryOrder:
    order = find_memory_order(parameter)
    assert isinstance(order, MemoryOrder)
    return order


def _factors(factoring: Factored, order: MemoryOrder) -> Iterator[tuple[str, str, int]]:
    """The fields of a job for R along P and C along Q, which factors of the state these are, the axes summed over."""
    for field, summed in zip(("row", "col"), reversed(order.axes), strict=True):
        yield field, "row" if summed == factoring.col_axis else "col", summed


def _as_x(in_order: Tensor, order: MemoryOrder) -> Tensor:
    """A tensor whose axes are in the order of memory, with the axes of X."""
    return in_order.permute([order.order.index(axis) for axis in range(in_order.dim())])
