"""What the ranks of sharded parameters complete between the passes of a step, on the device.

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

import torch
from torch import Tensor

from adafactor.core.contract import Parameter, Sums
from adafactor.core.equations import mean_of_rows
from adafactor.core.factoring import Factored
from adafactor.core.sums import vector
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.layout import factored_axes, factors_along
from adafactor.kernels.triton.table import Table


class Shards:
    """The sums of sharded parameters: views of what the kernels have left, and back to where they look for them."""

    def __init__(self, table: Table, notes: Tensor):
        """Nothing is known yet."""
        table.tensors[:, f.BLOCKS] = 0  # ΣU² does not come from blocks of columns
        self._table, self._notes = table, notes
        self._numbers = {parameter: number for number, parameter in enumerate(table.parameters)}
        self._owned: tuple[tuple[Parameter, ...], Tensor, Tensor] | None = None

    def sums_of_moments(self, wide: Tensor, present: Sequence[bool]) -> list[Sums]:
        """What is here of the means of G² + ε₁, and whether G² is finite here, where there is a gradient."""
        flags = self._notes[:, f.TAKEN] != 0
        finite = flags.tolist() if flags.is_cpu else flags.unbind()
        sums = []
        for parameter, is_finite, is_here in zip(self._table.parameters, finite, present, strict=True):
            if is_here:
                views = self._views(parameter, wide)
                sums.append(Sums(parameter, is_finite, views.get("row"), views.get("col")))
        self._add_mean_rows(sums)
        return sums

    def note_moments(self, sums: Sequence[Sums], means: Tensor) -> None:
        """Note the decision of all ranks, and mean(R) where they have found it."""
        self._note(f.TAKEN, sums, [one.finite for one in sums])
        completed = {one.parameter: one.mean_row.reshape(-1) for one in sums if one.mean_row is not None}
        if completed:
            places = [self._table.places[parameter] for parameter in completed]
            here = [means[place.matrix : place.matrix + place.matrices] for place in places]
            torch._foreach_copy_(here, list(completed.values()))

    def read_norms(self, sums: Sequence[Sums]) -> None:
        """Hand over ΣU² and ΣX² of what is here."""
        notes = self._notes.unbind()
        for one in sums:
            note = notes[self._numbers[one.parameter]]
            one.u2, one.x2 = note[f.U2], note[f.X2]

    def note_norms(self, sums: Sequence[Sums]) -> None:
        """Note ΣU² and ΣX² of all ranks."""
        self._note(f.U2, sums, [one.u2 for one in sums])
        self._note(f.X2, sums, [0.0 if one.x2 is None else one.x2 for one in sums])

    def _add_mean_rows(self, sums: Sequence[Sums]) -> None:
        """Find this rank's share of mean(R), where it is wanted: two sums for each parameter, the rest together."""
        found: dict[int, tuple[Tensor, Tensor]] = {}  # by place among `sums`
        for i, one in enumerate(sums):
            if (shard := one.parameter.shard) and (pair := shard.row_sums(one.rows, one.parameter.state.get("row"))):
                found[i] = pair
        if not found:
            return
        owner, n = self._owners(tuple(sums[i].parameter for i in found))
        new, old = (torch.cat([pair[k].reshape(-1) for pair in found.values()]) for k in (0, 1))
        beta2, w2 = (self._notes[:, column].index_select(0, owner) for column in (f.BETA2, f.W2))
        means = mean_of_rows(new, old, n, beta2, w2).split([pair[0].numel() for pair in found.values()])
        for (i, pair), mean in zip(found.items(), means, strict=True):
            sums[i].mean_row = mean.view(pair[0].shape)

    def _owners(self, parameters: tuple[Parameter, ...]) -> tuple[Tensor, Tensor]:
        """The number of each matrix's parameter here, and the rows of the whole matrix; made once for the same ones."""
        if self._owned is None or self._owned[0] != parameters:
            owner, n = [], []
            for parameter in parameters:
                assert isinstance(parameter.factoring, Factored)
                matrices = self._table.places[parameter].matrices
                owner += [self._numbers[parameter]] * matrices
                n += [parameter.factoring.shape[parameter.factoring.row_axis]] * matrices
            rows = torch.tensor(n, dtype=torch.float64, device=self._notes.device)
            self._owned = parameters, torch.tensor(owner, device=self._notes.device), rows
        return self._owned[1:]

    def _note(self, column: int, sums: Sequence[Sums], values: Sequence[Tensor | float]) -> None:
        """Note a value of each parameter with a gradient."""
        if values:
            notes = self._notes[:, column].unbind()
            here = [notes[self._numbers[one.parameter]] for one in sums]
            torch._foreach_copy_(here, list(vector(values, self._notes.device).unbind()))

    def _views(self, parameter: Parameter, wide: Tensor) -> dict[str, Tensor]:
        """The means of a parameter, in the shapes of its state."""
        if not isinstance(parameter.factoring, Factored):
            return {}
        p, q = factored_axes(parameter)
        (along_p, along_q), place = factors_along(parameter), self._table.places[parameter]
        stack = [length for axis, length in enumerate(parameter.x.shape) if axis not in (p, q)]
        views = {}
        for name, axis, summed, start in ((along_p, p, q, place.row), (along_q, q, p, place.col)):
            if name in parameter.state:
                length = parameter.x.shape[axis]
                means = wide.as_strided((place.matrices, length), (place.stride, 1), start)
                views[name] = means.view(*stack, length).movedim(-1, axis - (summed < axis)).unsqueeze(summed)
        return views
