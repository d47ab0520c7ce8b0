"""A sharded step, pass by pass: between the passes other ranks complete the sums, on the device.

| launch | what it leaves |
|---|---|
| `begin_step` | the rates of the step |
| `first_pass`, `fold` | row and column means of G² + ε₁, as far as they are here, in double; whether G² is finite |
| `factors` | R, C and mean(R) from the means that all ranks have completed |
| `last_pass`, `totals` | ΣU² and ΣX² of what is here |
| `conclude` | α and the rest of the scalars |
| `last_pass` | X, and what is kept of G |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from adafactor.core.contract import Parameter, Sums
from adafactor.core.equations import mean_of_rows
from adafactor.core.factoring import Factored
from adafactor.core.sums import vector
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.between import conclude, factors, totals
from adafactor.kernels.triton.executor import Executor, Launch
from adafactor.kernels.triton.kind import Kind
from adafactor.kernels.triton.layout import factored_axes, factors_along


class Shards(Executor):
    """Sharded parameters of one kind."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        super().__init__(parameters, kind)
        self.must_measure = [False] * len(parameters)
        self.table.tensors[:, f.BLOCKS] = 0  # ΣU² does not come from blocks of columns
        matrices, tensors, options = len(self.table.matrices), len(parameters), kind.between()
        self._moments = [*self._begin_step(False), *self._first_passes(raw=True)]
        self._norms = [Launch(factors, matrices, options), *self._last_passes(False), Launch(totals, tensors, options)]
        self._apply.insert(0, Launch(conclude, tensors, options))
        self._owned: tuple[tuple[Parameter, ...], Tensor, Tensor] | None = None

    def moments(self) -> None:
        """First pass: what is here of the means of G² + ε₁, and whether G² is finite here."""
        with self._on_device():
            self._allocate(sharded=True)
            self._launch(self._moments)
        flags = self.notes[:, f.TAKEN] != 0
        finite = compress(flags.tolist() if flags.is_cpu else flags.unbind(), self._present)
        self.sums = []
        for parameter, is_finite in zip(compress(self.parameters, self._present), finite, strict=True):
            views = self._views(parameter)
            self.sums.append(Sums(parameter, is_finite, views.get("row"), views.get("col")))
        self._add_mean_rows()

    def _add_mean_rows(self) -> None:
        """Find this rank's share of mean(R), where it is wanted: two sums for each parameter, the rest together."""
        found: dict[int, tuple[Tensor, Tensor]] = {}  # by place among `sums`
        for i, one in enumerate(self.sums):
            if (shard := one.parameter.shard) and (pair := shard.row_sums(one.rows, one.parameter.state.get("row"))):
                found[i] = pair
        if not found:
            return
        owner, n = self._owners(tuple(self.sums[i].parameter for i in found))
        new, old = (torch.cat([pair[k].reshape(-1) for pair in found.values()]) for k in (0, 1))
        beta2, w2 = (self.notes[:, column].index_select(0, owner) for column in (f.BETA2, f.W2))
        means = mean_of_rows(new, old, n, beta2, w2).split([pair[0].numel() for pair in found.values()])
        for (i, pair), mean in zip(found.items(), means, strict=True):
            self.sums[i].mean_row = mean.view(pair[0].shape)

    def _owners(self, parameters: tuple[Parameter, ...]) -> tuple[Tensor, Tensor]:
        """The number of each matrix's parameter here, and the rows of the whole matrix; made once for the same ones."""
        if self._owned is None or self._owned[0] != parameters:
            numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
            owner, n = [], []
            for parameter in parameters:
                assert isinstance(parameter.factoring, Factored)
                matrices = self.table.places[parameter].matrices
                owner += [numbers[parameter]] * matrices
                n += [parameter.factoring.shape[parameter.factoring.row_axis]] * matrices
            rows = torch.tensor(n, dtype=torch.float64, device=self.device)
            self._owned = parameters, torch.tensor(owner, device=self.device), rows
        return self._owned[1:]

    def norms(self) -> None:
        """Second pass: R and C from the completed means, ΣU² and ΣX² of what is here."""
        assert self._memory is not None
        with self._on_device():
            self._note(f.TAKEN, [one.finite for one in self.sums])
            means = {one.parameter: one.mean_row.reshape(-1) for one in self.sums if one.mean_row is not None}
            if means:
                places = [self.table.places[parameter] for parameter in means]
                here = [self._memory.means_ptr[place.matrix : place.matrix + place.matrices] for place in places]
                torch._foreach_copy_(here, list(means.values()))
            self._launch(self._norms)
        for one, note in zip(self.sums, compress(self.notes.unbind(), self._present), strict=True):
            one.u2, one.x2 = note[f.U2], note[f.X2]

    def apply_(self) -> None:
        """Last pass, with the scalars from the completed sums."""
        with self._on_device():
            self._note(f.U2, [one.u2 for one in self.sums])
            self._note(f.X2, [0.0 if one.x2 is None else one.x2 for one in self.sums])
        super().apply_()

    def _note(self, column: int, values: Sequence[Tensor | float]) -> None:
        """Note a value of each parameter with a gradient."""
        if values:
            notes = compress(self.notes[:, column].unbind(), self._present)
            torch._foreach_copy_(list(notes), list(vector(values, self.device).unbind()))

    def _views(self, parameter: Parameter) -> dict[str, Tensor]:
        """The means of a parameter, in the shapes of its state."""
        assert self._memory is not None
        if not isinstance(parameter.factoring, Factored):
            return {}
        p, q = factored_axes(parameter)
        (along_p, along_q), place = factors_along(parameter), self.table.places[parameter]
        stack = [length for axis, length in enumerate(parameter.x.shape) if axis not in (p, q)]
        views = {}
        for name, axis, gone, start in ((along_p, p, q, place.row), (along_q, q, p, place.col)):
            if name in parameter.state:
                length = parameter.x.shape[axis]
                means = self._memory.wide_ptr.as_strided((place.matrices, length), (place.stride, 1), start)
                views[name] = means.view(*stack, length).movedim(-1, axis - (gone < axis))
        return views
