"""Parameters of one kind, described to the compiled loops: a table with a row, a *job*, for each."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adafactor.core.contract import Gradients, Parameter, Scale, Sums
from adafactor.core.factoring import Factored
from adafactor.core.rounding import keys, roots
from adafactor.core.settings import Settings
from adafactor.kernels.cpu import native
from adafactor.kernels.memory_order import MemoryOrder, find_memory_order, numbering

ESTIMATORS = {"outer": native.OUTER, "row": native.ROW, "column": native.COLUMN, "full": native.FULL}
SWAPPED = {native.OUTER: native.OUTER, native.ROW: native.COLUMN, native.COLUMN: native.ROW}
ROUNDINGS = {"nearest": native.NEAREST, "stochastic": native.STOCHASTIC, "kahan": native.KAHAN}
MOMENTA = {"update": native.OF_UPDATE, "gradient": native.OF_GRADIENT}
# Stored as computed: ΣX² of what was computed is that of what is stored.
FULL_PRECISION = (torch.float32, torch.float64)


class Executor:
    """The table of some parameters whose X and G have the same dtypes, made once and used for many steps.

    Unsharded, a step is one call of `native.run_phases`. Where a bad gradient raises, it stops after the first pass to
    look; where parameters are sharded, it stops twice to let other ranks complete the sums.
    """

    takes_scale = False

    def __init__(self, parameters: list[Parameter], dtypes: tuple[torch.dtype, torch.dtype]):
        """Describe what does not change from step to step."""
        self.parameters = sorted(parameters, key=lambda parameter: -parameter.x.numel())  # large ones go first
        self.in_lockstep = parameters[0].in_lockstep
        self.sums: list[Sums] = []
        self.kind = native.KINDS[dtypes]
        native.ready(self.kind)
        self.orders = [_order(parameter) for parameter in self.parameters]
        self.jobs = native.new_jobs(len(self.parameters))
        self.where = native.address_of(self.jobs)
        self.rates = [self.jobs[name] for name in ("beta2", "w1", "w2", "rho", "decay")]
        self.offsets: list[Any] = []  # memory that jobs refer to by its address
        for job, parameter, order in zip(self.jobs, self.parameters, self.orders, strict=True):
            self._describe(job, parameter, order)
        self.scratch = None
        if self.in_lockstep:
            self.scratch = torch.empty(sum(order.scratch for order in self.orders), dtype=torch.float64, device="cpu")
            native.assign_scratch(self.jobs, self.scratch.numpy())
        self.writable = [parameter.x for parameter in self.parameters if not parameter.x.is_inference()]
        groups: dict[int, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            groups.setdefault(parameter.group, []).append(i)
        self.groups = {group: np.array(members) for group, members in groups.items()}
        self.roots = {
            i: roots(p.settings.seed, p.number) for i, p in enumerate(self.parameters) if p.rounding == "stochastic"
        }
        self._changed = False  # in this step
        self._present: list[int] = []  # the parameters with a gradient in this step
        self._at = native.MOMENTS  # the phase that this step has come to
        self._all: list[Sums] = []  # of all parameters; their tensors are views of what the loops read and write
        if self.in_lockstep:
            described = zip(self.parameters, self.orders, self.jobs, strict=True)
            self._all = [self._sums_of(p, order, job) for p, order, job in described]

    def begin(
        self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None, scale: Scale | None
    ) -> None:
        """Describe what is of this step: G, the rates, the random numbers."""
        jobs = self.jobs
        present = [g for g in grads if g is not None]
        if len(present) == len(grads):
            jobs["present"], jobs["g"] = 1, list(map(Tensor.data_ptr, present))
        else:
            jobs["present"] = [g is not None for g in grads]
            jobs["g"] = [0 if g is None else g.data_ptr() for g in grads]
        jobs["taken"], self._changed, self._at = 0, False, native.MOMENTS
        if written is not None:  # ΣX² is of what was there before
            jobs["x2_after"][written] = np.nan
        counts = native.step_counts(jobs, self.where)
        for group, members in self.groups.items():
            self._set_rates(settings[group], members, counts[members])
        for i, root in self.roots.items():
            jobs["key1"][i], jobs["key2"][i] = keys(root, counts[i] + 1)

    def step(self) -> None:
        """Take a whole step."""
        self._changed = True
        native.run_phases(self.jobs, self.kind, native.MOMENTS, native.END, where=self.where)

    def moments(self) -> None:
        """First pass. The sums are views of the scratch: what other ranks add to them is where the loops read it."""
        self._run_to(native.FACTORS)
        finite = np.isfinite(self.jobs["finite"]).tolist()
        self._present = np.flatnonzero(self.jobs["present"]).tolist()
        self.sums = [self._all[i] for i in self._present]
        for i, one in zip(self._present, self.sums, strict=True):
            one.finite = finite[i]

    def norms(self) -> None:
        """Second pass."""
        self._take()
        self._changed = True
        self._run_to(native.CONCLUDE)
        u2, x2 = self.jobs["u2"].tolist(), self.jobs["x2"].tolist()
        for i, one in zip(self._present, self.sums, strict=True):
            one.u2, one.x2 = u2[i], x2[i]

    def apply_(self) -> None:
        """Run all that is left."""
        if self._at == native.FACTORS:
            self._take()
        else:
            self.jobs["u2"][self._present] = [one.u2 for one in self.sums]
            self.jobs["x2"][self._present] = [one.x2 for one in self.sums]
        self._changed = True
        self._run_to(native.END)

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
        jobs = self.jobs
        for i in np.flatnonzero((jobs["steps"] != 0) | (jobs["skipped"] != 0)):
            job, metrics = jobs[i], self.parameters[i].metrics
            if job["steps"]:
                rms_x = float(job["noted_rms_x"]) if job["measures_x"] else None
                values = float(job["noted_beta2"]), rms_x, float(job["noted_alpha"]), float(job["noted_rms_u"])
                metrics.add(*values, int(job["clipped"]), int(job["steps"]))
            metrics.skipped += int(job["skipped"])
        jobs["steps"] = jobs["clipped"] = jobs["skipped"] = 0

    def _run_to(self, end: int) -> None:
        """Run the compiled phases from where this step has come to."""
        native.run_phases(self.jobs, self.kind, self._at, end, self.scratch, self.where)
        self._at = end

    def _take(self) -> None:
        """Tell the loops which steps are taken."""
        self.jobs["taken"][self._present] = [bool(one.finite) for one in self.sums]

    def _sums_of(self, p: Parameter, order: MemoryOrder, job: Any) -> Sums:
        """The sums of a parameter as views of the scratch, in the state's shapes."""
        sums = Sums(p)
        if p.shard is not None and isinstance(p.factoring, Factored):
            means = self._means(p, order, job)
            sums.rows, sums.cols = means.get("row"), means.get("col")
            if "mean_row" in p.shard.shapes:
                shape, axes = p.shard.shapes["mean_row"], _without(order.order, p.factoring.col_axis)
                in_order = torch.empty([shape[axis] for axis in axes], dtype=torch.float64, device="cpu")
                sums.mean_row = in_order.permute([axes.index(axis) for axis in range(len(axes))])
                job["known_mean"], job["counts_row"] = in_order.data_ptr(), p.shard.counts_row
        return sums

    def _means(self, p: Parameter, order: MemoryOrder, job: Any) -> dict[str, Tensor]:
        """Views of the means of G² + ε₁ in the scratch."""
        assert self.scratch is not None and isinstance(p.factoring, Factored)
        means = {}
        for address, summed in ((job["row"], order.axes[1]), (job["col"], order.axes[0])):
            key = "row" if summed == p.factoring.col_axis else "col"
            if key in p.state:
                start = (int(address) - self.scratch.data_ptr()) // 8
                sizes, axes = [p.x.shape[axis] for axis in order.order if axis != summed], _without(order.order, summed)
                vector = self.scratch[start : start + prod(sizes)].view(sizes)
                means[key] = vector.permute([axes.index(axis) for axis in range(len(axes))])
        return means

    def _describe(self, job: Any, parameter: Parameter, order: MemoryOrder) -> None:
        """Fill in a job, by the names of its fields."""
        s, state, factoring = parameter.settings, parameter.state, parameter.factoring
        for names, values in (
            (("B", "P", "S", "Q", "K"), order.sizes),
            (("xb", "xp", "xs", "gb", "gp", "gs"), order.strides),
            (("rows", "chunks"), (order.rows, order.chunks)),
            (("eps1", "eps2"), s.eps),
        ):
            for name, value in zip(names, values, strict=True):
                job[name] = value
        job["estimator"] = ESTIMATORS[factoring.estimator]
        job["momentum"] = MOMENTA[s.momentum_of] if s.beta1 else native.NONE
        job["rounding"] = ROUNDINGS[parameter.rounding]
        job["relative"], job["measures_x"], job["ignore"] = s.relative, parameter.measures_x, s.on_nonfinite == "ignore"
        job["n_rows"] = job["n_cols"] = 1
        job["clip"], job["count"], job["sign"] = s.clip or 0.0, factoring.count, -1 if s.maximize else 1
        job["x"], job["t"] = parameter.x.data_ptr(), state["step"].data_ptr()
        if s.beta1:
            job["m"] = state["momentum"].data_ptr()
        if parameter.rounding == "kahan":
            job["compensation"] = state["compensation"].data_ptr()
        job["carries_x2"] = parameter.measures_x and order.can_carry_x2 and parameter.x.dtype in FULL_PRECISION
        if parameter.rounding == "stochastic":
            numbers = numbering(order, tuple(parameter.x.shape), parameter.shape, parameter.offset)
            for name, value in zip(("origin", "nb", "np", "ns", "nq"), numbers or (), strict=True):
                job[name] = value
        if isinstance(factoring, Factored):
            self._describe_factors(job, parameter, factoring, order)
        else:
            job["full"] = state["full"].data_ptr()

    def _describe_factors(self, job: Any, parameter: Parameter, factoring: Factored, order: MemoryOrder) -> None:
        """Describe which axes are P and Q, and where R along P and C along Q lie."""
        first, second = order.axes
        job["n_rows"], job["n_cols"] = factoring.shape[first], factoring.shape[second]
        swapped = first == factoring.col_axis  # P is the paper's column axis
        if swapped:
            job["estimator"], job["swapped"] = SWAPPED[int(job["estimator"])], 1
        for key, gone, field in (("row", second, "row"), ("col", first, "col")):
            name = {"row": "col", "col": "row"}[key] if swapped else key
            if name in parameter.state:
                factor = parameter.state[name]
                job[f"{field}_state"] = factor.data_ptr()
                in_order = factor.permute(_without(order.order, gone))
                if not in_order.is_contiguous():
                    offsets = _offsets(in_order)
                    self.offsets.append(offsets)
                    job[f"{field}_offsets"] = offsets.ctypes.data

    def _set_rates(self, settings: Settings, members: Any, counts: Any) -> None:
        """The rates of the parameters of a group; t differs where gradients were missing or not finite."""
        together = bool((counts == counts[0]).all())
        for t in counts[:1].tolist() if together else np.unique(counts).tolist():
            rates, at = settings.rates(t + 1), members if together else members[counts == t]
            for column, rate in zip(self.rates, (*rates, 1 - rates.rho * settings.weight_decay), strict=True):
                column[at] = rate


def _order(parameter: Parameter) -> MemoryOrder:
    order = find_memory_order(parameter)
    assert isinstance(order, MemoryOrder)
    return order


def _without(order: tuple[int, ...], gone: int) -> list[int]:
    """The order of the axes that are left when one is gone, numbered anew."""
    return [axis - (axis > gone) for axis in order if axis != gone]


def _offsets(t: Tensor) -> Any:
    """Where each element of a tensor, row by row, lies in its memory."""
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(t.shape, t.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return offsets.reshape(-1).numpy()
