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

from adafactor.core.contract import Parameter, Sums
from adafactor.core.factoring import Factored
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.executor import Executor, Kind, register_limit
from adafactor.kernels.triton.last_pass import norms
from adafactor.kernels.triton.shard_kernels import conclude, factors, means, totals
from adafactor.kernels.triton.table import factored_axes

FEW = {"num_warps": 8, "enable_fp_fusion": False, **register_limit(128)}


class Shards(Executor):
    """Sharded parameters of one kind."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        super().__init__(parameters, kind)
        self.must_measure = [False] * len(parameters)
        self.table.tensors[:, f.BLOCKS.value] = 0  # ΣU² does not come from blocks of columns
        known = ["mean_row" in p.shard.shapes for p in self.parameters if p.shard is not None]
        self.memory["is_known"] = torch.tensor(known, dtype=torch.int32, device=self.device)
        self._lasting.add("is_known")

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
        finite, beta2, w2 = (t.unbind() for t in (flags == 0, self.notes[:, f.BETA2.value], self.notes[:, f.W2.value]))
        self.sums = []
        for i, (p, is_here) in enumerate(zip(self.parameters, self._present, strict=True)):
            if is_here:
                views = self._views(p)
                sums = Sums(p, bool(finite[i]) if finite[i].is_cpu else finite[i], views.get("row"), views.get("col"))
                if p.shard is not None:
                    sums.mean_row = p.shard.mean_row(sums.rows, p.state.get("row"), beta2[i], w2[i])
                self.sums.append(sums)

    def norms(self) -> None:
        """Second pass: R and C from the completed means, ΣU² and ΣX² of what is here."""
        with self._on_device():
            self.memory["finite"] = self._everyone([one.finite for one in self.sums]).int()
            for one in self.sums:
                if one.mean_row is not None:
                    first, count = self.table.own_matrices[one.parameter]
                    self.memory["means"][first : first + count].copy_(one.mean_row.reshape(-1))
            self._launch(factors, self.table.matrix_count, FEW | {"ST": self.kind.fold()["ST"]})
            for kind, only_ragged in self._variants():
                self._launch(norms, self.table.tile_count, kind.norms(), only_ragged=only_ragged)
            self._launch(totals, len(self.parameters), FEW)
        present = (pair for pair, is_here in zip(self.memory["norms"], self._present, strict=True) if is_here)
        for one, pair in zip(self.sums, present, strict=True):
            one.u2, one.x2 = pair.unbind()

    def apply_(self) -> None:
        """Last pass, with the scalars from the completed sums."""
        with self._on_device():
            pairs = [(one.u2, 0.0 if one.x2 is None else one.x2) for one in self.sums]
            for column, values in enumerate(zip(*pairs, strict=True)):
                self.memory["norms"][:, column] = self._everyone(values)
            self._launch(conclude, len(self.parameters), FEW)
        super().apply_()

    def _everyone(self, values: Sequence[Tensor | float]) -> Tensor:
        """A vector of all parameters' values, of those with a gradient; zero for the others."""
        vector = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.device)
        for i, value in zip((i for i, is_here in enumerate(self._present) if is_here), values, strict=True):
            vector[i].copy_(value) if isinstance(value, Tensor) else vector[i].fill_(value)
        return vector

    def _views(self, parameter: Parameter) -> dict[str, Tensor]:
        """The means of a parameter, in the shapes of its state."""
        if not isinstance(parameter.factoring, Factored):
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
