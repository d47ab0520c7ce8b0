"""A sharded step, walk by walk: between the walks other ranks complete the sums (`sharding.py`), on the device.

| launch | what it leaves |
|---|---|
| `first_walk` | with β̂₂ = 0 and ε₁ = 0: this rank's row means of G², column sums, and whether G² is finite |
| `means` | row and column means of G² + ε₁, as far as they are here, in double |
| `factors` | R, C and mean(R) from the means that all ranks have completed |
| `energy_walk`, `totals` | ΣU² and ΣX² of what is here |
| `conclude` | α and the rest of the scalars |
| `last_walk` | X, and what is kept of G |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adafactor.core.bucket import Parameter
from adafactor.core.settings import Settings
from adafactor.core.step import Update, not_finite
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.executor import Executor, Kind, launch
from adafactor.kernels.triton.first_walk import first_walk
from adafactor.kernels.triton.last_walk import STEP
from adafactor.kernels.triton.shard_kernels import conclude, energy_walk, factors, means, totals
from adafactor.kernels.triton.table import factored_axes


class Shards(Executor):
    """Sharded parameters of one kind."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        super().__init__(parameters, kind)
        self.together, self.at_once = True, False
        self.must_measure = [False] * len(parameters)
        self.table.tensors[:, f.BLOCKS.value] = 0  # ΣU² does not come from blocks of columns
        self.no_rates = torch.zeros_like(self.rates)
        self.raw = torch.zeros_like(self.numbers.there)  # settings with β̂₂ = 0 and ε₁ = 0
        self.places = {parameter: i for i, parameter in enumerate(self.parameters)}
        known = ["mean_row" in p.shard.shapes for p in self.parameters if p.shard is not None]
        self.is_known = torch.tensor(known, dtype=torch.int32, device=self.device)

    def begin(self, grads: list[Tensor | None], settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take what is of this step."""
        super().begin(grads, settings, written)
        self.updates = [Update(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]

    def moments(self) -> None:
        """First walk: what is here of the means of G² + ε₁, and whether G² is finite here."""
        table, empty = self.table, self._empty
        with self._on_device():
            vectors, scratch = empty(table.vectors, self.stat), empty(table.scratch, self.stat)
            sums = empty(table.unit_count * f.SUMS.value, torch.float64)
            flags = empty(len(self.parameters), torch.float64)
            self.wide, self.row_means = empty(table.vectors, torch.float64), empty(table.matrix_count, torch.float64)
            self._step_memory = vectors, empty(1, torch.float64), self.row_means
            self.raw.copy_(self.numbers.there)
            self.raw[:, f.EPS1.value] = 0
            self.raw[:, f.BETA2.value] = 0
            tables, scale, first_matrix = (table.tensors, table.matrices), self._scale, 0
            for i, chunk in enumerate(table.chunks):
                for (first, end), long in ((chunk.units, False), (chunk.long_units, True)):
                    read = (table.units, self.given.there, self.raw, self.no_rates)
                    found = (vectors, scratch, sums, scale)
                    launch(first_walk, end - first, (*tables, *read, *found, first), self._now.first_walk(long))
                last = i + 1 == len(table.chunks)
                blocks, rows, tensors = chunk.blocks, table.matrix_count * last, chunk.tensors
                read = (table.blocks, self.given.there, self.numbers.there, self.rates)
                into = (self.notes, vectors, self.wide, scratch, sums, flags, scale)
                at = (blocks[0], blocks[1] - blocks[0], first_matrix, rows, tensors[0])
                options = self._now.fold()
                options.pop("ST")
                launch(
                    means,
                    blocks[1] - blocks[0] + rows + tensors[1] - tensors[0],
                    (*tables, *read, *into, *at),
                    options,
                )
        rates = (self.notes[:, column.value] for column in (f.W2, f.BETA2_NOW, f.W1))
        columns = [t.unbind() for t in (flags == 0, *rates)]
        for u in self.updates:
            i = self.places[u.parameter]
            finite, u.w2, u.beta2, u.w1 = (column[i] for column in columns)
            u.finite = bool(finite) if finite.is_cpu else finite
            views = self._views(u.parameter)
            u.rows, u.cols = views.get("row"), views.get("col")

    def admit(self) -> None:
        """Decide which steps are taken, or raise; nothing has been changed so far."""
        count = len(self.parameters)
        self.finite = torch.zeros(count, dtype=torch.int32, device=self.device)
        ignored = {u.parameter for u in self.updates if u.parameter.settings.on_nonfinite == "ignore"}
        for u in self.updates:
            if u.parameter.settings.on_nonfinite == "raise" and not u.finite and not self._found_inf:
                raise not_finite(u.parameter)
        if all(isinstance(u.finite, bool) for u in self.updates):  # the host knows: as plain torch, leave them out
            self.updates = [u for u in self.updates if u.finite or u.parameter in ignored]
        if self.updates:
            places = torch.tensor([self.places[u.parameter] for u in self.updates], device=self.device)
            taken = [
                torch.as_tensor(u.parameter in ignored or u.finite, device=self.device).reshape(())
                for u in self.updates
            ]
            self.finite[places] = torch.stack(taken).int()

    def factors(self) -> None:
        """R, C and mean(R) from the completed means."""
        table = self.table
        with self._on_device():
            for u in self.updates:
                for name, view in self._views(u.parameter).items():
                    complete = u.rows if name == "row" else u.cols
                    if complete is not None and complete.data_ptr() != view.data_ptr():
                        view.copy_(complete)
                if u.mean_row is not None:
                    self._row_means(u.parameter).copy_(u.mean_row.reshape(-1))
            vectors = self._step_memory[0]
            arguments = (
                table.tensors,
                table.matrices,
                self.given.there,
                self.notes,
                vectors,
                self.wide,
                self.row_means,
            )
            options = {"ST": self.kind.fold()["ST"], "num_warps": 4, "enable_fp_fusion": False}
            launch(factors, table.matrix_count, (*arguments, self.is_known), options)

    def energy(self) -> None:
        """Second walk: ΣU² and ΣX² of what is here."""
        table = self.table
        with self._on_device():
            energies = self._empty(2 * table.piece_count, torch.float64)
            self.pairs = torch.zeros(len(self.parameters), 2, dtype=torch.float64, device=self.device)
            vectors = self._step_memory[0]
            arguments = (table.tensors, table.matrices, table.pieces, self.given.there, self.numbers.there, self.notes)
            arguments += vectors, self.row_means, energies, self._scale  # type: ignore[assignment]
            launch(energy_walk, table.piece_count, arguments, self._now.last_walk())
            few = {"num_warps": 4, "enable_fp_fusion": False}
            launch(totals, len(self.parameters), (table.tensors, self.given.there, energies, self.pairs), few)
        for u in self.updates:
            u.u2, u.x2 = self.pairs[self.places[u.parameter]].unbind()

    def conclude(self) -> None:
        """The scalars, from the completed sums."""
        table = self.table
        with self._on_device():
            for u in self.updates:
                pair = self.pairs[self.places[u.parameter]]
                for i, value in enumerate((u.u2, u.x2)):
                    pair[i].copy_(value) if isinstance(value, Tensor) else pair[i].fill_(
                        0.0 if value is None else value
                    )
            arguments: tuple[Any, ...] = (table.tensors, self.given.there, self.numbers.there, self.rates, self.notes)
            few = {"num_warps": 4, "enable_fp_fusion": False}
            launch(conclude, len(self.parameters), (*arguments, self.pairs, self.finite, self._found_inf), few)

    def apply_(self) -> None:
        """Last walk."""
        self._changed = self._has_new = True
        with self._on_device():
            self._last_walk(STEP.value, self.table.spans)

    def end(self) -> list[Parameter]:
        """Let go of what was of this step."""
        self.updates = []
        self.wide = self.row_means = self.pairs = self.finite = self.zero
        return super().end()

    def _views(self, parameter: Parameter) -> dict[str, Tensor]:
        """The means of a parameter, in the shapes of its state."""
        if parameter.factoring.estimator == "full":
            return {}
        p, q = factored_axes(parameter)
        names = ("row", "col") if p == parameter.factoring.row_axis else ("col", "row")
        first, stride = self.table.new_vectors[parameter]
        found = {}
        for name, gone, start in ((names[0], q, first[0]), (names[1], p, first[1])):
            if name in parameter.state:
                axes = [axis for axis in range(parameter.x.dim()) if axis != gone]
                steps, step = {}, stride
                for axis in reversed([axis for axis in axes if axis not in (p, q)]):
                    steps[axis] = step
                    step *= parameter.x.shape[axis]
                shape = [parameter.x.shape[axis] for axis in axes]
                found[name] = self.wide.as_strided(shape, [steps.get(axis, 1) for axis in axes], start)
        return found

    def _row_means(self, parameter: Parameter) -> Tensor:
        first, count = self.table.own_matrices[parameter]
        return self.row_means[first : first + count]
