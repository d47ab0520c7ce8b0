"""Parameters of one kind, described to the compiled loops: a table with a row, a *job*, for each."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adafactor.core.bucket import Parameter
from adafactor.core.rounding import keys, roots
from adafactor.core.settings import Settings
from adafactor.core.step import Update, not_finite
from adafactor.kernels.cpu import native
from adafactor.kernels.memory_order import MemoryOrder, find_memory_order, numbering

ESTIMATORS = {"outer": native.OUTER, "row": native.ROW, "column": native.COLUMN, "full": native.FULL}
SWAPPED = {native.OUTER: native.OUTER, native.ROW: native.COLUMN, native.COLUMN: native.ROW}
ROUNDINGS = {"nearest": native.NEAREST, "stochastic": native.STOCHASTIC, "kahan": native.KAHAN}
MOMENTA = {"update": native.OF_UPDATE, "gradient": native.OF_GRADIENT}
FULL_PRECISION = (
    torch.float32,
    torch.float64,
)  # stored as computed: ΣX² of what was computed is that of what is stored


class Executor:
    """The table of some parameters whose X and G have the same dtypes, made once and used for many steps.

    Unsharded, a step is one call of `native.walk`. Where a bad gradient shall raise, it stops after the first walk to
    look; where parameters are sharded, it stops twice to let other ranks complete the sums.
    """

    scaling: tuple[Tensor, Tensor] | None = None  # it wants unscaled gradients

    def __init__(
        self, parameters: list[Parameter], dtypes: tuple[torch.dtype, torch.dtype], sharded: bool, raises: bool
    ):
        """Describe what does not change from step to step."""
        self.parameters = sorted(parameters, key=lambda parameter: -parameter.x.numel())  # large ones go first
        self.together, self.at_once, self.sharded, self.raises = (
            sharded or raises,
            not (sharded or raises),
            sharded,
            raises,
        )
        self.updates: list[Update] = []
        self.kind = native.KINDS[dtypes]
        native.ready(self.kind)
        self.orders = [_order(parameter) for parameter in self.parameters]
        self.jobs = native.new_jobs(len(self.parameters))
        self.where = native.address_of(self.jobs)
        self.rates = [self.jobs[name] for name in ("beta2", "w1", "w2", "rho", "decay")]
        self.kept: list[Any] = []  # memory that jobs refer to by its address
        for job, parameter, order in zip(self.jobs, self.parameters, self.orders, strict=True):
            self._describe(job, parameter, order)
        self.scratch = None
        if self.together:
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
        self._complete_means: list[Tensor] = []  # that jobs refer to in this step

    def begin(self, grads: list[Tensor | None], settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Describe what is of this step: G, the rates, the random numbers."""
        jobs = self.jobs
        present = [g for g in grads if g is not None]
        if len(present) == len(grads):
            jobs["present"], jobs["g"] = 1, list(map(Tensor.data_ptr, present))
        else:
            jobs["present"] = [g is not None for g in grads]
            jobs["g"] = [0 if g is None else g.data_ptr() for g in grads]
        jobs["taken"], self._changed = 0, False
        if written is not None:  # ΣX² is of what was there before
            jobs["x2_after"][written] = np.nan
        counts = native.step_counts(jobs, self.where)
        for group, members in self.groups.items():
            self._set_rates(settings[group], members, counts[members])
        for i, root in self.roots.items():
            jobs["key1"][i], jobs["key2"][i] = keys(root, counts[i] + 1)
        if self.sharded:
            self.updates = [
                Update(p, g, beta2=float(job["beta2"]), w1=float(job["w1"]), w2=float(job["w2"]))
                for p, g, job in zip(self.parameters, grads, jobs, strict=True)
                if g is not None
            ]

    def step(self) -> None:
        """Take a whole step."""
        self._changed = True
        native.walk(self.jobs, self.kind, native.MOMENTS, native.END, where=self.where)

    def moments(self) -> None:
        """First walk."""
        self._walk(native.MOMENTS, native.FACTORS)
        for u in self.updates:
            i = self._index(u)
            u.finite, means = bool(np.isfinite(self.jobs["finite"][i])), self._means(i)
            u.rows, u.cols = means.get("row"), means.get("col")

    def admit(self) -> None:
        """Decide which steps are taken, or raise; nothing has been changed so far."""
        for u in self.updates:
            i = self._index(u)
            self.jobs["taken"][i] = u.finite or self.jobs["ignore"][i]
        bad = (self.jobs["taken"] == 0) & (self.jobs["present"] != 0)
        if self.raises and bad.any():
            raise not_finite(self.parameters[int(np.flatnonzero(bad)[0])])
        self.updates = [u for u in self.updates if self.jobs["taken"][self._index(u)]]

    def factors(self) -> None:
        """Hand the completed means back to the loops, which make R, C and 1/√V̂ of them when they go on."""
        for u in self.updates:
            i = self._index(u)
            for mean, complete in zip(map(self._means(i).get, ("row", "col")), (u.rows, u.cols), strict=True):
                if mean is not None and complete is not None:
                    mean.copy_(complete)
            self.jobs["known_mean"][i] = 0
            if u.mean_row is not None:
                order = _without(self.orders[i].order, u.parameter.factoring.col_axis or 0)
                walked = u.mean_row.permute(order).double().contiguous()
                self._complete_means.append(walked)
                self.jobs["known_mean"][i] = walked.data_ptr()

    def energy(self) -> None:
        """Second walk, where sums must be completed before the third; else all that is left is one call."""
        if self.sharded:
            self._changed = True
            self._walk(native.FACTORS, native.CONCLUDE)
            for u in self.updates:
                i = self._index(u)
                u.u2 = float(self.jobs["u2"][i])
                u.x2 = float(self.jobs["x2"][i]) if u.parameter.measures_x else None

    def conclude(self) -> None:
        """Take the completed sums over."""
        for u in self.updates:
            i = self._index(u)
            self.jobs["u2"][i], self.jobs["x2"][i] = u.u2, 0.0 if u.x2 is None else u.x2

    def apply_(self) -> None:
        """All that is left."""
        self._changed = True
        self._walk(native.CONCLUDE if self.sharded else native.FACTORS, native.END)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self.updates, self._complete_means = [], []
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
        """Hand the figures of the steps since the last time to the traces."""
        jobs = self.jobs
        for i in np.flatnonzero((jobs["steps"] != 0) | (jobs["skipped"] != 0)):
            job, trace = jobs[i], self.parameters[i].trace
            if job["steps"]:
                rms_x = float(job["noted_rms_x"]) if job["measures_x"] else None
                figures = float(job["noted_beta2"]), rms_x, float(job["noted_alpha"]), float(job["noted_rms_u"])
                trace.add(*figures, int(job["clipped"]), int(job["steps"]))
            trace.skipped += int(job["skipped"])
        jobs["steps"] = jobs["clipped"] = jobs["skipped"] = 0

    def _walk(self, first: int, last: int) -> None:
        native.walk(self.jobs, self.kind, first, last, self.scratch, self.where)

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
        carries = s.relative and order.can_carry_x2 and not self.sharded
        job["carries_x2"] = carries and parameter.x.dtype in FULL_PRECISION
        if parameter.rounding == "stochastic":
            numbers = numbering(order, tuple(parameter.x.shape), parameter.shape, parameter.offset)
            for name, value in zip(("origin", "nb", "np", "ns", "nq"), numbers or (), strict=True):
                job[name] = value
        if factoring.estimator == "full":
            job["full"] = state["full"].data_ptr()
        else:
            self._describe_factors(job, parameter, order)

    def _describe_factors(self, job: Any, parameter: Parameter, order: MemoryOrder) -> None:
        """Which axes are P and Q of the walk, and where R along P and C along Q are kept."""
        factoring, (first, second) = parameter.factoring, order.axes
        job["n_rows"], job["n_cols"] = factoring.shape[first], factoring.shape[second]
        swapped = first == factoring.col_axis  # P is the paper's column axis
        if swapped:
            job["estimator"], job["swapped"] = SWAPPED[int(job["estimator"])], 1
        for key, gone, field in (("row", second, "row"), ("col", first, "col")):
            name = {"row": "col", "col": "row"}[key] if swapped else key
            if name in parameter.state:
                factor = parameter.state[name]
                job[f"{field}_state"] = factor.data_ptr()
                walked = factor.permute(_without(order.order, gone))
                if not walked.is_contiguous():
                    offsets = _offsets(walked)
                    self.kept.append(offsets)
                    job[f"{field}_offsets"] = offsets.ctypes.data

    def _set_rates(self, settings: Settings, members: Any, counts: Any) -> None:
        """The rates of the parameters of a group; t differs where gradients were missing or not finite."""
        together = bool((counts == counts[0]).all())
        for t in counts[:1].tolist() if together else np.unique(counts).tolist():
            rates, at = settings.rates(t + 1), members if together else members[counts == t]
            for column, rate in zip(self.rates, (*rates, 1 - rates.rho * settings.weight_decay), strict=True):
                column[at] = rate

    def _index(self, u: Update) -> int:
        return next(i for i, parameter in enumerate(self.parameters) if parameter is u.parameter)

    def _means(self, i: int) -> dict[str, Tensor]:
        """The means of a sharded parameter, in the scratch, to be completed by other ranks, in the state's shapes."""
        parameter, order, job = self.parameters[i], self.orders[i], self.jobs[i]
        if parameter.factoring.estimator == "full" or self.scratch is None:
            return {}
        found = {}
        for address, gone in ((job["row"], order.axes[1]), (job["col"], order.axes[0])):
            key = "row" if gone == parameter.factoring.col_axis else "col"
            if key in parameter.state:
                start = (int(address) - self.scratch.data_ptr()) // 8
                sizes = [parameter.x.shape[axis] for axis in order.order if axis != gone]
                walked = _without(order.order, gone)
                vector = self.scratch[start : start + prod(sizes)].view(sizes)
                found[key] = vector.permute([walked.index(axis) for axis in range(len(walked))])
        return found


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
