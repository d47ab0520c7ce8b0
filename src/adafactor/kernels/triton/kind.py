"""What kernels are compiled for: the kind of a parameter, and with which options each of them is launched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from adafactor.core.contract import Parameter
from adafactor.core.factoring import statistics_dtype
from adafactor.core.momentum import BLOCK
from adafactor.kernels.memory_order import has_rounded_momentum
from adafactor.kernels.triton.layout import block_lanes, is_aligned
from adafactor.kernels.triton.sizes import HELD, Tiling, tiling

TYPES = {getattr(torch, n): getattr(tl, n) for n in ("float64", "float32", "bfloat16", "float16", "int8")}
SHARED_MEMORY = 164 * 2**10  # bytes of a multiprocessor of an A100


def source_of(folder: Path) -> str:
    """Hash the source of this backend: all columns, sizes and types that kernels are compiled with."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:16]


SOURCE = source_of(Path(__file__).parent)


@dataclass(frozen=True)
class Kind:
    """What tensors that share their launches have in common. It follows from a parameter alone, so its bits do, too.

    Kernels are given it as a constant: the names in capitals are theirs. Triton keeps compiled code on disk and
    compiles anew when a kernel's own source or a constant has changed, but not when an attribute of a module or of a
    constant has. So every kind names the source of all of them.
    """

    x: torch.dtype
    g: torch.dtype
    momentum: str | None  # what it averages
    rounding: str
    aligned: bool  # 16 bytes can be read at once
    momentum_dtype: torch.dtype | None = None  # None: that of the statistics
    momentum_random: bool = False
    lanes: int = 0  # of a block of int8 that is no run of 128 columns; 0: all are, or there is none
    source: str = SOURCE

    @classmethod
    def of(cls, parameter: Parameter) -> Kind:
        """Return the kind of a parameter."""
        s, x, g = parameter.settings, parameter.x.dtype, parameter.gradient.dtype
        kind = cls(x, g, s.momentum_of if s.beta1 else None, parameter.rounding, is_aligned(parameter))
        if not has_rounded_momentum(parameter):
            return kind
        dtype = torch.int8 if "momentum_scale" in parameter.state else torch.bfloat16
        is_random, lanes = True, block_lanes(parameter)
        return replace(kind, momentum_dtype=dtype, momentum_random=is_random, lanes=lanes)

    @property
    def stat(self) -> torch.dtype:
        """The dtype of R, C and V̂."""
        return statistics_dtype(self.x)

    X = property(lambda self: TYPES[self.x])
    G = property(lambda self: TYPES[self.g])
    STAT = property(lambda self: TYPES[self.stat])
    MOMENTUM = property(lambda self: TYPES[self.momentum_dtype or self.stat])
    OF_UPDATE = property(lambda self: self.momentum in ("update", "direction"))  # of U, times αₜ or not
    OF_GRADIENT = property(lambda self: self.momentum == "gradient")
    OF_DIRECTION = property(lambda self: self.momentum == "direction")
    IN_BLOCKS = property(lambda self: self.momentum_dtype == torch.int8)
    BLOCK_LANES = property(lambda self: self.lanes or BLOCK)
    RANDOM = property(lambda self: self.STOCHASTIC or self.momentum_random)
    STOCHASTIC = property(lambda self: self.rounding == "stochastic")
    KAHAN = property(lambda self: self.rounding == "kahan")

    @property
    def LINES_AT_ONCE(self) -> int:  # noqa: N802 - a constant of the kernels
        """Lines of a tile of the last pass: a double takes two registers, and blocks take some, odd ones more."""
        is_wide = self.stat == torch.float64
        return 4 >> is_wide + (bool(self.lanes) or (is_wide and self.IN_BLOCKS))

    @property
    def held(self) -> int:
        """Elements of G that a program of 8 warps has in registers, and as many of a momentum of gradients.

        A double takes two registers, and arithmetic with it some more.
        """
        return HELD >> 2 * (self.x == torch.float64) >> (self.momentum == "gradient")

    def tiling(self, columns: int | None) -> Tiling:
        """Return how the first pass holds rows of so many columns; None: the tensor is unfactored.

        A program holds twice as many elements with twice the warps, but not if they are loaded one by one.
        """
        if columns is None:
            return Tiling(self.held // 1024)
        return tiling(columns, self.held, 2 * self.held if self.aligned else self.held)

    @property
    def ragged(self) -> Kind:
        """The same where 16 bytes cannot be read at once."""
        return replace(self, aligned=False)

    def first_pass(self, how: Tiling, raw: bool = False, room: int = SHARED_MEMORY) -> dict[str, Any]:
        """Return what the first pass is launched with, where a multiprocessor has so much shared memory.

        Elements are loaded two tiles ahead, or one tile where the memory would not do for 16 warps. Those that are
        loaded one by one are not loaded ahead, as that takes an address for each; and half as many are held by a
        thread: a program whose part of a row is longer takes one half of it after the other.
        """
        stages, ahead = 1, 2 * (16 // how.warps) * how.rows * how.chunk * max(how.chunks, 1) * self.g.itemsize
        if self.aligned:
            stages = 3 if ahead < room - 2**13 else 2
        else:
            how = replace(how, warps=16, chunks=-(-how.chunks // (2 if how.chunk * how.chunks > self.held else 1)))
        same = replace(self._plain(self.stat), g=self.g, lanes=self.lanes)
        if self.OF_GRADIENT:
            same = replace(same, momentum=self.momentum, momentum_dtype=self.momentum_dtype)
        return {"TILING": how, "STAGES": stages, "RAW": raw} | same._options(how.warps)

    def fold(self, raw: bool = False) -> dict[str, Any]:
        """Return what `fold` is launched with."""
        return {"RAW": raw} | self._plain(self.stat)._options(4)

    def measure(self) -> dict[str, Any]:
        """Return what `begin_step` and `measure` are launched with."""
        dtype = torch.int8 if self.IN_BLOCKS else None  # tiles are others then
        return replace(self._plain(self.x), momentum_dtype=dtype, lanes=self.lanes)._options(8)

    def between(self) -> dict[str, Any]:
        """Return what the kernels between the passes of a shard are launched with."""
        return replace(self._plain(self.stat), aligned=False)._options(8)

    def last_pass(self, writes: bool = True) -> dict[str, Any]:
        """Return what the last pass is launched with: many programs at once do better than loading ahead."""
        registers = 128
        if self.aligned and self.x != torch.float64 and not self.momentum and writes:
            registers = 80 if self.x == self.g or self.rounding == "nearest" else 128
            if self.x == self.g == torch.bfloat16 and self.rounding == "nearest":
                registers = 64
        kind = self if writes else replace(self, rounding="nearest", momentum_random=False)
        return {"WRITES": writes} | kind._options(8 if self.aligned else 16, registers)

    def _plain(self, dtype: torch.dtype) -> Kind:
        """The kind that stands for all with this dtype, to a kernel that sees neither G nor momentum."""
        return Kind(dtype, dtype, None, "nearest", self.aligned)

    def _options(self, warps: int, registers: int = 128) -> dict[str, Any]:
        """The kind, and the compiler's options; only NVIDIA's can bound the registers of a thread."""
        others = (getattr(torch.version, name, None) for name in ("hip", "xpu"))
        bound = {} if any(others) else {"maxnreg": registers}
        return {"KIND": self, "num_warps": warps, "enable_fp_fusion": False} | bound
