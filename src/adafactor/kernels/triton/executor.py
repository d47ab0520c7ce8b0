"""Parameters of one kind on one device: their tables, and the launches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from adafactor.core.contract import Gradients, Parameter, Scale, Sums
from adafactor.core.factoring import statistics_dtype
from adafactor.core.settings import Settings
from adafactor.kernels.triton import fields as f
from adafactor.kernels.triton import rates
from adafactor.kernels.triton.first_pass import first_pass
from adafactor.kernels.triton.fold import fold
from adafactor.kernels.triton.last_pass import begin_step, last_pass, measure
from adafactor.kernels.triton.sizes import ALIGNMENT, Tiling, held
from adafactor.kernels.triton.table import Chunk, Table

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOMENTA = {"update": 1, "gradient": 2}
ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}
LEAST_SCRATCH = 64 * 2**20  # bytes
SHARED_MEMORY = 164 * 2**10  # bytes of a multiprocessor of an A100
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
        """Return the kind of a parameter."""
        s, form = parameter.settings, parameter.gradient
        momentum = MOMENTA[s.momentum_of] if s.beta1 else 0
        return cls(parameter.x.dtype, form.dtype, momentum, ROUNDINGS[parameter.rounding], aligned)

    @property
    def held(self) -> int:
        """Elements that a program of the first pass has in registers; twice as many for long rows."""
        return held(self.x == torch.float64, self.momentum == 2)

    @property
    def ragged(self) -> Kind:
        """The same where 16 bytes cannot be read at once."""
        return replace(self, aligned=False)

    def first_pass(self, how: Tiling | None, raw: bool = False, room: int = SHARED_MEMORY) -> dict[str, Any]:
        """Return what the first pass is compiled with, where a multiprocessor has so much shared memory.

        Elements that are loaded one by one are not loaded ahead, as that takes an address for each; and half as many
        are held by a thread, so that the longest rows are read twice. Others are loaded two tiles ahead, or one tile
        where the memory would not do for 16 warps.
        """
        factored, how = how is not None, how or Tiling(self.held // 1024, 1, 1, 8)
        ahead = 2 * (16 // how.warps) * how.rows * how.chunk * max(how.chunks, 1) * self.g.itemsize
        if not self.aligned:
            how = how._replace(warps=16, chunks=0 if how.chunk * how.chunks > self.held else how.chunks)
        return {
            **self._types("GT", "ST"),
            "OF_GRADIENT": self.momentum == 2,
            "RAW": raw,
            "FACTORED": factored,
            "ROWS": how.rows,
            "CHUNK": how.chunk,
            "CHUNKS": how.chunks,
            "STAGES": (3 if ahead < room - 2**13 else 2) if self.aligned else 1,
            "num_warps": how.warps,
            **register_limit(128),
        }

    def fold(self) -> dict[str, Any]:
        """Return what `fold` is compiled with."""
        return self._types("ST") | {"num_warps": 4}

    def last_pass(self) -> dict[str, Any]:
        """Return what the last pass is compiled with: many programs at once do better than loading ahead."""
        registers = 128
        if self.aligned and self.x != torch.float64 and not self.momentum:
            registers = 80 if self.x == self.g or not self.rounding else 128
            if self.x == self.g == torch.bfloat16 and not self.rounding:
                registers = 64
        options = {"MOMENTUM": self.momentum, "ROUNDING": self.rounding, "num_warps": 8 if self.aligned else 16}
        return self._types("GT", "DT", "ST") | options | register_limit(registers)

    def norms(self) -> dict[str, Any]:
        """Return what `norms` is compiled with."""
        return self._types("GT", "DT", "ST") | {"MOMENTUM": self.momentum, "num_warps": 8} | register_limit(128)

    def measure(self) -> dict[str, Any]:
        """Return what `begin_step` and `measure` are compiled with."""
        return self._types("DT", "ST") | {"num_warps": 8} | register_limit(128)

    def _types(self, *names: str) -> dict[str, Any]:
        types = {"GT": TYPES[self.g], "DT": TYPES[self.x], "ST": TYPES[statistics_dtype(self.x)]}
        return {name: types[name] for name in names} | {"ALIGNED": self.aligned, "enable_fp_fusion": False}


def register_limit(most: int) -> dict[str, int]:
    """Bound the registers of a thread; only NVIDIA's compiler has such an option."""
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
        self.kind, self.in_lockstep, self.takes_scale = kind, parameters[0].in_lockstep, True
        self.device, self.stat = parameters[0].x.device, statistics_dtype(kind.x)
        most = max(LEAST_SCRATCH, sum(p.x.nbytes for p in parameters) // 100)
        with torch.device("cpu"):  # whatever the default is
            self.table = table = Table(parameters, kind.held, most)
        self.parameters, self.sums = table.parameters, list[Sums]()
        self.groups = sorted({parameter.group for parameter in parameters})
        count = len(parameters)
        self.notes = torch.zeros(count, f.NOTES.value, dtype=torch.float64, device=self.device)
        self.notes[:, f.RMS_U.value : f.STEPS.value] = torch.nan  # no step has been taken
        self.one, self.zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
        self.given = Upload((count, f.GIVEN.value), torch.int64, self.device)
        self.numbers = Upload((max(self.groups) + 1, rates.NUMBERS.value), torch.float64, self.device)
        # what kernels are launched with, by the names of their arguments
        self.memory: dict[str, Any] = {
            name: getattr(table, name)
            for name in ("tensors", "matrices", "units", "blocks", "tiles", "shares", "checks")
        }
        self.memory["notes"] = self.notes
        self.memory["squares"] = torch.zeros(table.tile_count, dtype=torch.float64, device=self.device)
        self.memory["changes"] = torch.zeros(len(table.checks), dtype=torch.int32, device=self.device)
        self.must_measure = [parameter.settings.relative for parameter in self.parameters]
        self.relies = any(self.must_measure)  # on ΣX² that the last step has left
        self.writable = [parameter.x for parameter in self.parameters if not parameter.x.is_inference()]
        self._present: list[bool] = []
        self._grads: list[Tensor] = []
        self._lasting = set(self.memory)
        self._any_ragged = self._changed = self._has_new = False
        card = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        self._room: int = getattr(card, "shared_memory_per_multiprocessor", SHARED_MEMORY)

    # ---- the contract

    def begin(
        self, grads: Gradients, settings: Sequence[Settings], written: list[bool] | None, scale: Scale | None
    ) -> None:
        """Take what is of this step: G, the settings of the groups; upload what has changed."""
        self._changed = False
        self._present = [g is not None for g in grads]
        self._grads = [g for g in grads if g is not None]  # kept until the launches are done
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        self._any_ragged = self.kind.aligned and any(address % ALIGNMENT for address in addresses)
        if written is not None:  # ΣX² is of what was there before
            self.must_measure = [
                a or (b and p.settings.relative)
                for a, b, p in zip(self.must_measure, written, self.parameters, strict=True)
            ]
        wanted = [a and b for a, b in zip(self.must_measure, self._present, strict=True)]
        captured = self.parameters[0].metrics.captured  # lasts as long as the optimizer
        own = [settings[group] for group in range(len(self.numbers.there))]
        with self._on_device():
            if is_capturing(self.device) and self not in captured:
                captured.append(self)
            self.given.set([[address, int(b)] for address, b in zip(addresses, wanted, strict=True)])
            self.numbers.set(rates.rows_of(own))
            for group in self.groups:
                if isinstance(lr := own[group].lr, Tensor):
                    self.numbers.there[group, rates.LR.value].copy_(lr.reshape(()), non_blocking=True)
        grad_scale, found_inf = scale or (self.one, self.zero)
        self.memory |= {"given": self.given.there, "numbers": self.numbers.there}
        self.memory |= {"grad_scale": grad_scale, "found_inf": found_inf}

    def step(self) -> None:
        """Take a whole step."""
        self.moments()
        self.apply_()

    def moments(self) -> None:
        """First pass, C, and all scalars; nothing of X or the state changes."""
        table = self.table
        with self._on_device():
            self._allocate()
            self._begin_step(self.relies)
            for chunk in table.chunks:
                self._first_pass(chunk)
                (first, end), (one, other) = chunk.blocks, chunk.tensors
                place = {"first_block": first, "block_count": end - first, "first_tensor": one}
                self._launch(fold, end - first + other - one, self.kind.fold(), **place)
        if self.in_lockstep:  # a bad gradient raises
            taken = self.notes[:, f.TAKEN.value].unbind()
            everyone = zip(self.parameters, self._present, taken, strict=True)
            self.sums = [Sums(parameter, flag != 0) for parameter, is_here, flag in everyone if is_here]

    def apply_(self) -> None:
        """Last pass."""
        self._changed = self._has_new = True
        with self._on_device():
            for kind, only_ragged in self._variants():
                self._launch(last_pass, self.table.tile_count, kind.last_pass(), only_ragged=only_ragged)

    def end(self) -> list[Parameter]:
        """Let go of the gradients; tell autograd what was written behind its back."""
        self._grads, self.sums = [], []
        self.memory = {name: self.memory[name] for name in self._lasting}
        if self._changed:
            self.must_measure = [a and not b for a, b in zip(self.must_measure, self._present, strict=True)]
            torch.autograd.graph.increment_version(self.writable)
        return []

    def flush(self) -> None:
        """Hand the metrics of the steps since the last time to the parameters, without reading them."""
        if not self._has_new:
            return
        self._has_new = False
        columns = [column.value for column in (f.REPORTED_BETA2, f.RMS_X, f.REPORTED_ALPHA, f.RMS_U)]
        notes = self.notes.clone()
        self.notes[:, f.STEPS.value : f.SKIPPED.value + 1].zero_()
        counts = notes[:, f.STEPS.value : f.SKIPPED.value + 1].long()
        for i, parameter in enumerate(self.parameters):
            beta2, rms_x, alpha, rms_u = (notes[i, column] for column in columns)
            steps, clipped, skipped = counts[i].unbind()
            parameter.metrics.add(beta2, rms_x if parameter.measures_x else None, alpha, rms_u, clipped, steps)
            parameter.metrics.skipped = parameter.metrics.skipped + skipped

    # ---- inside

    def _allocate(self) -> None:
        """Take what a step needs besides the state."""
        table, empty = self.table, self._empty
        vectors, inverses, scratch = (empty(n, self.stat) for n in (table.vectors, table.vectors, table.scratch))
        self.memory |= {"vectors": vectors, "inverses": inverses, "scratch": scratch}
        self.memory["sums"] = empty(table.unit_count * f.SUMS.value, torch.float64)
        self.memory["energies"] = empty(table.block_count, torch.float64)
        self.memory["means"] = empty(table.matrix_count, torch.float64)

    def _begin_step(self, relies: bool) -> None:
        """Find the rates; where the step relies on ΣX², see to it that it is true."""
        table, count = self.table, len(self.parameters)
        checks = len(table.checks) if relies else 0
        self._launch(begin_step, count + checks, self.kind.measure(), tensor_count=count)
        if relies:
            self._launch(measure, len(table.shares), self.kind.measure())

    def _first_pass(self, chunk: Chunk, raw: bool = False) -> None:
        for kind, only_ragged in self._variants():
            for how, first, end in chunk.units:
                place = {"first_unit": first, "only_ragged": only_ragged}
                self._launch(first_pass, end - first, kind.first_pass(how, raw, self._room), **place)

    def _variants(self) -> list[tuple[Kind, int]]:
        """The kind; and where some gradients are not aligned this time, its ragged like, which steps those alone."""
        return [(self.kind, 0)] + [(self.kind.ragged, 1)] * self._any_ragged

    def _launch(self, kernel: Any, programs: int, options: dict[str, Any], **more: Any) -> None:
        """Launch a kernel with what its arguments are called."""
        memory = self.memory | more
        names = [name for name in kernel.arg_names if name.islower()]
        launch(kernel, programs, [memory[name.removesuffix("_ptr")] for name in names], options)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(max(count, 1), dtype=dtype, device=self.device)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device current: kernels are launched there."""
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
