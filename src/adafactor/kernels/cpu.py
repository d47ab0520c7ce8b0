"""The walks on a CPU through Numba: no tensor-sized temporary, and all tensors in one call.

Here are the tables that describe a bucket to the loops in `native`, and the threads that share them out. What the
loops cannot walk (another device, memory in no order they know) goes to `eager`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adafactor.equations import Scalar
from adafactor.kernels import eager, native
from adafactor.kernels.threads import announced, share_out, together
from adafactor.layout import statistics_dtype
from adafactor.rounding import keys, roots

if TYPE_CHECKING:
    from adafactor.step import Update

SMALL = 2**20  # elements up to which a tensor is one thread's alone, if there are enough of them for all
UNIT = 2**15  # elements that are worth a thread's attention

NO_BOARD = np.zeros(1, np.int64)

WHOLE = (torch.float32, torch.float64)  # nothing is lost between X as it is computed and X as it is kept
STORED = {
    torch.float32: np.zeros(1, np.float32),
    torch.float64: np.zeros(1, np.float64),
    torch.bfloat16: np.zeros(1, np.uint16),
    torch.float16: np.zeros(1, np.int16),
}
Kind = tuple[Any, Any, Any]  # arrays of the types of X, G and the statistics, from which Numba knows what to compile
KINDS: dict[tuple[torch.dtype, torch.dtype], Kind] = {
    (x, g): (STORED[x], STORED[g], STORED[statistics_dtype(x)])
    for x, g in itertools.product(STORED, STORED)
    if g != torch.float64 or x == torch.float64
}
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


@dataclass(frozen=True)
class Path:
    """How a tensor is walked: B, P, S, Q, K of `native`, the strides of X and G along B, P and S, and its units."""

    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int, int]
    rows: int  # P's per unit
    cuts: int  # units per B
    groups: tuple[tuple[int, ...], ...]  # which axes, in the order of memory, are B, P, S and Q·K
    order: tuple[int, ...] = ()  # the axes in the order of memory
    axes: tuple[int, int] = (0, 0)  # which of them are P and Q

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The first columns of a job."""
        return (*self.sizes, *self.strides, self.rows, self.cuts)

    @property
    def carries(self) -> bool:
        """Can a step carry ΣX² over to the next?"""
        return bool(self.order) and self.sizes[4] == 1

    @cached_property
    def rows_in_all(self) -> int:
        """The length of R along P, over the whole batch."""
        b, p, s, _, k = self.sizes
        return b * p * s * k

    @cached_property
    def room(self) -> int:
        """Doubles that `native.furnish` will ask for."""
        b, p, s, q, k = self.sizes
        row, col, means = (b * p * s * k, b * s * q * k, b * s * k) if self.order else (0, 0, 0)
        return 2 * (row + col) + means + 2 * col * self.cuts + 3 * b * self.cuts

    @cached_property
    def plain(self) -> bool:
        """Does the walk take the axes in their own order?"""
        return self.order == tuple(range(len(self.order)))


def find_path(u: Update) -> Path | str:
    """The path through a parameter, or why there is none."""
    x, g, strides = u.x, u.g, u.x.stride()
    if not (x.is_cpu and g.is_cpu):
        return f"it is on {x.device}"
    if (x.dtype, g.dtype) not in KINDS:
        return f"there is no loop for a {x.dtype} parameter with a {g.dtype} gradient"
    for key in ("full", "momentum", "compensation"):
        if key in u.state and u.state[key].stride() != strides and x.numel() > 1:
            return "its state has another order in memory"
    if u.layout.row_axis is None or u.layout.col_axis is None:
        path = _flat_path(x.shape, strides, g.stride())
    else:
        path = _path(x.shape, strides, g.stride(), u.layout.row_axis, u.layout.col_axis)
    if u.rounding == "stochastic" and isinstance(path, Path) and _numbering(path, x.shape, u.shape, u.place) is None:
        return "its elements, in the order of memory, are not numbered in even steps, as stochastic rounding needs"
    return path


@lru_cache(maxsize=4096)
def _numbering(
    path: Path, part: tuple[int, ...], whole: tuple[int, ...], place: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The number in the whole of the part's first element, and what is added to it along B, P, S and Q·K."""
    row_by_row = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    steps = [_merge(part, row_by_row, axes) for axes in path.groups]
    origin = sum(step * start for step, start in zip(row_by_row, place or (), strict=False))
    return None if None in steps else (origin, *(step or 0 for step in steps))


@lru_cache(maxsize=4096)
def _flat_path(shape: tuple[int, ...], x: tuple[int, ...], g: tuple[int, ...]) -> Path | str:
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if any(x[axis] != g[axis] for axis in long):
        return "its gradient has another order in memory"
    width = 1
    for axis in sorted(long, key=lambda axis: x[axis]):
        if x[axis] != width:
            return "it has gaps in memory and its second moment is kept whole"
        width *= shape[axis]
    size = prod(shape)
    cuts = -(-size // UNIT)
    every = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -x[axis], axis)))
    return Path((1, size, 1, 1, 1), (0, 1, 0, 0, 1, 0), UNIT, cuts, ((), every, (), ()))


