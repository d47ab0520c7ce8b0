"""The walks on a CPU through Numba: no tensor-sized temporary, and all tensors in one call.

Here are the tables that describe tensors to the loops in `native`. What these have no path through (`paths.py`:
another device, memory in no order they know) goes to `eager`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adafactor.equations import Scalar
from adafactor.kernels import eager, native, paths
from adafactor.kernels.paths import KINDS, Kind, Path, find_path, numbering
from adafactor.kernels.threads import announced, share_out, together
from adafactor.rounding import keys, roots

if TYPE_CHECKING:
    from adafactor.step import Update

SMALL = 2**20  # elements up to which a tensor is one thread's alone, if there are enough of them for all

NO_BOARD = np.zeros(1, np.int64)

WHOLE = (torch.float32, torch.float64)  # nothing is lost between X as it is computed and X as it is kept
ESTIMATORS = {"outer": native.OUTER, "row": native.ROW, "column": native.COLUMN, "full": native.FULL}
SWAPPED = {native.OUTER: native.OUTER, native.ROW: native.COLUMN, native.COLUMN: native.ROW}
ROUNDINGS = {"nearest": native.NEAREST, "stochastic": native.STOCHASTIC, "kahan": native.KAHAN}
MOMENTA = {"update": native.OF_UPDATE, "gradient": native.OF_GRADIENT}


def whole(bucket: list[Update]) -> tuple[list[Update], list[Update]]:
    """Take whole steps, all in one call; returns those that were left out as non-finite, and those without a path."""
    fleet = next((u.fleet for u in bucket if u.fleet is not None), None)
    if fleet is None or not fleet.is_of(bucket):
        fleet = Fleet(bucket)
    return fleet.step([u.g for u in bucket]), fleet.others


def moments(bucket: list[Update]) -> None:
    """Means of G² + ε₁, and whether G² is finite; for what is kept whole all of ΣU² and ΣX²."""
    for dtypes, pairs in _kinds(bucket).items():
        table = Table(pairs, _kind(*dtypes))
        table.set_out([u.g for u in table.updates])
        table.moments()
    eager.moments(_others(bucket))


def factors(bucket: list[Update]) -> None:
    """Rₜ, Cₜ and the scales that make up 1/√V̂."""
    taken = set(bucket)
    for table in _tables(bucket):
        table.factors(taken)
    eager.factors(_others(bucket))


def energy(bucket: list[Update]) -> None:
    """ΣU² and ΣX²."""
    for table in _tables(bucket):
        table.energy()
    eager.energy(_others(bucket))


def apply_(bucket: list[Update]) -> None:
    """X."""
    for table in _tables(bucket):
        table.apply_()
    eager.apply_(_others(bucket))


def obstacle(u: Update) -> str | None:
    """Why there is no path through a tensor, so that `eager` has to step it."""
    reason = find_path(u) if u.x.numel() else None  # an empty shard is not walked
    return reason if isinstance(reason, str) else None


def _kinds(bucket: list[Update]) -> Kinds:
    """The tensors that there are loops for, by dtype."""
    kinds: Kinds = {}
    for u in bucket:
        path = find_path(u)
        if isinstance(path, Path):
            kinds.setdefault((u.x.dtype, u.g.dtype), []).append((u, path))
    return kinds


def _tables(bucket: list[Update]) -> list[Table]:
    return list(dict.fromkeys(u.work for u in bucket if u.work is not None))


def _others(bucket: list[Update]) -> list[Update]:
    return [u for u in bucket if u.work is None]


@cache
def _kind(x: torch.dtype, g: torch.dtype) -> Kind:
    """The types for the loops, once these are compiled for them or found on disk."""
    kind, none = KINDS[x, g], np.empty(0, native.JOB)
    with announced(f"adafactor: making the loops for {x} ready (compiled once on a machine; it may take minutes) ..."):
        native.walk(none, *kind, NO_BOARD, 0, 0, 0, 0)
        native.fold(none, *kind[1:])
        native.factors(none, kind[2])
        native.gather(none, 0)
        native.furnish(none, 0, np.empty(0), True)
        native.counts(none, np.empty(0))
    return kind


Kinds = dict[tuple[torch.dtype, torch.dtype], list[tuple["Update", "Path"]]]


class Fleet:
    """Tensors that step together, with all that can be known beforehand: what is left to do is little."""

    def __init__(self, bucket: list[Update]):
        """Belong to the updates, and keep the figures of their steps until somebody asks."""
        self.updates, self.forms, kinds = bucket, [u.form for u in bucket], _kinds(bucket)
        self.tables = [Table(pairs, _kind(*dtypes), lasting=True) for dtypes, pairs in kinds.items()]
        for table in self.tables:
            for i, u in enumerate(table.updates):
                u.fleet = self
                u.trace.draw_from(partial(table.tell, i))
        self.others = [u for u in bucket if u.fleet is not self]
        number = {u: i for i, u in enumerate(bucket)}
        self.places = [[number[u] for u in table.updates] for table in self.tables]

    def is_of(self, bucket: list[Update]) -> bool:
        """Are these the same updates, with gradients that lie in memory as the last ones did?"""
        return self.updates == bucket and all(map(operator.is_, self.forms, [u.form for u in bucket]))

    def step(self, grads: list[Tensor]) -> list[Update]:
        """All the walks; returns those that were left out."""
        left_out = []
        for table, places in zip(self.tables, self.places, strict=True):
            left_out += table.step([grads[i] for i in places])
        return left_out


def _alike(updates: list[Update]) -> list[Any]:
    """The places of those that have their settings in common."""
    places: dict[int, list[int]] = {}
    for i, u in enumerate(updates):
        places.setdefault(id(u.settings), []).append(i)
    return [np.array(members) for members in places.values()]


class Table:
    """The jobs of some tensors of one kind."""

    def __init__(self, pairs: list[tuple[Update, Path]], kind: Kind, lasting: bool = False):
        """Describe to the loops what does not change from step to step; a lasting table is kept for the next."""
        if lasting:
            pairs = sorted(pairs, key=lambda pair: -pair[0].x.numel())
        self.updates = [u for u, _ in pairs]
        self.paths = [path for _, path in pairs]
        self.kind, self.lasting = kind, lasting
        self.total = 0
        self.copies: list[tuple[Tensor, Tensor]] = []  # factors in the order of the walk, where theirs is another
        self.means: list[Tensor] = []
        jobs = []
        for u, path in pairs:
            jobs.append(self._job(u, path))
            self.total += u.x.numel()
        self.jobs = np.array(jobs, native.JOB)
        self.sizes = np.array([u.x.numel() for u in self.updates])
        self.counts = np.empty(len(jobs), np.float64)
        self.alike = _alike(self.updates)
        self.written = [u.x for u in self.updates if not u.x.is_inference()]
        self.sown = [i for i, u in enumerate(self.updates) if u.rounding == "stochastic"]
        self.seeds = [roots(self.updates[i].settings.seed, self.updates[i].number) for i in self.sown]

    def _job(self, u: Update, path: Path) -> tuple[Scalar, ...]:
        s, state, layout, n_rows, n_cols, row_state, col_state = u.settings, u.state, u.layout, 1, 1, 0, 0
        estimator, swapped, full = ESTIMATORS[layout.estimator], False, 0
        if estimator == native.FULL:
            full = state["full"].data_ptr()
        else:
            first, second = path.axes
            n_rows, n_cols = layout.shape[first], layout.shape[second]
            swapped = first == layout.col_axis  # P is the paper's column axis
            estimator = SWAPPED[estimator] if swapped else estimator
            row_state = self._address(u, path, "col" if swapped else "row", second)
            col_state = self._address(u, path, "row" if swapped else "col", first)
        momentum, rounding, numbers = MOMENTA[s.momentum] if s.beta1 else native.NONE, ROUNDINGS[u.rounding], None
        carries = self.lasting and s.relative and path.carries and u.x.dtype in WHOLE
        early = estimator != native.FULL and momentum != native.OF_GRADIENT and not u.sharded
        if rounding == native.STOCHASTIC:
            numbers = numbering(path, u.x.shape, u.shape, u.place)
        return (
            *path.numbers, self.total, estimator, swapped, momentum, early, s.relative, u.measures_x,
            s.on_nonfinite == "ignore", u.x.data_ptr(), 0, full, state["momentum"].data_ptr() if momentum else 0,
            state["compensation"].data_ptr() if rounding == native.KAHAN else 0, state["step"].data_ptr(),
            row_state, col_state, 0, rounding, 0, 0, *(numbers or (0, 0, 0, 0, 0)), *[0] * 8,
            1, carries, 0, u.measures_x, *[0] * 4,
            n_rows, n_cols, *s.eps, s.clip or 0.0, layout.count, -1.0 if s.maximize else 1.0,
            *[0.0] * 9, math.nan, *[0.0] * 4,
        )  # fmt: skip

    def set_out(self, grads: list[Tensor]) -> None:
        """Describe what is of this step: G, the rates, the random numbers."""
        jobs = self.jobs
        jobs["g"] = list(map(Tensor.data_ptr, grads))
        native.counts(jobs, self.counts)
        for members in self.alike:
            settings, counts = self.updates[members[0]].settings, self.counts[members]
            steps = counts[:1] if (counts == counts[0]).all() else np.unique(counts)
            for t in steps.tolist():  # they differ where gradients were missing or not finite
                rates, at = settings.rates(t + 1), members[counts == t]
                jobs["beta2"][at], jobs["w1"][at], jobs["w2"][at], jobs["rho"][at] = rates
                jobs["decay"][at] = 1 - rates.rho * settings.weight_decay
        for i, seed in zip(self.sown, self.seeds, strict=True):
            jobs["key1"][i], jobs["key2"][i] = keys(seed, self.counts[i] + 1)
        for there, copy in self.copies:
            copy.copy_(there)

    def _address(self, u: Update, path: Path, key: str, gone: int) -> int:
        """Where a factor lies in the order of the walk; a copy, written back later, if its own is another."""
        if key not in u.state:
            return 0
        factor = u.state[key]
        if path.plain and factor.is_contiguous():
            return factor.data_ptr()
        walked = factor.permute(_without(path.order, gone))
        if walked.is_contiguous():
            return factor.data_ptr()
        self.copies.append((walked, walked.contiguous()))
        return self.copies[-1][1].data_ptr()

    def step(self, grads: list[Tensor]) -> list[Update]:
        """A whole step; returns those that were left out."""
        self.set_out(grads)
        fair = max(paths.UNIT, self.total // (4 * torch.get_num_threads()))
        shared = int((self.sizes > min(SMALL, fair)).sum())  # so many are walked by all threads together
        scratch = np.empty(max((path.room for path in self.paths[:shared]), default=0))
        native.furnish(self.jobs, shared, scratch, False)
        board = np.zeros(1 + 12 * shared, np.int64)
        everything = (self.jobs, *self.kind, board, shared, native.ALL, 0, self.total)
        together(partial(native.walk, *everything), self.total // paths.UNIT)
        self._write_back()
        taken = self.jobs["taken"]
        if taken.all():
            torch.autograd.graph.increment_version(self.written)
            return []
        self._raise_versions()
        return [self.updates[i] for i in np.flatnonzero(taken == 0)]

    def tell(self, i: int) -> None:
        """Give a trace the figures of the steps since it last asked."""
        job, trace = self.jobs[i], self.updates[i].trace
        if job["steps"]:
            rms_x = float(job["rms_x"]) if job["measures"] else None
            trace.note(
                float(job["noted_beta2"]),
                rms_x,
                float(job["alpha"]),
                float(job["rms_u"]),
                int(job["clipped"]),
                int(job["steps"]),
            )
        trace.skipped += int(job["skipped"])
        job["steps"] = job["clipped"] = job["skipped"] = 0

    def moments(self) -> None:
        """First walk."""
        self.scratch = torch.empty(sum(path.room for path in self.paths), dtype=torch.float64)
        native.furnish(self.jobs, len(self.jobs), self.scratch.numpy(), True)
        for u in self.updates:
            u.work = self
        self._walk(native.MOMENTS)
        native.fold(self.jobs, *self.kind[1:])
        seen = np.isfinite(self.jobs["finite"]).tolist()
        whole = zip(self.jobs["u2"].tolist(), self.jobs["x2"].tolist(), strict=True)
        for u, finite, (u2, x2) in zip(self.updates, seen, whole, strict=True):
            u.finite, u.u2, u.x2 = finite, u2, x2 if u.measures_x else None
        for u, means in self._sharded():
            u.rows, u.cols = means.get("row"), means.get("col")

    def factors(self, taken: set[Update]) -> None:
        """The vectors between the walks."""
        self.jobs["taken"] = [u in taken for u in self.updates]
        for u, means in self._sharded():
            for mean, complete in ((means.get("row"), u.rows), (means.get("col"), u.cols)):
                if mean is not None and complete is not None:
                    mean.copy_(complete)
        for i, u in enumerate(self.updates):
            if u.mean_row is not None:
                walked = u.mean_row.permute(_without(self.paths[i].order, u.layout.col_axis or 0)).double().contiguous()
                self.means.append(walked)
                self.jobs[i]["mean"] = walked.data_ptr()
        native.factors(self.jobs, self.kind[2])
        self._write_back()

    def _write_back(self) -> None:
        for there, copy in self.copies:
            there.copy_(copy)

    def energy(self) -> None:
        """Second walk, for ΣU² where the first could not have it, and for ΣX²."""
        for phase in (native.ENERGY, native.MEASURE):
            self._walk(phase)
            native.gather(self.jobs, phase)
        for u, u2, x2 in zip(self.updates, self.jobs["u2"].tolist(), self.jobs["x2"].tolist(), strict=True):
            u.u2, u.x2 = u2, x2 if u.measures_x else None

    def apply_(self) -> None:
        """Third walk."""
        self.jobs["scale"] = [u.scale for u in self.updates]
        self.jobs["decay"] = [u.decay for u in self.updates]
        self._walk(native.APPLY)
        self._raise_versions()

    def _raise_versions(self) -> None:
        """As torch's own in-place operations do, so that autograd sees what was written behind its back."""
        written = [u.x for u, taken in zip(self.updates, self.jobs["taken"].tolist(), strict=True) if taken]
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])

    def _sharded(self) -> Iterator[tuple[Update, dict[str, Tensor]]]:
        """The means of the sharded ones, to be completed by other ranks, in the shapes of their state."""
        places = itertools.accumulate((path.room for path in self.paths), initial=0)
        for u, path, place in zip(self.updates, self.paths, places, strict=False):
            if u.sharded and u.layout.estimator != "full":
                first, second = path.axes
                vectors = (place, second), (place + path.rows_in_all, first)
                yield (
                    u,
                    {
                        key: _vector(self.scratch, place, path, gone, u.x)
                        for place, gone in vectors
                        if (key := "row" if gone == u.layout.col_axis else "col") in u.state
                    },
                )

    def _walk(self, phase: int) -> None:
        share_out(native.walk, (self.jobs, *self.kind, NO_BOARD, 0, phase), self.total, paths.UNIT)


def _without(order: tuple[int, ...], gone: int) -> list[int]:
    """The order of the axes that are left when one is gone, numbered anew."""
    return [axis - (axis > gone) for axis in order if axis != gone]


def _vector(scratch: Tensor, place: int, path: Path, gone: int, x: Tensor) -> Tensor:
    """A factor in the scratch, its axes in the parameter's order."""
    sizes = [x.shape[axis] for axis in path.order if axis != gone]
    order = _without(path.order, gone)
    return scratch[place : place + prod(sizes)].view(sizes).permute([order.index(axis) for axis in range(len(order))])
