"""A sharded step, pass by pass: between the passes other ranks complete the sums, on the device.

| launch | what it leaves |
|---|---|
| `begin_step` | the rates of the step |
| `first_pass` | this rank's row means and column sums of G², and whether G² is finite |
| `means` | row and column means of G² + ε₁, as far as they are here, in double |
| `factors` | R, C and mean(R) from the means that all ranks have completed |
| `norms`, `totals` | ΣU² and ΣX² of what is here |
| `conclude` | α and the rest of the scalars |
| `last_pass` | X, and what is kept of G |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adafactor.core.bucket import Parameter
from adafactor.core.settings import Settings
from adafactor.core.step import Update, not_finite
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.executor import Executor, Kind
from adafactor.kernels.triton.last_pass import norms
from adafactor.kernels.triton.shard_kernels import conclude, factors, means, totals
from adafactor.kernels.triton.table import factored_axes

FEW = {"num_warps": 8, "enable_fp_fusion": False}


class Shards(Executor):
    """Sharded parameters of one kind."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        super().__init__(parameters, kind)
        self.together, self.at_once = True, False
        self.must_measure = [False] * len(parameters)
        self.table.tensors[:, f.BLOCKS.value] = 0  # ΣU² does not come from blocks of columns
        self.places = {parameter: i for i, parameter in enumerate(self.parameters)}
        known = ["mean_row" in p.shard.shapes for p in self.parameters if p.shard is not None]
        self.memory["is_known"] = torch.tensor(known, dtype=torch.int32, device=self.device)
        self._lasting.add("is_known")

    def begin(self, grads: list[Tensor | None], settings: Sequence[Settings], written: list[bool] | None) -> None:
        """Take what is of this step."""
        super().begin(grads, settings, written)
        self.updates = [Update(p, g) for p, g in zip(self.parameters, grads, strict=True) if g is not None]

    def moments(self) -> None:
        """First pass: what is here of the means of G² + ε₁, and whether G² is finite here."""
        table, count = self.table, len(self.parameters)
        with self._on_device():
            self._allocate()
            self.memory["wide"] = self._empty(table.vectors, torch.float64)
            self.memory["flags"] = flags = self._empty(count, torch.float64)
            self.memory["norms"] = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
            self.memory["pairs"] = self._empty(2 * table.tile_count, torch.float64)
            self._begin_step(False)
            for chunk in table.chunks:
                self._first_pass(chunk, raw=True)
                (first, end), (one, other) = chunk.blocks, chunk.tensors
                rows = table.matrix_count * (chunk is table.chunks[-1])
                place = {"first_block": first, "block_count": end - first, "matrix_count": rows, "first_tensor": one}
                self._launch(means, end - first + rows + other - one, FEW, **place)
        rates = (self.notes[:, column.value] for column in (f.W2, f.BETA2, f.W1))
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
        self.memory["finite"] = torch.zeros(count, dtype=torch.int32, device=self.device)
        ignored = {u.parameter for u in self.updates if u.parameter.settings.on_nonfinite == "ignore"}
        for u in self.updates:
            if u.parameter.settings.on_nonfinite == "raise" and not u.finite and not self.memory["found_inf"]:
                raise not_finite(u.parameter)
        if all(isinstance(u.finite, bool) for u in self.updates):  # the host knows: as plain torch, leave them out
            self.updates = [u for u in self.updates if u.finite or u.parameter in ignored]
        if self.updates:
            places = torch.tensor([self.places[u.parameter] for u in self.updates], device=self.device)
            taken = [
                torch.as_tensor(u.parameter in ignored or u.finite, device=self.device).reshape(())
                for u in self.updates
            ]
            self.memory["finite"][places] = torch.stack(taken).int()

    def factors(self) -> None:
        """R, C and mean(R) from the completed means."""
        with self._on_device():
            for u in self.updates:
                for name, view in self._views(u.parameter).items():
                    complete = u.rows if name == "row" else u.cols
                    if complete is not None and complete.data_ptr() != view.data_ptr():
                        view.copy_(complete)
                if u.mean_row is not None:
                    first, count = self.table.own_matrices[u.parameter]
                    self.memory["means"][first : first + count].copy_(u.mean_row.reshape(-1))
            self._launch(factors, self.table.matrix_count, FEW | {"ST": self.kind.fold()["ST"]})

    def energy(self) -> None:
        """Second pass: ΣU² and ΣX² of what is here."""
        with self._on_device():
            for kind, only_ragged in self._variants():
                self._launch(norms, self.table.tile_count, kind.norms(), only_ragged=only_ragged)
            self._launch(totals, len(self.parameters), FEW)
        for u in self.updates:
            u.u2, u.x2 = self.memory["norms"][self.places[u.parameter]].unbind()

    def conclude(self) -> None:
        """The scalars, from the completed sums."""
        with self._on_device():
            for u in self.updates:
                pair = self.memory["norms"][self.places[u.parameter]]
                for target, value in zip(pair.unbind(), (u.u2, u.x2), strict=True):
                    target.copy_(value) if isinstance(value, Tensor) else target.fill_(value or 0.0)
            self._launch(conclude, len(self.parameters), FEW)

    def end(self) -> list[Parameter]:
        """Let go of what was of this step."""
        self.updates = []
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
                found[name] = self.memory["wide"].as_strided(shape, [steps.get(axis, 1) for axis in axes], start)
        return found