@lru_cache(maxsize=4096)
def _path(shape: tuple[int, ...], x: tuple[int, ...], g: tuple[int, ...], row: int, col: int) -> Path | str:
    # an axis of length 1 may have any stride: it goes first
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -x[axis], axis)))
    first, second = sorted((order.index(row), order.index(col)))
    outer, middle, inner = order[:first], order[first + 1 : second], order[second + 1 :]
    p, q = shape[order[first]], shape[order[second]]
    b, s, k = (prod(shape[axis] for axis in axes) for axes in (outer, middle, inner))
    steps: list[int] = []
    for strides in (x, g):
        along = [_merge(shape, strides, axes) for axes in (outer, middle, order[second:])]
        if along[2] is None or (q * k > 1 and along[2] != 1):
            return "its lines have gaps in memory" if strides is x else "its gradient has another order in memory"
        if along[0] is None or along[1] is None:
            return "its batch axes have gaps in memory"
        steps += [along[0], strides[order[first]], along[1]]
    rows, cuts = _units(p, s * q * k)
    xb, xp, xs, gb, gp, gs = steps
    groups, axes = (outer, order[first : first + 1], middle, order[second:]), (order[first], order[second])
    return Path((b, p, s, q, k), (xb, xp, xs, gb, gp, gs), rows, cuts, groups, order, axes)


def _merge(shape: tuple[int, ...], strides: Sequence[int], axes: tuple[int, ...]) -> int | None:
    """The one stride of neighbouring axes taken together: 0 for none of them, None if they cannot be."""
    long = [axis for axis in axes if shape[axis] > 1]
    for outer, inner in zip(long, long[1:], strict=False):
        if strides[outer] != strides[inner] * shape[inner]:
            return None
    return strides[long[-1]] if long else 0


def _units(p: int, line: int) -> tuple[int, int]:
    """P's per unit and units: enough for many threads, few enough that their column sums stay a small part."""
    most = max(min(16, p // 64), min(32, p // 512), 1)
    cuts = max(1, min(most, p * line // UNIT))
    rows = -(-p // cuts)
    rows += -rows % 4
    return rows, -(-p // rows)


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
        momentum, rounding, numbering = MOMENTA[s.momentum] if s.beta1 else native.NONE, ROUNDINGS[u.rounding], None
        carries = self.lasting and s.relative and path.carries and u.x.dtype in WHOLE
        early = estimator != native.FULL and momentum != native.OF_GRADIENT and not u.sharded
        if rounding == native.STOCHASTIC:
            numbering = _numbering(path, u.x.shape, u.shape, u.place)
        return (
            *path.numbers, self.total, estimator, swapped, momentum, early, s.relative, u.measures_x,
            s.on_nonfinite == "ignore", u.x.data_ptr(), 0, full, state["momentum"].data_ptr() if momentum else 0,
            state["compensation"].data_ptr() if rounding == native.KAHAN else 0, state["step"].data_ptr(),
            row_state, col_state, 0, rounding, 0, 0, *(numbering or (0, 0, 0, 0, 0)), *[0] * 8,
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
        fair = max(UNIT, self.total // (4 * torch.get_num_threads()))
        shared = int((self.sizes > min(SMALL, fair)).sum())  # so many are walked by all threads together
        scratch = np.empty(max((path.room for path in self.paths[:shared]), default=0))
        native.furnish(self.jobs, shared, scratch, False)
        board = np.zeros(1 + 12 * shared, np.int64)
        everything = (self.jobs, *self.kind, board, shared, native.ALL, 0, self.total)
        together(partial(native.walk, *everything), self.total // UNIT)
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
        share_out(native.walk, (self.jobs, *self.kind, NO_BOARD, 0, phase), self.total, UNIT)


def _without(order: tuple[int, ...], gone: int) -> list[int]:
    """The order of the axes that are left when one is gone, numbered anew."""
    return [axis - (axis > gone) for axis in order if axis != gone]


def _vector(scratch: Tensor, place: int, path: Path, gone: int, x: Tensor) -> Tensor:
    """A factor in the scratch, its axes in the parameter's order."""
    sizes = [x.shape[axis] for axis in path.order if axis != gone]
    order = _without(path.order, gone)
    return scratch[place : place + prod(sizes)].view(sizes).permute([order.index(axis) for axis in range(len(order))])
