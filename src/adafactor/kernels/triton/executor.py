"""Parameters of one kind on one device: their tables, and the launches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from adafactor.core.bucket import Parameter
from adafactor.core.factoring import statistics_dtype
from adafactor.core.settings import Settings
from adafactor.core.step import Update, not_finite
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton.cut import tile
from adafactor.kernels.triton.first_walk import first_walk
from adafactor.kernels.triton.fold import fold
from adafactor.kernels.triton.last_walk import CHECK, MEASURE, STEP, last_walk
from adafactor.kernels.triton.table import Table

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOMENTA = {"update": 1, "gradient": 2}
ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}
LEAST_SCRATCH = 64 * 2**20  # bytes
SPARE = 4  # pinned tables for graphs that are captured one after the other, without a step in between


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for. It follows from a parameter alone, so that its bits do, too."""

    x: torch.dtype
    g: torch.dtype
    momentum: int  # 0: none
    rounding: int
    aligned: bool

    @classmethod
    def of(cls, parameter: Parameter, aligned: bool) -> Kind:
        """The kind of a parameter."""
        s, form = parameter.settings, parameter.gradient
        assert form is not None
        return cls(
            parameter.x.dtype,
            form.dtype,
            MOMENTA[s.momentum_of] if s.beta1 else 0,
            ROUNDINGS[parameter.rounding],
            aligned,
        )

    @property
    def held(self) -> int:
        """Elements that a program of the first walk has in registers; twice as many for long rows."""
        return tile(self.x == torch.float64, self.momentum == 2)

    @property
    def ragged(self) -> Kind:
        """The same where 16 bytes cannot be read at once."""
        return replace(self, aligned=False)

    def first_walk(self, long: bool) -> dict[str, Any]:
        """What the first walk is compiled with.

        A multiprocessor shall hold two programs of 8 warps or one of 16. Elements that are loaded one by one are not
        loaded ahead: that takes an address for each.
        """
        held = self.held << long
        return {
            "GT": TYPES[self.g],
            "ST": TYPES[statistics_dtype(self.x)],
            "ALIGNED": self.aligned,
            "OF_GRADIENT": self.momentum == 2,
            "TILE": held,
            "LONG": long,
            "STAGES": (2 if self.g.itemsize >= 4 else 3) if self.aligned else 1,
            "num_warps": 8 if self.aligned and not long else 16,
            **_registers(128),
            "enable_fp_fusion": False,
        }

    def fold(self) -> dict[str, Any]:
        """What `fold` is compiled with."""
        stat = TYPES[statistics_dtype(self.x)]
        return {
            "ST": stat,
            "ALIGNED": self.aligned,
            "UNITS": 16,
            "BLOCK": 64,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }

    def last_walk(self, shared: bool = False) -> dict[str, Any]:
        """What the last walk is compiled with; a program that nearly always has nothing to do takes many pieces."""
        return {
            "GT": TYPES[self.g],
            "DT": TYPES[self.x],
            "ST": TYPES[statistics_dtype(self.x)],
            "ALIGNED": self.aligned,
            "MOMENTUM": self.momentum,
            "ROUNDING": self.rounding,
            "STAGES": 2 if self.aligned and not shared else 1,
            "SHARED": shared,
            "num_warps": 8 if self.aligned else 16,
            **_registers(128),
            "enable_fp_fusion": False,
        }


def _registers(most: int) -> dict[str, int]:
    """A bound on the registers of a thread; only NVIDIA's compiler has such an option."""
    others = (getattr(torch.version, name, None) for name in ("hip", "xpu"))
    return {} if any(others) else {"maxnreg": most}


