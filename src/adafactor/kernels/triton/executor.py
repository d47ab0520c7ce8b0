"""Parameters of one kind on one device: their tables, and the launches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adafactor.core.contract import Gradients, Parameter, Sums
from adafactor.core.settings import Settings
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates
from adafactor.kernels.triton.between import conclude, factors, fold, totals
from adafactor.kernels.triton.first_pass import first_pass
from adafactor.kernels.triton.kind import SHARED_MEMORY, Kind
from adafactor.kernels.triton.last_pass import last_pass
from adafactor.kernels.triton.matrix import Memory
from adafactor.kernels.triton.measure import begin_step, measure
from adafactor.kernels.triton.shards import Shards
from adafactor.kernels.triton.sizes import ALIGNMENT
from adafactor.kernels.triton.table import Table
from adafactor.kernels.triton.turns import compile_in_turns
from adafactor.kernels.triton.upload import Upload, is_capturing

LEAST_SCRATCH = 64 * 2**20  # bytes
NOTHING = nullcontext()  # to be done round a launch


@dataclass(eq=False)
class Launch:
    """A launch of a kernel, the same in every step."""

    kernel: Any
    programs: int
    options: dict[str, Any]
    numbers: tuple[int, ...] = ()
    is_ragged: bool = False  # it is for gradients that are not aligned this time
    is_new: bool = True  # what it launches may have to be compiled


def launch(kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Run a kernel. All launches of this backend come through here."""
    if programs:
        kernel[(programs,)](*arguments, **options)