def launch(kernel: Any, programs: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Run a kernel. All launches of this backend come through here."""
    if programs:
        kernel[(programs,)](*arguments, **options)


class Executor:
    """The tables of some parameters, made once and used for many steps."""

    def __init__(self, parameters: list[Parameter], kind: Kind):
        """Describe what does not change from step to step."""
        self.kind, self.together = kind, parameters[0].settings.on_nonfinite == "raise"
        self.at_once = not self.together
        device, stat = parameters[0].x.device, statistics_dtype(kind.x)
        most = max(LEAST_SCRATCH, sum(p.x.nbytes for p in parameters) // 100)
        with torch.device("cpu"):  # whatever the default is
            self.table = Table(parameters, kind.held, most)
        self.parameters = self.table.parameters
        self.updates: list[Update] = []
        self.device, self.stat = device, stat
        self.groups = sorted({parameter.group for parameter in parameters})

        def doubles(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        count = len(parameters)
        self.notes, self.rates = doubles(count, f.NOTES.value), doubles(count, f.RATES.value)
        self.notes[:, f.NOTED_RMS_U.value : f.STEPS.value] = torch.nan  # no step has been taken
        self.squares = torch.zeros(self.table.piece_count, f.SQUARES.value, dtype=stat, device=device)
        self.one, self.zero = torch.ones(1, device=device), torch.zeros(1, device=device)
        self.given = Upload((count, f.GIVEN.value), torch.int64, device)
        self.numbers = Upload((max(self.groups) + 1, f.NUMBERS.value), torch.float64, device)
        self.must_measure = [parameter.settings.relative for parameter in self.parameters]
        self.relies = any(self.must_measure)  # on ΣX² that the last step has left
        self.writable = [parameter.x for parameter in self.parameters if not parameter.x.is_inference()]
        self.scaling: tuple[Tensor, Tensor] | None = self.one, self.zero
        self._present: list[bool] = []
        self._grads: list[Tensor] = []
        self._step_memory: tuple[Tensor, ...] = ()
        self._aligned, self._changed, self._has_new = kind.aligned, False, False

    # ---- the contract

    def begin(
        self,
        grads: list[Tensor | None],
        settings: Sequence[Settings],
        written: list[bool] | None,
    ) -> None:
        """Take what is of this step: G, the settings of the groups; upload what has changed."""
        self._changed = False
        self._present = [g is not None for g in grads]
        self._grads = [g for g in grads if g is not None]  # kept until the launches are done
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        self._aligned = self.kind.aligned and not any(address % 16 for address in addresses)
        if written is not None:  # ΣX² is of what was there before
            self.must_measure = [
                a or (b and p.settings.relative)
                for a, b, p in zip(self.must_measure, written, self.parameters, strict=True)
            ]
        wanted = [a and b for a, b in zip(self.must_measure, self._present, strict=True)]
        captured = self.parameters[0].metrics.captured  # lasts as long as the optimizer
        with self._on_device():
            if is_capturing(self.device) and self not in captured:
                captured.append(self)
            self.given.set([[address, int(b)] for address, b in zip(addresses, wanted, strict=True)])
            self._set_numbers(settings)

    def step(self) -> None:
        """Take a whole step."""
        self.moments()
        self.apply_()

    def moments(self) -> None:
        """First walk, C, and all scalars; nothing of X or the state changes."""
        table, empty = self.table, self._empty
        with self._on_device():
            vectors, scratch = empty(table.vectors, self.stat), empty(table.scratch, self.stat)
            sums = empty(table.unit_count * f.SUMS.value, torch.float64)
            energies, means = empty(table.block_count, torch.float64), empty(table.matrix_count, torch.float64)
            self._step_memory = vectors, energies, means
            if self.relies:
                self._last_walk(CHECK.value, table.checks)
                self._last_walk(MEASURE.value, table.shares)
            read = self.given.there, self.numbers.there, self.rates
            for chunk in table.chunks:
                for (first, end), long in ((chunk.units, False), (chunk.long_units, True)):
                    leaves = vectors, scratch, sums, self._scale, first
                    arguments: tuple[Any, ...] = (table.tensors, table.matrices, table.units, *read, *leaves)
                    launch(first_walk, end - first, arguments, self._now.first_walk(long))
                (first, end), (one, other) = chunk.blocks, chunk.tensors
                arguments = (table.tensors, table.matrices, table.blocks, *read, self.notes, vectors, scratch, sums)
                arguments += energies, means, self.squares, self._scale, self._found_inf, first, end - first, one
                launch(fold, end - first + other - one, arguments, self._now.fold())

    def admit(self) -> None:
        """Raise where a bad gradient shall; to know it, the host waits here."""
        if self.together:
            taken = self.notes[:, f.TAKEN.value].tolist()
            for parameter, is_here, ok in zip(self.parameters, self._present, taken, strict=True):
                if is_here and ok == 0:
                    raise not_finite(parameter)

    def factors(self) -> None:
        """Has been done."""

    def energy(self) -> None:
        """Has been done, in the first walk."""

    def conclude(self) -> None:
        """Has been done, but for clipping, which the last walk begins with."""

    def apply_(self) -> None:
        """Last walk."""
        self._changed = self._has_new = True
        with self._on_device():
            self._last_walk(STEP.value, self.table.spans)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self._grads, self._step_memory, self.scaling = [], (), (self.one, self.zero)
        if self._changed:
            self.must_measure = [a and not b for a, b in zip(self.must_measure, self._present, strict=True)]
            torch.autograd.graph.increment_version(self.writable)
        return []

    def flush(self) -> None:
        """Hand the figures of the steps since the last time to the traces, without reading them."""
        if not self._has_new:
            return
        self._has_new = False
        columns = [f.NOTED_BETA2, f.NOTED_RMS_X, f.NOTED_ALPHA, f.NOTED_RMS_U]
        first = f.NOTED_RMS_U.value
        found = self.notes[:, first : f.SKIPPED.value + 1].clone()
        self.notes[:, f.STEPS.value : f.SKIPPED.value + 1].zero_()
        counts = found[:, f.STEPS.value - first :].long()
        for i, parameter in enumerate(self.parameters):
            beta2, rms_x, alpha, rms_u = (found[i, column.value - first] for column in columns)
            steps, clipped, skipped = counts[i].unbind()
            parameter.metrics.add(beta2, rms_x if parameter.measures_x else None, alpha, rms_u, clipped, steps)
            parameter.metrics.skipped = parameter.metrics.skipped + skipped

    # ---- inside

    @property
    def _scale(self) -> Tensor:
        return self.scaling[0] if self.scaling is not None else self.one

    @property
    def _found_inf(self) -> Tensor:
        return self.scaling[1] if self.scaling is not None else self.zero

    def _last_walk(self, what: int, spans: Tensor) -> None:
        table = self.table
        arguments: tuple[Any, ...] = (table.tensors, table.matrices, table.pieces, spans)
        arguments += self.given.there, self.numbers.there, self.notes, *self._step_memory, self.squares
        launch(last_walk, len(spans), (*arguments, self._scale, what), self._now.last_walk(what == MEASURE.value))

    @property
    def _now(self) -> Kind:
        """The kind, or its like for gradients that are not aligned this time."""
        return self.kind if self._aligned == self.kind.aligned else self.kind.ragged

    def _set_numbers(self, settings: Sequence[Settings]) -> None:
        rows = [[0.0] * f.NUMBERS.value for _ in range(len(self.numbers.there))]
        moving = []
        for group in self.groups:
            s = settings[group]
            if isinstance(s.lr, Tensor):
                moving.append((group, s.lr))
            for column, value in (
                (f.LR, 0.0 if isinstance(s.lr, Tensor) else s.lr),
                (f.DECAYS, s.lr_decay == "rsqrt"),
                (f.RELATIVE, s.relative),
                (f.BETA1, s.beta1),
                (f.OF_GRADIENT, s.momentum_of == "gradient"),
                (f.BETA2, -1.0 if s.beta2 is None else s.beta2),
                (f.RATE, s.decay_rate),
                (f.CLIP, s.clip or 0.0),
                (f.EPS1, s.eps[0]),
                (f.EPS2, s.eps[1]),
                (f.WEIGHT_DECAY, s.weight_decay),
                (f.SIGN, -1.0 if s.maximize else 1.0),
                (f.IGNORE, s.on_nonfinite == "ignore"),
            ):
                rows[group][column.value] = float(value)
        before = self.numbers.set(rows) or rows
        if any(row[c.value] != old[c.value] for row, old in zip(rows, before, strict=True) for c in (f.BETA2, f.RATE)):
            self.rates.zero_()  # of no t: every program computes its own
        for group, lr in moving:
            self.numbers.there[group, f.LR.value].copy_(lr.reshape(()), non_blocking=True)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max(count, 1), dtype=dtype, device=self.device)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the device that is current."""
        if self.device.type == "cpu":
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(self.device).device(self.device)
        return context


class Upload:
    """A small table on the device, uploaded when it has changed, without a wait.

    Each upload comes from pinned memory of its own, which torch does not use again before the copy is done. A graph
    that is being captured repeats its copy with every replay, so it has a table and memory of its own that last.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        """Nothing is there yet."""
        self._there = torch.zeros(shape, dtype=dtype, device=device)
        self._here: list[list[Any]] = [[None] * shape[1] for _ in range(shape[0])]
        self._captured: list[Tensor] = []
        self._spare = [self._pinned() for _ in range(SPARE)]  # while a graph is captured, none should be taken
        self.there = self._there  # what the kernels of this step read
        self.uploads = 0

    def set(self, rows: list[list[Any]]) -> list[list[Any]] | None:
        """Upload these rows if they are not there; return what was there if it was something else."""
        self.there, before = self._there, self._here
        capturing = is_capturing(self._there.device)
        if not capturing:
            self._spare += [self._pinned() for _ in range(SPARE - len(self._spare))]
            if rows == before:
                return None
        new = self._spare.pop() if self._spare else self._pinned()
        if capturing:
            self.there = torch.empty_like(self._there)
            self._captured += [new, self.there]
        else:
            self._here = rows
        self.there.copy_(new.copy_(torch.tensor(rows, dtype=new.dtype, device="cpu")), non_blocking=True)
        self.uploads += 1
        return before if rows != before else None

    def _pinned(self) -> Tensor:
        there = self._there
        return torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=there.is_cuda)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