class Executor:
    """The tables of some parameters, made once and used for many steps."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        self.kind, self.in_lockstep = kind, parameters[0].in_lockstep
        self.device = parameters[0].x.device
        most = max(LEAST_SCRATCH, sum(p.x.nbytes for p in parameters) // 100)
        with torch.device("cpu"):  # whatever the default is
            self.table = table = Table(parameters, kind, most)
        self.parameters, self.sums = table.parameters, list[Sums]()
        self.groups = sorted({parameter.group for parameter in parameters})
        count = len(parameters)
        self.notes = torch.zeros(count, f.NOTES, dtype=torch.float64, device=self.device)
        self.notes[:, f.RMS_U : f.STEPS] = torch.nan  # no step has been taken
        self.given = Upload((count, f.GIVEN), torch.int64, self.device)
        self.numbers = Upload((max(self.groups) + 1, rates.NUMBERS.value), torch.float64, self.device)
        self._shards = Shards(table, self.notes) if parameters[0].shard is not None else None
        # the ranks of a shard find ΣX² together, in every step
        self.must_measure = [p.settings.relative and self._shards is None for p in self.parameters]
        self.writable = [parameter.x for parameter in self.parameters if not parameter.x.is_inference()]
        self._not_scaled = torch.tensor([1.0, 0.0], device=self.device)
        self._lasting = {
            "tensors_ptr": table.tensors,
            "matrices_ptr": table.matrices,
            "units_ptr": table.units,
            "blocks_ptr": table.blocks,
            "tiles_ptr": table.tiles,
            "shares_ptr": table.shares,
            "checks_ptr": table.checks,
            "notes_ptr": self.notes,
            "squares_ptr": torch.zeros(len(table.tiles), dtype=torch.float64, device=self.device),
            "changes_ptr": torch.zeros(len(table.checks), dtype=torch.int32, device=self.device),
        }
        self._memory: Memory | None = None
        self._present: list[bool] = []
        self._grads: Gradients = []
        self._any_ragged = self._changed = self._has_new = False
        card = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        self._room: int = getattr(card, "shared_memory_per_multiprocessor", SHARED_MEMORY)
        self._moments = [*self._begin_step(), *self._first_passes()]
        self._norms, self._apply = list[Launch](), self._last_passes()
        if self._shards is not None:
            options = kind.between()
            self._norms = [Launch(factors, len(table.matrices), options), *self._last_passes(writes=False)]
            self._norms.append(Launch(totals, count, options))
            self._apply.insert(0, Launch(conclude, count, options))

    # ---- the contract

    def begin(self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take what is of this step: G, the settings of the groups; upload what has changed."""
        self._changed = False
        self._grads = grads  # kept until the launches are done
        self._present = [g is not None for g in grads]
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        self._any_ragged = self.kind.aligned and any(address % ALIGNMENT for address in addresses)
        if written is not None:  # ΣX² is of what was there before
            self.must_measure = [
                a or (b and p.settings.relative)
                for a, b, p in zip(self.must_measure, written, self.parameters, strict=True)
            ]
        captured = self.parameters[0].metrics.captured  # lasts as long as the optimizer
        own = settings[: len(self.numbers.there)]
        with self._on_device():
            if is_capturing(self.device) and self not in captured:
                captured.append(self)
            self.given.set(list(zip(addresses, self.must_measure, strict=True)))
            self.numbers.set([rates.row_of(s) for s in own])
            for group in self.groups:
                if isinstance(lr := own[group].lr, Tensor):
                    self.numbers.there[group, rates.LR.value].copy_(lr.reshape(()), non_blocking=True)

    def step(self) -> None:
        """Take a whole step."""
        self.moments()
        self.apply_()

    def moments(self) -> None:
        """First pass, C, and all scalars; of a shard, what is here of the means. Nothing of X or the state changes."""
        with self._on_device():
            self._memory = self._allocate()
            self._launch(self._moments)
        if self._shards is not None:
            self.sums = self._shards.sums_of_moments(self._memory.wide_ptr, self._present)
        elif self.in_lockstep:  # a bad gradient raises
            taken = self.notes[:, f.TAKEN].unbind()
            everyone = zip(self.parameters, self._present, taken, strict=True)
            self.sums = [Sums(parameter, flag != 0) for parameter, is_here, flag in everyone if is_here]

    def norms(self) -> None:
        """Second pass of a shard: R and C from the completed means, ΣU² and ΣX² of what is here."""
        assert self._shards is not None and self._memory is not None
        with self._on_device():
            self._shards.note_moments(self.sums, self._memory.means_ptr)
            self._launch(self._norms)
            self._shards.read_norms(self.sums)

    def apply_(self) -> None:
        """Last pass; of a shard, with the scalars from the completed sums."""
        with self._on_device():
            if self._shards is not None:
                self._shards.note_norms(self.sums)
            self._changed = self._has_new = True
            self._launch(self._apply)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self._grads, self.sums, self._memory = [], [], None
        if self._changed:
            self.must_measure = [a and not b for a, b in zip(self.must_measure, self._present, strict=True)]
            torch.autograd.graph.increment_version(self.writable)
        return []

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to the parameters, without reading them."""
        if not self._has_new:
            return
        self._has_new = False
        notes = self.notes.clone()
        self.notes[:, f.STEPS : f.SKIPPED + 1].zero_()
        counts = notes[:, f.STEPS : f.SKIPPED + 1].long()
        for i, parameter in enumerate(self.parameters):
            beta2, rms_x, alpha, rms_u = (
                notes[i, column] for column in (f.REPORTED_BETA2, f.RMS_X, f.REPORTED_ALPHA, f.RMS_U)
            )
            steps, clipped, skipped = counts[i].unbind()
            parameter.metrics.add(beta2, rms_x if parameter.measures_x else None, alpha, rms_u, clipped, steps)
            parameter.metrics.skipped = parameter.metrics.skipped + skipped

    # ---- inside

    def _allocate(self) -> Memory:
        """Take what a step needs besides the state."""
        table, stat, sharded = self.table, self.kind.stat, self._shards is not None
        return Memory(
            **self._lasting,
            given_ptr=self.given.there,
            numbers_ptr=self.numbers.there,
            scaling_ptr=self._not_scaled,
            vectors_ptr=self._empty(table.vectors, stat),
            inverses_ptr=self._empty(table.vectors, stat),
            scratch_ptr=self._empty(table.scratch, stat),
            sums_ptr=self._empty(len(table.units) * f.SUMS, torch.float64),
            energies_ptr=self._empty(len(table.tiles) if sharded else len(table.blocks), torch.float64),
            means_ptr=self._empty(len(table.matrices), torch.float64),
            wide_ptr=self._empty(table.vectors if sharded else 0, torch.float64),
        )

    def _begin_step(self) -> list[Launch]:
        """Find the rates; where the step relies on ΣX², see to it that it is true."""
        table, count, options, relies = self.table, len(self.parameters), self.kind.measure(), any(self.must_measure)
        begin = Launch(begin_step, count + len(table.checks) * relies, options, (count,))
        return [begin] + [Launch(measure, len(table.shares), options)] * relies

    def _first_passes(self) -> list[Launch]:
        """Run the first pass over each chunk, and `fold`."""
        launches, raw = [], self._shards is not None
        for chunk in self.table.chunks:
            for kind, is_ragged in self._variants():
                for how, first, end in chunk.units:
                    options = kind.first_pass(how, raw, self._room)
                    launches.append(Launch(first_pass, end - first, options, (first, int(is_ragged)), is_ragged))
            (first, end), (one, other) = chunk.blocks, chunk.tensors
            numbers = first, end - first, one
            launches.append(Launch(fold, end - first + other - one, self.kind.fold(raw), numbers))
        return launches

    def _last_passes(self, writes: bool = True) -> list[Launch]:
        """Run the last pass, or only find ΣU² and ΣX² of a shard."""
        tiles = len(self.table.tiles)
        return [Launch(last_pass, tiles, kind.last_pass(writes), (int(r),), r) for kind, r in self._variants()]

    def _variants(self) -> list[tuple[Kind, bool]]:
        """The kind; and its ragged like, which steps those tensors alone whose gradients are not aligned."""
        return [(self.kind, False)] + [(self.kind.ragged, True)] * self.kind.aligned

    def _launch(self, launches: Sequence[Launch]) -> None:
        for one in launches:
            if self._any_ragged or not one.is_ragged:
                with compile_in_turns() if one.is_new else NOTHING:
                    launch(one.kernel, one.programs, (self._memory, *one.numbers), one.options)
                one.is_new = False

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max(count, 1), dtype=dtype, device=self.device)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device current: kernels are launched there."""
        if self.device.type == "cpu":
            return NOTHING
        context: AbstractContextManager[Any] = torch.get_device_module(self.device).device(self.device)
        return context
